// SPDX-License-Identifier: Apache-2.0
// faultline probe: what is measured on captures, checkpoints and runs.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/probing/probing.hpp>
#include <faultline/record/capture.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/record/rehearsal.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

using probing::ProbeInfo;
using probing::ProbeOptions;

struct ProbeSettings {
    std::vector<std::string> files;
    ProbeOptions options;
    CaptureOptions capture;
    std::vector<std::string> probes, allow;
    std::string plan = "fa2";
    std::int64_t terms = 128, directions = 3, row = -1, window = 0;
    std::optional<double> tolerance, softcap, rise, margin, scale;
    std::optional<bool> causal;
    bool list = false;
};

enum class Kind { capture, checkpoint, run };
std::string_view name(Kind kind) {
    return kind == Kind::capture ? "capture" : kind == Kind::checkpoint ? "checkpoint" : "run";
}

bool is_hdf5(const std::string& path) { return path.ends_with(".h5") || path.ends_with(".hdf5"); }

/// A file with what is read of it to know its kind.
struct ProbedFile {
    std::string path;
    Kind kind = Kind::capture;
    TensorSet tensors;  ///< empty for a run
};

ProbedFile open(const std::string& path) {
    ProbedFile file{path, Kind::capture, {}};
    if (is_hdf5(path)) {
        rehearse_reading(path, Rehearsal::structure);
        const std::string kind = RecordReader(path).manifest().kind;
        if (kind == "run") {
            file.kind = Kind::run;
            return file;
        }
        if (!kind.empty() && kind != "capture")
            throw RequestError(fmt::format("{}: is of kind {}: expected a capture, a checkpoint or a run",
                                           escaped(path, path.size()), in_quotes(kind)));
    }
    file.tensors = read_tensors(path);
    if (file.tensors.metadata.contains("schema") &&
        file.tensors.metadata.at("schema").starts_with("faultline.checkpoint/"))
        file.kind = Kind::checkpoint;
    return file;
}

Listing listing() {
    Listing all{"probes", {{"name", "probe", {}}, {"files", "of", {}}, {"description", "what it measures", {}, true}}};
    for (const ProbeInfo& probe : probing::catalogue()) {
        all.columns[0].values.emplace_back(probe.name);
        all.columns[1].values.emplace_back(probe.files);
        all.columns[2].values.emplace_back(probe.description);
    }
    return all;
}

void expect_probes(const ProbeSettings& own, Kind kind, const Settings& settings) {
    std::vector<std::string_view> names, fitting;
    for (const ProbeInfo& probe : probing::catalogue()) {
        names.push_back(probe.name);
        if (probe.files.find(name(kind)) != std::string_view::npos) fitting.push_back(probe.name);
    }
    for (const std::string& probe : own.probes) {
        if (std::ranges::find(names, probe) == names.end())
            throw RequestError(
                fmt::format("{}: {}: {}", settings.where("probe"), in_quotes(probe), expected_one_of(probe, names)));
        if (std::ranges::find(fitting, probe) == fitting.end())
            throw RequestError(fmt::format("{}: {} is no probe of a {}: {}", settings.where("probe"), probe, name(kind),
                                           expected_one_of("", fitting)));
    }
    if (std::ranges::find(own.probes, "trajectory") != own.probes.end() && own.files.size() < 2)
        throw RequestError(
            fmt::format("{}: trajectory: has one checkpoint: expected two or more", settings.where("probe")));
}

/// Refuses what the command line gives and a kind of file, or the probes that are asked for, have no use for: an option that does
/// nothing would be taken to have done something. A configuration file is for all kinds.
void expect_options(Kind kind, const ProbeSettings& own, const Settings& settings) {
    struct Use {
        std::string_view option, kinds, probes = {};  // empty: all
    };
    constexpr Use uses[] = {{"plan", "capture"},
                            {"causal", "capture"},
                            {"scale", "capture"},
                            {"softcap", "capture"},
                            {"allow", "capture"},
                            {"terms", "capture", "similarity"},
                            {"row", "capture", "output-error"},
                            {"tolerance", "capture", "saturation"},
                            {"heads", "capture, run"},
                            {"window", "capture, run", "coherence"},
                            {"directions", "capture, checkpoint", "similarity, directions"},
                            {"rise", "run", "early-warning"},
                            {"margin", "run", "early-warning"}};
    for (const Use& use : uses) {
        if (settings.given(use.option) && use.kinds.find(name(kind)) == std::string_view::npos)
            throw RequestError(fmt::format("{}: means nothing for a {} ({}): expected files of kind {}",
                                           settings.where(use.option), name(kind),
                                           escaped(own.files.front(), own.files.front().size()), use.kinds));
        const auto reads = [&](const std::string& probe) { return use.probes.find(probe) != std::string_view::npos; };
        if (settings.given(use.option) && !use.probes.empty() && !own.probes.empty() &&
            std::ranges::none_of(own.probes, reads))
            throw RequestError(fmt::format("{}: means nothing with {} {}: expected it with the probe {}",
                                           settings.where(use.option), settings.where("probe"),
                                           fmt::join(own.probes, ","), use.probes));
    }
}

std::vector<probing::ProbeCapture> captures_of(std::vector<ProbedFile>& files, const ProbeSettings& own,
                                               const Settings& settings) {
    std::vector<probing::ProbeCapture> captures;
    std::set<std::string> labels;
    for (ProbedFile& file : files) {
        probing::ProbeCapture& one = captures.emplace_back();
        one.capture = capture_of(file.tensors, own.capture);
        one.tensors = std::move(file.tensors);
        one.label = std::filesystem::path(file.path).stem().string();
        if (!labels.insert(one.label).second) one.label += fmt::format("#{}", captures.size());
        for (const LayerCapture& layer : one.capture.layers)
            for (const int head : own.options.heads)
                if (head >= layer.heads())
                    throw RequestError(fmt::format("{}: {}: expected 0 to {}, the heads of {} in {}",
                                                   settings.where("heads"), head, layer.heads() - 1, layer.name,
                                                   escaped(file.path, file.path.size())));
    }
    return captures;
}

Status run(ProbeSettings& own, const Invocation& call) {
    watch_for_interrupts();
    if (own.list) {
        call.settings.refuse_unread({"files", "probe", "layers", "heads", "plan", "causal", "scale", "softcap", "allow",
                                     "terms", "directions", "row", "window", "tolerance", "rise", "margin"},
                                    "with --list");
        present(listing(), call);
        return Status::done;
    }
    if (own.files.empty())
        throw RequestError(
            "FILE: is missing: expected captures, checkpoints or runs (--list says what can be measured)");
    own.capture.allow = allowances(own.allow, call.settings);
    own.options.plan = plan_named(own.plan, call.settings, "plan");
    std::vector<ProbedFile> files;
    for (const std::string& path : own.files) {
        files.push_back(open(path));
        if (files.back().kind != files.front().kind)
            throw RequestError(fmt::format("{}: is a {} and {} a {}: expected files of one kind",
                                           escaped(path, path.size()), name(files.back().kind),
                                           escaped(files.front().path, files.front().path.size()),
                                           name(files.front().kind)));
        end_if_interrupted();
    }
    const Kind kind = files.front().kind;
    expect_probes(own, kind, call.settings);
    expect_options(kind, own, call.settings);
    ProbeOptions& options = own.options;
    options.probes = own.probes;
    options.terms = static_cast<int>(own.terms);
    options.directions = static_cast<int>(own.directions);
    if (own.row >= 0) options.row = static_cast<int>(own.row);
    options.window = static_cast<int>(own.window);
    options.tolerance = own.tolerance.value_or(options.tolerance);
    options.softcap = own.softcap.value_or(0);
    options.rise = own.rise.value_or(options.rise);
    options.margin = own.margin.value_or(options.margin);
    own.capture.layers = options.layers;
    own.capture.causal = own.causal;
    own.capture.scale = own.scale;
    options.cancelled = interrupted;
    options.threads = static_cast<int>(call.common.threads);
    options.backend = &backend_of(call);

    probing::Report report;
    if (kind == Kind::run) {
        report = probing::probe_runs(own.files, options);
    } else if (kind == Kind::checkpoint) {
        std::vector<TensorSet> sets;
        for (ProbedFile& file : files) sets.push_back(std::move(file.tensors));
        report = probing::probe_checkpoints(sets, options);
    } else {
        report = probing::probe_captures(captures_of(files, own, call.settings), options);
    }
    const auto write_file = [&] {
        if (call.common.output.empty()) return;
        Manifest manifest = call.manifest("probe");
        for (const std::string& path : own.files)
            for (const InputHash& hash : hash_inputs(path)) manifest.inputs.push_back(hash);
        probing::write_h5(report, call.common.output, manifest);
    };
    print_after(write_file, call.common.json ? probing::to_json(report) : probing::table(report));
    return Status::done;
}

}  // namespace

Command probe_command() {
    return {
        "probe", "Measure conservation, coherence, similarity, spectra, saturation and more on recorded files",
        "  faultline probe --list\n"
        "  faultline probe run7.safetensors --layers layer0 -o probes.h5\n"
        "  faultline probe a.checkpoint.safetensors b.checkpoint.safetensors\n"
        "  faultline probe healthy.h5 failing.h5 --probe early-warning",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<ProbeSettings>();
            settings.positionals("files", own->files,
                                 "Captures, checkpoints of faultline train, or its runs; all of one kind", false);
            settings.list("probe", own->probes, "NAME,...", "Only these probes; default all that the files allow");
            settings.list("layers", own->options.layers, "A,B", "Only these layers");
            settings.list("heads", own->options.heads, "0,1", "Only these query heads of captures and runs");
            settings.text("plan", own->plan, "NAME|FILE.toml",
                          "The plan whose kernel is watched on captures; default fa2");
            settings.choice("causal", own->causal, "The mask of captures; default: what the capture says");
            settings.positive_number("scale", own->scale, "X",
                                     "Factor on q k^T of captures; default: what the capture says");
            settings.positive_number(
                "softcap", own->softcap, "X",
                "Cap of the scores of captures; default: what the capture says; a plan is left out then");
            settings.list("allow", own->allow, "WHAT", "Take degenerate captures: single-key, masked-rows, mask-min");
            settings.integer("terms", own->terms, 2, "N", "Rank-1 terms per head and capture", 4096);
            settings.integer("directions", own->directions, 1, "K", "Leading singular directions", 64);
            settings.integer("row", own->row, -1, "N",
                             "Row of the running output; -1: the one with the most weights of 1", 1 << 30);
            settings.integer("window", own->window, 0, "N", "Rows or steps of a window of coherence; 0: all", 1 << 30);
            settings.positive_number("tolerance", own->tolerance, "X",
                                     "Logits within which a maximum counts as repeated; default 1e-3");
            settings.positive_number("rise", own->rise, "NATS", "Rise of the loss that is divergence; default 0.3");
            settings.positive_number("margin", own->margin, "X", "Factor on the healthy runs' range; default 2");
            settings.flag("list", own->list, "List the probes, and on which files they work");
            return [own](const Invocation& call) { return run(*own, call); };
        }};
}

}  // namespace faultline::cli
