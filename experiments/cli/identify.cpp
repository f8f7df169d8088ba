// SPDX-License-Identifier: Apache-2.0
// faultline identify: which plan is the kernel that left these outputs.
#include <algorithm>
#include <memory>
#include <optional>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/identification/identify.hpp>
#include <faultline/identification/json.hpp>
#include <faultline/identification/observed_kernels.hpp>
#include <faultline/identification/table.hpp>
#include <faultline/identification/write_h5.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

struct IdentifySettings {
    CaptureRequest request;
    std::vector<std::string> kernels, plans;
    bool rank_only = false, full = false;
};

/// Presets by name follow the formats of the kernel's tensors; plans of files stand as they are.
void choose_candidates(const IdentifySettings& own, const Settings& settings, IdentifyOptions& options) {
    std::vector<RoundingPlan> plans;
    for (const std::string& name : own.plans) {
        RoundingPlan plan = plan_named(name, settings, "plans");
        const auto namesake = std::find_if(plans.begin(), plans.end(),
                                           [&](const RoundingPlan& other) { return other.name == plan.name; });
        if (namesake != plans.end() && !namesake->same_numerics(plan))
            throw RequestError(fmt::format(
                "{}: {}: its plan is named {} as another is that differs: expected a name of its own, name = \"...\"",
                settings.where("plans"), in_quotes(name), in_quotes(plan.name)));
        if (namesake != plans.end()) continue;
        const std::vector<std::string_view> presets = preset_names();
        if (std::find(presets.begin(), presets.end(), name) != presets.end())
            options.presets.push_back(name);
        else
            options.candidates.push_back(plan);
        plans.push_back(std::move(plan));
    }
}

void check_output_name(const Invocation& call) {
    const std::string& file = call.common.output;
    if (!file.empty() && !file.ends_with(".h5") && !file.ends_with(".toml"))
        throw RequestError(
            fmt::format("{}: {}: expected a name that ends in .toml, for the plan that is found, or in "
                        ".h5, for all that the table says",
                        call.settings.where("output"), in_quotes(file)));
}

/// A file holds one plan, so that the request must be for one; said before the work.
void check_output(const Capture& capture, const IdentifyOptions& options, const Invocation& call) {
    const std::string& file = call.common.output;
    if (file.empty() || file.ends_with(".h5")) return;
    const std::string where = call.settings.where("output");
    const std::size_t kernels = options.kernels.empty() ? observed_kernels(capture).size() : options.kernels.size();
    if (kernels > 1)
        throw RequestError(fmt::format(
            "{}: a file holds one plan and {} kernels are to be identified: expected one, chosen with --kernel", where,
            kernels));
    for (const LayerCapture& layer : capture.layers)
        if (layer.head_dim() != capture.layers.front().head_dim())
            throw RequestError(fmt::format(
                "{}: a file holds one plan and the layers have heads of different sizes: expected one size, chosen with --layers",
                where));
}

void write_plan(PartialFile& out, const RoundingPlan& plan) {
    const std::string text = "# SPDX-License-Identifier: Apache-2.0\n" + to_toml(plan);
    out.write(std::as_bytes(std::span(text)));
    out.commit();
}

Status run(const IdentifySettings& own, const Invocation& call) {
    watch_for_interrupts();
    IdentifyOptions options;
    options.kernels = own.kernels;
    choose_candidates(own, call.settings, options);
    options.heads = own.request.heads;
    options.search = !own.rank_only;
    options.threads = static_cast<int>(call.common.threads);
    own.request.expect_valid(call.settings);
    check_output_name(call);
    options.backend = &backend_of(call);
    const Capture capture = own.request.read(call);
    if (!observed_kernels(capture).empty())
        expect_kernels(capture, own.kernels, call.settings);  // else identify() has a sentence
    check_output(capture, options, call);

    std::optional<RecordFile> file;
    if (call.common.output.ends_with(".h5")) {
        Manifest manifest = call.manifest("identification", options.seed);
        manifest.inputs = hash_inputs(own.request.capture);
        file = RecordFile::create(call.common.output, manifest);
    }
    const std::string written = file ? "" : call.common.output;  // the plan's
    std::optional<PartialFile> plan_file;  // opened now, so that a folder that is not there is said before the search
    if (!written.empty()) plan_file.emplace(written);
    Progress line(call.talks(), true);  // each step of the search asks for more
    options.progress = [&](std::size_t done, std::size_t total, const std::string& what) {
        line.update(done, total, what);
    };
    options.cancelled = interrupted;
    const Identification result = identify(capture, options);
    line.clear();

    const bool near = std::all_of(result.kernels.begin(), result.kernels.end(),
                                  [](const KernelIdentification& k) { return k.is_near(); });
    const auto write_file = [&] {
        if (plan_file && result.complete && near) write_plan(*plan_file, result.kernels.front().plan);
        if (!file || !result.complete) return;
        write(result, *file);
        file->commit();
    };
    print_after(write_file, call.common.json ? to_json(result) : table(result, own.full));
    if (result.complete && !near && !written.empty()) {
        remark(fmt::format("faultline identify: no preset is this kernel: {} not written",
                           escaped(written, written.size())));
        return Status::failed;
    }
    if (!written.empty() && result.complete)
        for (const KernelIdentification& k : result.kernels) {
            const std::vector<std::string> others = k.near_ties();
            if (!k.is_found()) {
                remark(
                    fmt::format("faultline identify: {}: the plan that was written has {} of the elements of {}: it is "
                                "not that kernel{}, and --full lists what was tried",
                                escaped(call.common.output), share_percent(k.match.all()), escaped(k.kernel),
                                lacking_text(k, ", with ")));
                return Status::failed;
            }
            if (!others.empty())
                remark(
                    fmt::format("faultline identify: {}: {}{} was written, and {}{} not told from it by these outputs",
                                escaped(call.common.output), k.nearest, k.changes.empty() ? "" : ", changed,",
                                fmt::join(others, ", "),
                                fmt::format("{} {}", k.changes.empty() ? "" : " with the same changes",
                                            others.size() == 1 ? "is" : "are")));
        }
    if (result.complete) return Status::done;
    remark(fmt::format("faultline identify: interrupted after {} kernel{}{}; --kernel NAME asks for one alone",
                       result.kernels.size(), result.kernels.size() == 1 ? "" : "s",
                       call.common.output.empty() ? "" : ", nothing written"));
    return Status::failed;
}

}  // namespace

Command identify_command() {
    return {"identify",
            "Say which plan is the kernel that left the outputs of a capture, and what still differs",
            "  faultline identify run7.safetensors --layers layer0\n"
            "  faultline identify run7.safetensors --layers layer0 --kernel cudnn -o cudnn.toml\n"
            "  faultline identify run7.safetensors --layers layer0 -o kernels.h5",
            [](Settings& settings) -> Run {
                const auto own = std::make_shared<IdentifySettings>();
                own->request.declare(settings);
                settings.list("kernel", own->kernels, "A,B", "Only these observed kernels");
                settings.list("plans", own->plans, "NAME|FILE.toml,...",
                              "Candidates: presets (faultline plans) or files; default all presets");
                settings.flag("rank-only", own->rank_only, "Rank the candidates; no search around the best");
                settings.flag("full", own->full, "Every candidate and every change in the table");
                return [own](const Invocation& call) { return run(*own, call); };
            },
            "FILE.h5|FILE.toml",
            "Write the plan that is found, of one kernel (--kernel); to FILE.h5 all that the table says with --full"};
}

}  // namespace faultline::cli
