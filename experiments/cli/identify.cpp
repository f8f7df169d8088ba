// SPDX-License-Identifier: Apache-2.0
// faultline identify: which plan is the kernel that left these outputs.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/identification/identify.hpp>
#include <faultline/identification/json.hpp>
#include <faultline/identification/table.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

struct IdentifySettings {
    std::string capture;
    std::vector<std::string> layers, kernels, plans, allow;
    std::vector<int> heads;
    std::optional<bool> causal;
    std::optional<double> scale;
    bool rank_only = false, full = false;
};

Allowances allowances(const IdentifySettings& own, const Settings& settings) {
    Allowances allow;
    for (const std::string& name : own.allow) {
        constexpr std::array<std::string_view, 3> known{"single-key", "masked-rows", "mask-min"};
        if (name == known[0])
            allow.single_key = true;
        else if (name == known[1])
            allow.masked_rows = true;
        else if (name == known[2])
            allow.mask_min = true;
        else
            throw RequestError(
                fmt::format("{}: {}: {}", settings.where("allow"), in_quotes(name), expected_one_of(name, known)));
    }
    return allow;
}

std::vector<RoundingPlan> candidates(const IdentifySettings& own, const Settings& settings) {
    std::vector<RoundingPlan> plans;
    for (const std::string& name : own.plans) {
        try {
            plans.push_back(plan(name));
        } catch (const RequestError& error) {
            if (name.ends_with(".toml")) throw;  // names the file
            throw RequestError(fmt::format("{}: {}", settings.where("plans"), error.what()));
        }
    }
    return plans;
}

/// A file holds one plan, so that the request must be for one; said before the work.
void check_output(const Capture& capture, const IdentifyOptions& options, const Invocation& call) {
    const std::string& file = call.common.output;
    if (file.empty()) return;
    const std::string where = call.settings.where("output");
    if (!file.ends_with(".toml"))
        throw RequestError(fmt::format("{}: {}: expected a name that ends in .toml, for the plan that is found", where,
                                       in_quotes(file)));
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

/// Whole or not at all: written beside the name and moved onto it.
void write_plan(const std::string& path, const RoundingPlan& plan) {
    const std::string part = path + ".part";
    {
        std::ofstream out(part, std::ios::binary | std::ios::trunc);
        out << "# SPDX-License-Identifier: Apache-2.0\n" << to_toml(plan);
        out.flush();
        if (!out) {
            std::error_code ignored;
            std::filesystem::remove(part, ignored);
            throw WorkError(fmt::format("{}: cannot be written: expected a folder with room that may be written to",
                                        escaped(path, path.size())));
        }
    }
    std::error_code error;
    std::filesystem::rename(part, path, error);
    if (!error) return;
    std::error_code ignored;
    std::filesystem::remove(part, ignored);
    throw WorkError(fmt::format("{}: cannot be written: {}: expected a name for a file", escaped(path, path.size()),
                                error.message()));
}

Status run(const IdentifySettings& own, const Invocation& call) {
    if (own.capture.empty())
        throw RequestError(
            "CAPTURE: is missing: expected a safetensors file, a folder of .npy files, or an HDF5 capture");
    IdentifyOptions options;
    options.kernels = own.kernels;
    options.candidates = candidates(own, call.settings);
    options.heads = own.heads;
    options.search = !own.rank_only;
    options.threads = static_cast<int>(std::min<std::int64_t>(call.common.threads, 4096));
    CaptureOptions capture_options;
    capture_options.layers = own.layers;
    capture_options.causal = own.causal;
    capture_options.scale = own.scale;
    capture_options.allow = allowances(own, call.settings);
    const Capture capture = read_capture(own.capture, capture_options);
    check_output(capture, options, call);

    watch_for_interrupts();
    Progress line(call.talks());
    options.progress = [&](std::size_t done, std::size_t total, const std::string& what) {
        line.update(done, total, what);
    };
    options.cancelled = interrupted;
    const Identification result = identify(capture, options);
    line.clear();

    print(call.common.json ? to_json(result) : table(result, own.full));
    if (!call.common.output.empty() && result.complete) write_plan(call.common.output, result.kernels.front().plan);
    if (result.complete) return Status::done;
    remark(fmt::format("faultline identify: interrupted after {} kernels{}; the rest: --kernel NAME",
                       result.kernels.size(), call.common.output.empty() ? "" : ", nothing written"));
    return Status::failed;
}

}  // namespace

Command identify_command() {
    return {"identify", "Say which plan is the kernel that left the outputs of a capture, and what still differs",
            "  faultline identify run7.safetensors --layers layer0\n"
            "  faultline identify run7.safetensors --layers layer0 --kernel cudnn -o cudnn.toml",
            [](Settings& settings) -> Run {
                const auto own = std::make_shared<IdentifySettings>();
                settings.positional(
                    "capture", own->capture,
                    "Tensors LAYER.{q,k,v,do} and LAYER.KERNEL.{o,dq,dk,dv}: safetensors, a folder of .npy, or HDF5");
                settings.list("layers", own->layers, "A,B", "Only these layers; several are identified together");
                settings.list("kernel", own->kernels, "A,B", "Only these observed kernels");
                settings.list("plans", own->plans, "NAME|FILE.toml,...",
                              "Candidates: presets (faultline plans) or files; default all presets");
                settings.list("heads", own->heads, "0,1", "Only these query heads, with those that share their keys");
                settings.choice("causal", own->causal,
                                "The mask; default: what the capture says, else causal unless there is a mask tensor");
                settings.number("scale", own->scale, "X",
                                "Factor on q k^T; default: what the capture says, else 1/sqrt(head_dim)");
                settings.list("allow", own->allow, "WHAT", "Take degenerate inputs: single-key, masked-rows, mask-min");
                settings.flag("rank-only", own->rank_only, "Rank the candidates; no search around the best");
                settings.flag("full", own->full, "Every candidate and every change in the table");
                return [own](const Invocation& call) { return run(*own, call); };
            }};
}

}  // namespace faultline::cli
