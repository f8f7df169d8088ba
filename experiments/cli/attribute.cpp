// SPDX-License-Identifier: Apache-2.0
// faultline attribute: which rounding in which kernel made this gradient wrong.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/json.hpp>
#include <faultline/attribution/report.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/attribution/write_h5.hpp>
#include <faultline/base/error.hpp>
#include <faultline/cli/attribute_request.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/plan_choice.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/cli/written_file.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

/// Where nobody asked for gradients, a layer that has none is attributed as far as it goes, and a line says so.
void remark_forward_alone(const Capture& capture) {
    for (const LayerCapture& layer : capture.layers)
        if (layer.dout.empty())
            remark(fmt::format("{}: there is no {}: of {} the forward alone is attributed, o and the lse of a kernel",
                               escaped(capture.path, capture.path.size()), in_quotes(layer.name + ".do"),
                               escaped(layer.name)));
}

/// Keeps to the kernels that were asked for, if any: what is not there is neither compared nor chosen a plan by.
void keep_kernels(Capture& capture, const std::vector<std::string>& kernels, const Settings& settings) {
    if (kernels.empty()) return;
    expect_kernels(capture, kernels, settings);
    for (LayerCapture& layer : capture.layers)
        std::erase_if(layer.observed, [&](const ObservedKernel& kernel) {
            return std::find(kernels.begin(), kernels.end(), kernel.name) == kernels.end();
        });
}

/// Progress over all layers: attribute() counts each layer from nothing.
class LayerProgress {
  public:
    LayerProgress(Progress& line, std::size_t layers) : line_(line), layers_(layers) {}
    void operator()(std::size_t done, std::size_t total, const std::string& what) {
        if (done < last_) ++before_;
        last_ = done;
        line_.update(before_ * total + done, layers_ * total, what);
    }

  private:
    Progress& line_;
    std::size_t layers_, before_ = 0, last_ = 0;
};

Manifest manifest_of(const AttributeSettings& own, const Invocation& call) {
    Manifest manifest = call.manifest("attribution", static_cast<std::uint64_t>(own.seed));
    manifest.inputs = hash_inputs(own.request.capture);
    return manifest;
}

std::string missing_layers(const Capture& capture, const Attribution& result) {
    std::vector<std::string> missing;
    for (std::size_t i = result.layers.size(); i < capture.layers.size(); ++i)
        missing.push_back(escaped(capture.layers[i].name));
    return fmt::format("{}", fmt::join(missing, ","));
}

/// Of the elements of an output: then the plan is the kernel's.
constexpr double nearly_all = 0.9;

/// Whether the plan has nearly all elements of every output of a kernel.
bool is_some_kernels(const Attribution& result) {
    std::map<std::string, double> least;
    for (const LayerAttribution& layer : result.layers)
        for (const OutputAttribution& output : layer.outputs)
            for (const ObservedOutput& seen : output.observed) {
                const auto at = least.try_emplace(seen.kernel, 1.0).first;
                at->second = std::min(at->second, seen.bit_equal_to_plan);
            }
    return std::any_of(least.begin(), least.end(), [](const auto& kernel) { return kernel.second >= nearly_all; });
}

/// Where the plan asked for is not the kernel's, what is said of its roundings is not said of the kernel's error: prints the
/// same for the preset that is nearest to the kernel that people ask about first. Nothing where the plan is that of one of the
/// kernels, which is then the one that was meant: no preset is nearer to it, or the plan has nearly all of its elements.
Status print_own_plan(const Attribution& result, const Identification& ranked, const Capture& capture,
                      AttributionOptions options, const AttributeSettings& own, const Invocation& call) {
    const std::string kernel = first_kernel(ranked);
    const std::vector<NearerPlan>& nearer = result.origin.nearer;
    const auto best =
        std::find_if(nearer.begin(), nearer.end(), [&](const NearerPlan& n) { return n.kernel == kernel; });
    if (best == nearer.end() || !own.injections.empty()) return Status::done;
    if (is_nearest_to_some(ranked, result.plan.name) || is_some_kernels(result)) return Status::done;
    const RoundingPlan nearest = plan(best->plan);
    options.verify_truth = 0;
    Progress line(call.talks());
    options.progress = LayerProgress(line, capture.layers.size());
    Attribution attributed;
    // What was asked for has been done: sites and corrections that the other plan does not have are no error now.
    try {
        options.corrections = chosen_corrections(own, nearest, call.settings);
        attributed = attribute(capture, nearest, options);
    } catch (const RequestError& error) {
        line.clear();
        remark(
            fmt::format("faultline attribute: {} is not attributed by {}: {}", best->kernel, best->plan, error.what()));
        return Status::done;
    }
    line.clear();
    print_after(
        [] {},
        fmt::format(
            "\nthe kernel {0} is not {1}, and nearest to {2}, which has {3:.2f}% of its elements. The same by {2}:\n\n{4}",
            best->kernel, result.plan.name, best->plan, std::floor(1e4 * best->bit_equal) / 1e2,
            table(attributed, {.full = own.full, .color = colors()})));
    if (attributed.complete) return Status::done;
    remark(fmt::format("faultline attribute: interrupted after {} of {} layers by {}; what is by {} is whole",
                       attributed.layers.size(), capture.layers.size(), best->plan, result.plan.name));
    return Status::failed;
}

Status run(const AttributeSettings& own, const Invocation& call) {
    watch_for_interrupts();
    AttributionOptions options;
    choose_outputs(own, call.settings, options);
    options.sites = chosen_sites(own, call.settings);
    options.heads = own.request.heads;
    options.threads = static_cast<int>(call.common.threads);
    options.verify_truth = static_cast<std::size_t>(own.verify_truth);
    options.seed = static_cast<std::uint64_t>(own.seed);
    options.cancelled = interrupted;
    // What can be refused before the capture is read, is.
    own.request.expect_valid(call.settings);
    PlanChoice choice(own.plan, call.settings);
    options.corrections = chosen_corrections(own, choice.plan, call.settings);
    options.faults = chosen_faults(own, choice.plan, call.settings);
    options.backend = &backend_of(call);
    Capture capture = own.request.read(call);
    keep_kernels(capture, own.kernels, call.settings);
    if (own.outputs.empty())
        remark_forward_alone(capture);
    else
        expect_gradients(capture, options);
    expect_layers(capture, options.corrections, call.settings);
    choice.choose(capture, kernel_asked_about(capture), options, call);
    const RoundingPlan& plan = choice.plan;
    if (choice.origin.chosen || choice.preset) {
        options.corrections = chosen_corrections(own, plan, call.settings);
        options.faults = chosen_faults(own, plan, call.settings);
    }

    if (!draws_anything(plan, options))
        call.settings.refuse_unread({"seed"},
                                    "where nothing is rounded stochastically and --verify-truth samples nothing");
    remark_unreached(own, plan, options);

    // Made before the work, so that a disk that refuses is known now. Without commit() nothing is left.
    std::optional<RecordFile> file;
    if (!call.common.output.empty()) file = RecordFile::create(call.common.output, manifest_of(own, call));
    WrittenText report(call, "report", own.report);
    for (const std::string_view suffix : {".h5", ".hdf5", ".toml", ".safetensors", ".json", ".txt", ".xml"})
        if (own.report.ends_with(suffix))
            throw RequestError(fmt::format("{}: {}: expected a name for an HTML page, as report.html",
                                           call.settings.where("report"), in_quotes(own.report)));

    Progress line(call.talks());
    options.progress = LayerProgress(line, capture.layers.size());
    std::exception_ptr refused;  // by the disk, of a layer: what is computed is still printed
    if (file)
        options.layer_done = [&](const Attribution& so_far) {
            if (refused) return;
            try {
                if (so_far.layers.size() == 1) write_head(so_far, *file);
                write_layer(so_far, so_far.layers.size() - 1, *file);
                file->flush();
            } catch (const WorkError&) {
                refused = std::current_exception();
            }
        };
    Attribution result = attribute(capture, plan, options);
    options.layer_done = nullptr;  // others are attributed for the table alone
    line.clear();
    if (!choice.origin.automatic && result.complete) choice.compare(capture, "", options, call);
    result.origin = choice.origin;

    // A file that is there may be a whole one (--force): part of the layers does not replace it.
    const auto part = [&](const std::string& path) {
        std::error_code error;
        return !result.complete && !path.empty() && std::filesystem::exists(path, error);
    };
    const bool part_of_file = part(call.common.output), part_of_report = part(own.report);
    // Each is written whether or not the other can be.
    const auto write_record = [&] {
        if (!file) return;
        if (refused) std::rethrow_exception(refused);
        if (result.layers.empty()) write_head(result, *file);
        write_end(result, *file);
        part_of_file ? file->keep_partial() : file->commit();
    };
    const auto write_file = [&] {
        std::exception_ptr failed;
        try {
            write_record();
        } catch (const WorkError&) {
            failed = std::current_exception();
        }
        const std::string page = html_report(result, {.title = "", .command_line = call.command_line});
        part_of_report ? report.keep_partial(page) : report.commit(page);
        if (failed) std::rethrow_exception(failed);
    };
    print_after(write_file, call.common.json ? to_json(result) : table(result, {.full = own.full, .color = colors()}));
    if (result.complete)
        return choice.origin.automatic || call.common.json
                   ? Status::done
                   : print_own_plan(result, choice.ranked, capture, options, own, call);
    const auto written = [&](const std::string& path, bool partly) {
        return escaped(path) + (partly ? fmt::format(".partial ({} is as it was)", escaped(path)) : "");
    };
    remark(fmt::format(
        "faultline attribute: interrupted after {} of {} layers{}{}; the rest: --layers {}", result.layers.size(),
        capture.layers.size(),
        file ? fmt::format(", written to {} with complete = 0", written(call.common.output, part_of_file)) : "",
        own.report.empty()
            ? ""
            : fmt::format(", the report {}to {}", file ? "" : "written ", written(own.report, part_of_report)),
        missing_layers(capture, result)));
    return Status::failed;
}

}  // namespace

Command attribute_command() {
    return {
        "attribute", "Say which rounding in which kernel made which output wrong",
        "  faultline attribute run7.safetensors --plan fa2 -o run7.h5\n"
        "  faultline attribute run7.safetensors --layers layer1 --outputs dq --correction none --full",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<AttributeSettings>();
            own->request.declare(settings);
            declare_plan(settings, own->plan, "The kernel's numerics");
            settings.list("kernel", own->kernels, "A,B", "Only these observed kernels");
            settings.list("outputs", own->outputs, "o,dq,dk,dv,lse", "Only these outputs");
            settings.list("sites", own->sites, "A,B", "Counterfactuals for these sites alone (faultline sites)");
            settings.items("correction", own->corrections, "NAME",
                           "Correction to compare, NAME or NAME:ARGUMENTS, again for more; all (the default) or none");
            settings.items("inject", own->injections, "SITE:LAW:MAGNITUDE",
                           "Plant a fault in the plan's kernel (docs/injectors.md), again for more");
            settings.may_repeat("inject");
            settings.integer("verify-truth", own->verify_truth, 0, "N",
                             "Recompute N elements of every output (at most all of them) in MPFR and compare");
            settings.integer("seed", own->seed, 0, "N", "Of stochastic rounding, and of what --verify-truth samples");
            settings.text("report", own->report, "FILE.html",
                          "Write one page with tables and maps of the errors by tile, to attach to an issue");
            settings.flag("full", own->full, "Every site of every output in the table");
            return [own](const Invocation& call) { return run(*own, call); };
        }};
}

}  // namespace faultline::cli
