// SPDX-License-Identifier: Apache-2.0
// faultline generate: inputs that find faults, as captures.
#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/base/counted.hpp>
#include <faultline/base/error.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/generation/maximize.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/safetensors.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

struct GenerateSettings {
    std::string families, dtype = "bfloat16", plan, maximize;
    std::int64_t batch = 1, heads = 0, kv_heads = 0, seq = 0, keys = 0, head_dim = 0, seed = 0, evaluations = 2000;
    std::optional<double> largest;
    std::optional<bool> causal;
    bool list = false;
};

Status list_families(const Invocation& call) {
    Listing listing{"families",
                    {{"name", "family", {}}, {"reaches", "reaches", {}}, {"description", "inputs", {}, true}}};
    for (const InputFamily& family : input_families()) {
        listing.columns[0].values.emplace_back(family.name);
        listing.columns[1].values.emplace_back(family.reaches);
        listing.columns[2].values.emplace_back(family.description);
    }
    std::swap(listing.columns[1], listing.columns[2]);
    if (call.common.json || !call.common.output.empty()) {
        present(listing, call);
        return Status::done;
    }
    std::string out;
    for (const InputFamily& family : input_families()) {
        out += fmt::format("{}\n", family.name);
        for (const std::string& line : wrapped(std::string(family.description), 106))
            out += fmt::format("    {}\n", line);
        for (const std::string& line : wrapped(fmt::format("reaches {}", family.reaches), 106))
            out += fmt::format("    {}\n", line);
    }
    print(out);
    return Status::done;
}

/// mxfp8, where --dtype names it.
std::optional<BlockFormat> chosen_blocks(const GenerateSettings& own) {
    if (own.dtype == "mxfp8_e4m3" || own.dtype == "mxfp8_e5m2") return find_block_format(own.dtype);
    return std::nullopt;
}

Dtype chosen_dtype(const GenerateSettings& own, const Settings& settings) {
    constexpr std::array<std::string_view, 7> known{"bfloat16",    "float16",    "float32",   "float8_e4m3fn",
                                                    "float8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2"};
    if (chosen_blocks(own)) return Dtype::bf16;  // which holds the values of both
    if (std::find(known.begin(), known.end(), own.dtype) == known.end())
        throw RequestError(fmt::format("{}: {}: {}", settings.where("dtype"), in_quotes(own.dtype),
                                       expected_one_of(own.dtype, known)));
    return *dtype_from_print_name(own.dtype);
}

std::vector<const InputFamily*> chosen_families(const GenerateSettings& own) {
    std::vector<std::string_view> names;
    std::vector<const InputFamily*> chosen;
    for (const InputFamily& family : input_families()) names.push_back(family.name);
    if (own.families.empty())
        throw RequestError(
            fmt::format("FAMILY: is missing: {}, or all (--list describes them)", expected_one_of("", names)));
    if (own.families == "all") {
        for (const InputFamily& family : input_families()) chosen.push_back(&family);
        return chosen;
    }
    const std::string_view given = own.families;
    for (std::size_t begin = 0; begin <= given.size();) {
        const std::size_t end = std::min(given.find(',', begin), given.size());
        const std::string_view name = given.substr(begin, end - begin);
        const InputFamily* family = find_family(name);
        if (name == "all")
            throw RequestError(
                fmt::format("FAMILY: {}: all stands for every family: expected it alone", in_quotes(given)));
        if (family == nullptr)
            throw RequestError(fmt::format("FAMILY: {}: {}, or all", in_quotes(name), expected_one_of(name, names)));
        if (std::find(chosen.begin(), chosen.end(), family) != chosen.end())
            throw RequestError(fmt::format("FAMILY: {}: is there twice: expected it once", in_quotes(name)));
        chosen.push_back(family);
        begin = end + 1;
    }
    return chosen;
}

InputShape shape_of(const GenerateSettings& own, const Settings& settings, InputShape shape) {
    shape.batch = own.batch;
    if (own.heads > 0) shape.heads = shape.kv_heads = own.heads;
    if (own.kv_heads > 0) shape.kv_heads = own.kv_heads;
    if (own.kv_heads > 0 && own.heads == 0) shape.heads = std::max<std::ptrdiff_t>(shape.heads, own.kv_heads);
    if (own.seq > 0) shape.queries = shape.keys = own.seq;
    if (own.keys > 0) shape.keys = own.keys;
    if (own.head_dim > 0) shape.head_dim = own.head_dim;
    shape.causal = own.causal.value_or(true);
    if (shape.keys < least_keys)
        throw RequestError(
            own.keys > 0
                ? fmt::format("{}: {}: expected {} keys or more", settings.where("keys"), own.keys, least_keys)
                : fmt::format("{}: {}: expected {} keys or more (--keys, where they are not as many as queries)",
                              settings.where("seq"), own.seq, least_keys));
    return shape;
}

void expect_safetensors(const Invocation& call) {
    const std::string& file = call.common.output;
    if (!file.empty() && !file.ends_with(".safetensors"))
        throw RequestError(fmt::format("{}: {}: expected a name that ends in .safetensors",
                                       call.settings.where("output"), in_quotes(file)));
}

void write_layers(const std::vector<LayerCapture>& layers, const GenerateSettings& own, Dtype dtype,
                  const Invocation& call) {
    TensorSet set = tensors_of(layers, dtype, chosen_blocks(own));
    if (own.causal) set.metadata["causal"] = *own.causal ? "true" : "false";
    set.metadata["generated_by"] = escaped(call.command_line, call.command_line.size());
    set.metadata["seed"] = std::to_string(own.seed);
    write_safetensors(call.common.output, set);
}

Status families(const GenerateSettings& own, const Invocation& call) {
    const Dtype dtype = chosen_dtype(own, call.settings);
    const std::vector<const InputFamily*> chosen = chosen_families(own);
    if (call.common.output.empty())
        throw RequestError("--output: is missing: expected a name for the capture, as in -o out.safetensors");
    const InputShape shape = shape_of(own, call.settings, {});
    for (const InputFamily* family : chosen)
        if (own.causal && *own.causal && family->masked)
            throw RequestError(fmt::format("{}: family {} has a mask of its own: expected no --causal with it",
                                           call.settings.where("causal"), family->name));
    std::optional<RoundingPlan> plan;
    if (!own.plan.empty()) plan = plan_named(own.plan, call.settings, "plan");
    std::vector<LayerCapture> layers;
    nlohmann::ordered_json names = nlohmann::ordered_json::array();
    nlohmann::ordered_json left_out = nlohmann::ordered_json::array();
    std::vector<std::string> remarks;
    std::exception_ptr failed;
    const auto make = [&](const InputFamily& family) {
        std::vector<LayerCapture> made = make_layers(family, shape, static_cast<std::uint64_t>(own.seed));
        for (LayerCapture& layer : made)
            if (plan && !interrupted())
                observe(layer, *plan, plan->name, static_cast<std::uint64_t>(own.seed),
                        static_cast<int>(std::min<std::int64_t>(call.common.threads, 4096)), interrupted);
        if (interrupted()) return made;
        (void)tensors_of(made, dtype, chosen_blocks(own));  // says now what the type cannot hold
        return made;
    };
    for (const InputFamily* family : chosen) {
        if (interrupted()) break;
        try {
            for (LayerCapture& layer : make(*family)) layers.push_back(std::move(layer));
            names.push_back(std::string(family->name));
        } catch (const RequestError& error) {
            // All that there is, is all that this plan and type can have; what was asked for by its name, is asked for.
            if (own.families != "all") throw;
            left_out.push_back(std::string(family->name));
            remarks.push_back(fmt::format("faultline generate: {} is left out: {}", family->name, error.what()));
            if (!failed) failed = std::current_exception();
        }
    }
    if (layers.empty() && failed) std::rethrow_exception(failed);  // none can be had: it is the request
    for (const std::string& text : remarks) remark(text);
    if (interrupted()) {
        remark("faultline generate: interrupted: nothing is written");
        return Status::failed;
    }
    write_layers(layers, own, dtype, call);
    if (call.common.json) {
        print(nlohmann::ordered_json{{"schema", "faultline.generation/1"},
                                     {"output", call.common.output},
                                     {"layers", names},
                                     {"left_out", left_out},
                                     {"seed", own.seed}}
                  .dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
              "\n");
    } else if (call.talks()) {
        remark(fmt::format(
            "{}: {}, {} ({} of keys), {} x {}, head_dim {}, {}", escaped(call.common.output, call.common.output.size()),
            counted(static_cast<std::int64_t>(layers.size()), "layer", "layers"), counted(shape.heads, "head", "heads"),
            shape.kv_heads, counted(shape.queries, "query", "queries"), counted(shape.keys, "key", "keys"),
            shape.head_dim, own.dtype));
    }
    return Status::done;
}

/// " logit", " value"; nothing for a pure number.
std::string unit_of(Site site) {
    const std::string_view unit = info(site).unit;
    return unit == "1" ? std::string{} : fmt::format(" {}", unit);
}

std::string size_text(const Maximized& m, double x) {
    return m.relative ? fmt::format("{:.3g}% of the values' rms", 100 * x)
                      : fmt::format("{:.3g}{}", x, unit_of(m.site));
}

std::string text_of(const Maximized& m, const RoundingPlan& plan) {
    std::string out = fmt::format(
        "site {}   plan {}\n"
        "largest mean error, with its sign: {}\n"
        "  {:+.3g}{}, {:.0f}% of the error's own rms; found from {}, {} inputs tried\n"
        "random inputs in the same ranges: at most {}, rms {}\n",
        name(m.site), plan.name, size_text(m, m.reached.objective), m.reached.mean, unit_of(m.site),
        m.reached.rms > 0 ? 100 * std::abs(m.reached.mean) / m.reached.rms : 0, m.from, m.evaluations,
        size_text(m, m.random_largest), size_text(m, m.random_rms));
    if (m.random_largest > 0)
        out += fmt::format("  the search reached {:.3g} times as much\n", m.reached.objective / m.random_largest);
    return out;
}

std::string json_of(const Maximized& m, const RoundingPlan& plan) {
    return nlohmann::ordered_json{{"schema", "faultline.maximization/1"},
                                  {"site", std::string(name(m.site))},
                                  {"plan", plan.name},
                                  {"unit", std::string(info(m.site).unit)},
                                  {"relative", m.relative},
                                  {"objective", m.reached.objective},
                                  {"mean", m.reached.mean},
                                  {"rms", m.reached.rms},
                                  {"value_rms", m.reached.value_rms},
                                  {"from", m.from},
                                  {"random_largest", m.random_largest},
                                  {"random_rms", m.random_rms},
                                  {"evaluations", m.evaluations},
                                  {"complete", m.complete}}
               .dump(1) +
           "\n";
}

Status search(const GenerateSettings& own, const Invocation& call) {
    const auto site = find_site(own.maximize);
    if (!site) {
        std::vector<std::string_view> known;
        for (const SiteInfo& s : sites()) known.push_back(s.name);
        throw RequestError(fmt::format("{}: {}: {}", call.settings.where("maximize"), in_quotes(own.maximize),
                                       expected_one_of(own.maximize, known)));
    }
    if (call.common.output.empty()) call.settings.refuse_unread({"dtype"}, "without -o");
    if (!own.families.empty())
        throw RequestError(fmt::format("FAMILY: {}: expected none with --maximize, which starts from all of them",
                                       in_quotes(own.families)));
    const Dtype dtype = chosen_dtype(own, call.settings);
    MaximizeOptions options;
    options.shape = shape_of(own, call.settings, options.shape);
    options.largest = own.largest.value_or(options.largest);
    if (!(options.largest >= generation::smallest_value && options.largest <= generation::largest_value))
        throw RequestError(fmt::format("{}: {}: expected {} to {}, which every format holds",
                                       call.settings.where("largest"), options.largest, generation::smallest_value,
                                       generation::largest_value));
    options.evaluations = static_cast<std::size_t>(own.evaluations);
    options.seed = static_cast<std::uint64_t>(own.seed);
    options.threads = static_cast<int>(std::min<std::int64_t>(call.common.threads, 4096));
    const RoundingPlan plan = plan_named(own.plan.empty() ? "fa2" : own.plan, call.settings, "plan");
    Progress line(call.talks());
    options.progress = [&](std::size_t done, std::size_t total, const std::string& what) {
        line.update(done, total, what);
    };
    options.cancelled = interrupted;
    Maximized result = maximize(*site, plan, options);
    line.clear();
    print(call.common.json ? json_of(result, plan) : text_of(result, plan));
    if (!result.complete) {
        remark("faultline generate: interrupted: the best so far is printed, nothing is written (fewer --evaluations)");
        return Status::failed;
    }
    if (!call.common.output.empty()) write_layers({result.inputs}, own, dtype, call);
    return Status::done;
}

Status run(const GenerateSettings& own, const Invocation& call) {
    watch_for_interrupts();
    if (own.list) {
        call.settings.refuse_unread({"families", "plan", "maximize", "evaluations", "largest", "batch", "heads",
                                     "kv-heads", "seq", "keys", "head-dim", "causal", "dtype", "seed"},
                                    "with --list");
        if (!call.common.output.empty() && !call.common.output.ends_with(".h5"))
            throw RequestError(fmt::format("{}: {}: with --list expected a name that ends in .h5, for the families",
                                           call.settings.where("output"), in_quotes(call.common.output)));
        return list_families(call);
    }
    expect_safetensors(call);
    return own.maximize.empty() ? families(own, call) : search(own, call);
}

}  // namespace

Command generate_command() {
    return {
        "generate",
        "Write inputs that find faults as captures, or search for those that bias a site most",
        "  faultline generate all -o inputs.safetensors --heads 4 --head-dim 128\n"
        "  faultline generate saturated,two-level -o made.safetensors --plan fa2   # with what fa2 returns for them\n"
        "  faultline generate --maximize o_cast --plan fa2 -o worst.safetensors",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<GenerateSettings>();
            settings.positional("families", own->families,
                                "FAMILY, several with commas between them, or all; a layer for each, named as it",
                                false);
            settings.flag("list", own->list, "Describe the families");
            settings.text(
                "plan", own->plan, "NAME|FILE.toml",
                "Add what this plan returns, as a kernel of its name (- for a dot); with --maximize the plan, default fa2");
            settings.text("maximize", own->maximize, "SITE",
                          "Search for the inputs with the largest mean error, with its sign, at this site");
            settings.integer("evaluations", own->evaluations, 100, "N", "Inputs that the search tries; default 2000");
            settings.number("largest", own->largest, "X", "Largest magnitude that the search may use; default 8");
            settings.means_nothing_without("evaluations", "maximize");
            settings.means_nothing_without("largest", "maximize");
            settings.integer("batch", own->batch, 1, "N", "Batch elements; default 1");
            settings.integer("heads", own->heads, 1, "N", "Query heads; default 2, of the search 1");
            settings.integer("kv-heads", own->kv_heads, 1, "N", "Key heads; default as many");
            settings.integer("seq", own->seq, 1, "N", "Queries; default 128, of the search 32");
            settings.integer("keys", own->keys, 1, "N", "Keys; default as many");
            settings.integer("head-dim", own->head_dim, 1, "N", "Head size; default 64, of the search 32");
            settings.choice("causal", own->causal, "The mask of families that have none of their own; default causal");
            settings.text(
                "dtype", own->dtype, "NAME",
                "bfloat16 (the default), float16, float32, float8_e4m3fn, float8_e5m2: the same values; mxfp8_e4m3, "
                "mxfp8_e5m2: with block scales");
            settings.integer("seed", own->seed, 0, "N", "Of everything that is drawn");
            return [own](const Invocation& call) { return run(*own, call); };
        },
        "FILE.safetensors",
        "Write the inputs as a capture"};
}

}  // namespace faultline::cli
