// SPDX-License-Identifier: Apache-2.0
// faultline inspect: what a capture or a file of ours holds, and what can be told of it at a glance.
#include <algorithm>
#include <cmath>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <faultline/attribution/capture.hpp>
#include <faultline/base/counted.hpp>
#include <faultline/base/error.hpp>
#include <faultline/cli/capture_summary.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/record/capture.hpp>
#include <faultline/record/record_file.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/record/rehearsal.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

using nlohmann::ordered_json;

std::string shape_of(const std::vector<Axis>& axes) {
    std::vector<std::string> parts;
    for (const Axis& axis : axes)
        parts.push_back(axis.name.empty() ? fmt::format("{}", axis.size) : fmt::format("{} {}", axis.name, axis.size));
    return parts.empty() ? "one value" : fmt::format("{}", fmt::join(parts, ", "));
}

// --- a file of ours -------------------------------------------------------------------------------------------------

ordered_json manifest_json(const Manifest& m) {
    ordered_json inputs = ordered_json::array();
    for (const InputHash& input : m.inputs) inputs.push_back({{"path", input.path}, {"hash", input.hash}});
    return {{"kind", m.kind},
            {"schema", m.schema},
            {"schema_version", m.schema_version},
            {"created_utc", m.created_utc},
            {"command_line", m.command_line},
            {"config_toml", m.config_toml},
            {"git_commit", m.git_commit},
            {"build", m.build},
            {"cpu", m.cpu},
            {"gpu", m.gpu},
            {"seed", m.seed},
            {"inputs", std::move(inputs)}};
}

ordered_json datasets_json(const RecordReader& file) {
    ordered_json datasets = ordered_json::array();
    for (const std::string& path : file.datasets()) {
        ordered_json axes = ordered_json::array();
        for (const Axis& axis : file.axes(path)) axes.push_back({{"name", axis.name}, {"size", axis.size}});
        datasets.push_back({{"name", path},
                            {"axes", std::move(axes)},
                            {"units", file.attribute(path, "units").value_or("")},
                            {"long_name", file.attribute(path, "long_name").value_or("")}});
    }
    return datasets;
}

/// The second and third dataset of a value that a double need not hold (RecordFile::write_wide).
bool is_companion(const std::string& name) { return name.ends_with("_mantissa") || name.ends_with("_exponent2"); }

/// Datasets of one group over the same dimensions in one row.
Listing datasets_by_group(const RecordReader& file) {
    Listing listing{"datasets", {{"group", "group", {}}, {"axes", "over", {}}, {"names", "datasets", {}, true}}};
    for (const std::string& path : file.datasets()) {
        if (is_companion(path)) continue;
        const std::size_t slash = path.rfind('/');
        const std::string group = slash == std::string::npos ? "" : path.substr(0, slash);
        const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
        const std::string axes = shape_of(file.axes(path));
        std::vector<Column>& columns = listing.columns;
        if (!columns[0].values.empty() && columns[0].values.back() == group && columns[1].values.back() == axes) {
            columns[2].values.back() += " " + name;
            continue;
        }
        columns[0].values.push_back(group);
        columns[1].values.push_back(axes);
        columns[2].values.push_back(name);
    }
    return listing;
}

Status show_record(const RecordReader& file, const Invocation& call) {
    if (!call.common.output.empty())
        throw RequestError(
            fmt::format("{}: expected none: only a capture's summary can be written", call.settings.where("output")));
    const Manifest m = file.manifest();
    if (call.common.json) {
        print(ordered_json{{"schema", "faultline.inspect/1"},
                           {"input", file.name()},
                           {"manifest", manifest_json(m)},
                           {"datasets", datasets_json(file)}}
                  .dump(1, ' ', false, ordered_json::error_handler_t::replace) +
              "\n");
        return Status::done;
    }
    const auto line = [](std::string_view what, const std::string& text) {
        return text.empty() ? "" : fmt::format("{:<8} {}\n", what, escaped(text, 2000));
    };
    std::string out =
        fmt::format("{}: {}{}\n", file.name(), m.kind,
                    file.attribute("", "complete").value_or("1") == "0" ? ", interrupted: not complete" : "");
    out += line("written", m.created_utc) + line("by", m.command_line) + line("commit", m.git_commit) +
           line("build", m.build) + line("cpu", m.cpu);
    for (const InputHash& input : m.inputs) out += line("from", input.path + "  " + input.hash);
    print(out + "\n" + text_of(datasets_by_group(file)));
    return Status::done;
}

// --- a capture ------------------------------------------------------------------------------------------------------

std::string number(double x) { return std::isnan(x) ? "" : fmt::format("{:.4g}", x); }

std::string layer_text(const LayerSummary& layer) {
    if (!layer.problem.empty()) return fmt::format("\n{}\n  cannot be attributed: {}\n", layer.name, layer.problem);
    const auto count = [](std::ptrdiff_t least, std::ptrdiff_t most, std::string_view one, std::string_view more) {
        return (least == most ? "" : fmt::format("{} to ", least)) + counted(most, one, more);
    };
    std::string out = fmt::format(
        "\n{}  {}{} ({} of keys), {} x {}, head_dim {}{}, {}, scale {:.6g}{}{}{}{}\n", layer.name,
        layer.sequences == 1 ? "" : fmt::format("{} sequences, ", layer.sequences),
        counted(layer.heads, "head", "heads"), layer.kv_heads, count(layer.least_q, layer.seq_q, "query", "queries"),
        count(layer.least_k, layer.seq_k, "key", "keys"), layer.head_dim,
        layer.head_dim_v == layer.head_dim ? "" : fmt::format(" (v: {})", layer.head_dim_v),
        layer.causal ? "causal" : "not causal", layer.scale,
        layer.softcap > 0 ? fmt::format(", softcap {:g}", layer.softcap) : "", layer.has_mask ? ", mask" : "",
        layer.has_sink ? ", sink" : "", layer.has_dropout ? ", dropout" : "");
    out += fmt::format("  largest |logit| {:.5g}; keys: |mean| / spread {:.3g}; observed kernels: {}\n",
                       layer.max_logit, layer.key_mean_over_spread,
                       layer.kernels.empty() ? "none" : fmt::format("{}", fmt::join(layer.kernels, "; ")));
    Listing tensors{"tensors",
                    {{"", "  tensor", {}},
                     {"", "dtype", {}},
                     {"", "shape", {}},
                     {"", "least", {}},
                     {"", "largest", {}},
                     {"", "rms", {}},
                     {"", "", {}, true}}};
    for (const TensorSummary& t : layer.tensors) {
        const std::vector<std::string> row{"  " + t.name,
                                           t.dtype,
                                           t.shape,
                                           number(t.least),
                                           number(t.largest),
                                           number(t.rms),
                                           t.nonfinite > 0 ? fmt::format("{} not finite", t.nonfinite) : ""};
        for (std::size_t c = 0; c < row.size(); ++c) tensors.columns[c].values.push_back(row[c]);
    }
    return out + text_of(tensors);
}

/// JSON has no NaN: what a layer with a problem has not is left out.
ordered_json layer_json(const LayerSummary& layer) {
    ordered_json tensors = ordered_json::array();
    for (const TensorSummary& t : layer.tensors) {
        ordered_json item{{"name", t.name}, {"dtype", t.dtype}, {"shape", t.extents}, {"nonfinite", t.nonfinite}};
        if (!std::isnan(t.least)) item.update({{"least", t.least}, {"largest", t.largest}, {"rms", t.rms}});
        tensors.push_back(std::move(item));
    }
    ordered_json out{{"name", layer.name}};
    if (layer.problem.empty()) {
        out.update(ordered_json{{"heads", layer.heads},
                                {"kv_heads", layer.kv_heads},
                                {"sequences", layer.sequences},
                                {"seq_q", layer.seq_q},
                                {"seq_k", layer.seq_k},
                                {"head_dim", layer.head_dim},
                                {"head_dim_v", layer.head_dim_v},
                                {"causal", layer.causal},
                                {"scale", layer.scale},
                                {"softcap", layer.softcap},
                                {"mask", layer.has_mask},
                                {"sink", layer.has_sink},
                                {"dropout", layer.has_dropout},
                                {"max_logit", layer.max_logit},
                                {"key_mean_over_spread", layer.key_mean_over_spread},
                                {"observed", layer.kernels}});
    } else {
        out["problem"] = layer.problem;
    }
    out["tensors"] = std::move(tensors);
    return out;
}

void write_layers(const std::vector<LayerSummary>& layers, const std::string& path, const Invocation& call) {
    Manifest manifest = call.manifest("inspect");
    manifest.inputs = hash_inputs(path);
    RecordFile file = RecordFile::create(call.common.output, manifest);
    std::vector<std::string> names;
    std::vector<double> logit, spread;
    for (const LayerSummary& layer : layers) {
        names.push_back(layer.name);
        logit.push_back(layer.problem.empty() ? layer.max_logit : NAN);
        spread.push_back(layer.problem.empty() ? layer.key_mean_over_spread : NAN);
    }
    const std::vector<Axis> axes{{"layer", static_cast<std::int64_t>(names.size())}};
    file.coordinate("layer", names);
    file.write("max_logit", logit, axes, {"largest magnitude of the scaled scores", "1"});
    file.write("key_mean_over_spread", spread, axes,
               {"norm of the mean key over the rms distance of the keys from it", "1"});
    file.commit();
}

Status show_capture(const TensorSet& file, const std::string& path, const Invocation& call) {
    const std::vector<LayerSummary> layers = summarize_layers(file);
    const std::vector<TensorSummary> others = other_tensors(file, layers);
    if (!call.common.output.empty()) write_layers(layers, path, call);
    if (call.common.json) {
        ordered_json list = ordered_json::array(), unused = ordered_json::array();
        for (const LayerSummary& layer : layers) list.push_back(layer_json(layer));
        for (const TensorSummary& tensor : others) unused.push_back(tensor.name);
        print(ordered_json{{"schema", "faultline.inspect/1"},
                           {"input", file.source},
                           {"metadata", file.metadata},
                           {"layers", std::move(list)},
                           {"unused", std::move(unused)}}
                  .dump(1, ' ', false, ordered_json::error_handler_t::replace) +
              "\n");
        return Status::done;
    }
    std::string out = fmt::format("{}: capture, {} layer{}, {} tensors\n", file.source, layers.size(),
                                  layers.size() == 1 ? "" : "s", file.tensors.size());
    std::vector<std::string> facts;
    for (const auto& [key, value] : file.metadata) facts.push_back(fmt::format("{}={}", escaped(key), escaped(value)));
    for (const std::string& line : wrapped(fmt::format("{}", fmt::join(facts, "  ")), 106)) out += "  " + line + "\n";
    for (const LayerSummary& layer : layers) out += layer_text(layer);
    if (!others.empty()) {
        out +=
            "\nNot used, since no name of theirs is one that a capture has, LAYER.q or LAYER.KERNEL.dq (docs/captures.md):\n";
        for (const TensorSummary& tensor : others)
            out += fmt::format("  {}  {} {}\n", tensor.name, tensor.dtype, tensor.shape);
    }
    print(out);
    return Status::done;
}

/// What `train` continues from: the step, the settings that the next one depends on, and the tensors.
Status show_checkpoint(const TensorSet& file, const Invocation& call) {
    if (!call.common.output.empty())
        throw RequestError(
            fmt::format("{}: {} is a checkpoint, of which nothing is summarised in a file: expected no output",
                        call.settings.where("output"), file.source));
    constexpr std::string_view prefix = "config.";
    ordered_json config = ordered_json::object(), state = ordered_json::object(), tensors = ordered_json::array();
    std::vector<std::string> settings;
    for (const auto& [key, value] : file.metadata) {
        if (!key.starts_with(prefix)) {
            state[key] = value;
            continue;
        }
        config[key.substr(prefix.size())] = value;
        settings.push_back(fmt::format("{}={}", escaped(key.substr(prefix.size())), escaped(value)));
    }
    const auto metadata = [&](const char* key) {
        const auto found = file.metadata.find(key);
        return found == file.metadata.end() ? std::string("?") : escaped(found->second);
    };
    std::string out = fmt::format("{}: checkpoint of faultline train, next step {}, {} optimizer steps, {} tensors\n",
                                  file.source, metadata("next_step"), metadata("optimizer_steps"), file.tensors.size());
    for (const std::string& line : wrapped(fmt::format("{}", fmt::join(settings, "  ")), 106))
        out += "  " + line + "\n";
    out += "\n";
    for (const auto& [name, tensor] : file.tensors) {
        out += fmt::format("  {:<24} {} {}\n", escaped(name), print_name(tensor.dtype), shape_text(tensor.shape));
        tensors.push_back({{"name", name}, {"dtype", print_name(tensor.dtype)}, {"shape", tensor.shape}});
    }
    if (call.common.json)
        out = ordered_json{{"schema", "faultline.inspect/1"},
                           {"input", file.source},
                           {"metadata", std::move(state)},
                           {"config", std::move(config)},
                           {"tensors", std::move(tensors)}}
                  .dump(1, ' ', false, ordered_json::error_handler_t::replace) +
              "\n";
    print(out);
    return Status::done;
}

bool is_checkpoint(const TensorSet& file) {
    const auto schema = file.metadata.find("schema");
    return schema != file.metadata.end() && schema->second.starts_with("faultline.checkpoint/");
}

Status run(const std::string& path, const Invocation& call) {
    if (path.empty())
        throw RequestError(
            "FILE: is missing: expected a capture (safetensors, .npy folder, HDF5) or a file that faultline wrote");
    if (path.ends_with(".h5") || path.ends_with(".hdf5")) {
        rehearse_reading(path, Rehearsal::structure);
        const RecordReader file(path);
        const std::string kind = file.manifest().kind;
        if (!kind.empty() && kind != "capture") return show_record(file, call);
    }
    const TensorSet file = read_tensors(path);
    return is_checkpoint(file) ? show_checkpoint(file, call) : show_capture(file, path, call);
}

}  // namespace

Command inspect_command() {
    return {"inspect", "Say what a capture, or a file that faultline wrote, holds",
            "  faultline inspect run7.safetensors", [](Settings& settings) -> Run {
                const auto path = std::make_shared<std::string>();
                settings.positional("file", *path, "A capture, or a file that faultline wrote: HDF5, or a checkpoint");
                return [path](const Invocation& call) { return run(*path, call); };
            }};
}

}  // namespace faultline::cli
