// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/plan_choice.hpp>

#include <algorithm>

#include <fmt/format.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/identification/capture_storage.hpp>
#include <faultline/identification/observed_kernels.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline::cli {

void declare_plan(Settings& settings, std::string& name, const std::string& what) {
    settings.text("plan", name, "NAME|FILE.toml",
                  what +
                      ": a preset (faultline plans), a file, or auto (the default): the preset that reproduces the "
                      "capture's kernel best");
}

PlanChoice::PlanChoice(const std::string& name, const Settings& settings) {
    origin.automatic = name == automatic_plan;
    preset = !origin.automatic && !name.ends_with(".toml");
    plan = origin.automatic ? faultline::plan("fa2") : plan_named(name, settings, "plan");
}

void PlanChoice::compare(const Capture& capture, const std::string& kernel, const AttributionOptions& options,
                         const Invocation& call) {
    try {  // what follows asks for truth
        for (const LayerCapture& layer : capture.layers)
            attribution::expect_room_for_truth(layer.name, attribution::groups_of(layer, options.heads, options.seed),
                                               *options.backend);
    } catch (const NoRoom& error) {
        throw NoRoom(fmt::format("{}: {}", capture.path, error.what()));
    }
    Progress line(call.talks());
    AttributionOptions ranking = options;
    ranking.progress = [&](std::size_t done, std::size_t total, const std::string& what) {
        line.update(done, total, what);
    };
    ranked = rank_presets(capture, plan, ranking, kernel);
    line.clear();
    origin.left_out = ranked.left_out;
    origin.nearer = nearer_plans(ranked, plan.name, options.heads);
}

void PlanChoice::choose(const Capture& capture, const std::string& kernel, const AttributionOptions& options,
                        const Invocation& call) {
    const StorageFormats storage = storage_of(capture, kernel);
    const FileTypes types = file_types(capture, kernel, storage);
    const auto add_inputs = [&] {
        const std::string mixed = mixed_inputs_remark(capture, plan);
        if (!mixed.empty()) origin.storage += (origin.storage.empty() ? "" : "; ") + mixed;
    };
    // Of a preset by name the outputs stay as they are: what a kernel returns is part of what it is to be judged by.
    if (preset || origin.automatic) {
        const std::string name = plan.name;
        plan = stored_as(plan, {storage.fp16, {}});
        if (preset && plan.name != name)
            origin.storage =
                fmt::format("the file is {}: {} is {} with fp16 where it has bf16", types.tensors, plan.name, name);
    }
    if (!origin.automatic) {
        if (const std::string differs = storage_remark(storage, types, kernel, plan); !differs.empty())
            origin.storage = differs;
        return add_inputs();
    }
    const std::vector<std::string> known = observed_kernels(capture);
    if (std::find(known.begin(), known.end(), kernel) == known.end()) return add_inputs();
    origin.kernel = kernel;
    compare(capture, "", options, call);
    origin.chosen = nearest_plan(ranked, kernel);
    if (origin.chosen) plan = faultline::plan(origin.chosen->plan);
    origin.storage = storage_remark(storage, types, kernel, plan);
    add_inputs();
    origin.nearer = nearer_plans(ranked, plan.name, options.heads);
}

bool draws(const RoundingPlan& plan) {
    const std::vector<Site> rounding = plan.rounding_sites();
    return std::any_of(rounding.begin(), rounding.end(),
                       [&](Site site) { return plan[site].rounding == Rounding::stochastic; });
}

std::string kernel_asked_about(const Capture& capture) {
    const std::vector<std::string> known = observed_kernels(capture);
    if (std::find(known.begin(), known.end(), "flash") != known.end()) return "flash";
    return known.empty() ? "" : known.front();
}

}  // namespace faultline::cli
