// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/stages.hpp>

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <faultline/attribution/layer_plan.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/rows.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/injectors/passed_sites.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::attribution {
namespace {

/// Certified bounds, without the last step that makes every 53-bit value the correctly rounded one: in a saturated row an
/// element of dq whose leading terms cancel exactly (two keys with the same coordinate) is 1e-80 of its row, and deciding
/// its last bit took longer than everything else. Its bound says what is known of it.
constexpr TruthOptions certified{.correctly_rounded = false};

/// The plan's schedule with no rounding.
RoundingPlan exact_of(const RoundingPlan& plan) {
    RoundingPlan exact = plan;
    for (const Site site : plan.rounding_sites()) exact.set(site, Rule{});
    return exact;
}

/// A fault at a site that the run never passes would be planted nowhere (passed_sites.hpp).
void expect_faults_passed(const Work& work) {
    if (work.faults.list.empty() || work.groups.empty()) return;
    PassedSites passed;
    (void)run_plan(work.groups.front(), work.plan, &passed, work.backend);
    for (const Fault& fault : work.faults.list) {
        const Site site = std::get<Site>(fault.site);
        if (!passed[site])
            throw RequestError(
                fmt::format("fault \"{}\": {} has nothing to do in {} under plan \"{}\": expected a site that the run "
                            "passes (faultline sites says what each is of)",
                            to_string(fault), faultline::name(site), work.layer.name, work.plan.name));
    }
}

CorrectedGroup corrected(const Work& work, const Group& group, const GroupBase& base, const Correction& correction) {
    const RoundingPlan plan = apply(correction, work.plan, work.layer.name);
    CorrectedGroup sums;
    const auto measure = [&](const RunOutputs& run, const GroupTruth& truth, const std::vector<double>& direction) {
        for (const std::size_t place : work.places)
            sums.errors[place] = errors_at(values_at(run, place), truth, place, direction);
    };
    if (!correction.changes_function()) {
        measure(run_plan(group, plan, work.faults, nullptr, nullptr, work.backend), base.truth, base.direction);
        return sums;
    }
    const TransformedGroup transformed(group, correction, format_of(work.layer.q.dtype), format_of(work.layer.k.dtype));
    const GroupTruth truth = work.backend.truth(transformed.group.problem, certified);
    const RunOutputs run = run_plan(transformed.group, plan, work.faults, nullptr, nullptr, work.backend);
    // dq is then made of the transformed keys, and their mean is what a broken zero-sum law leaks.
    measure(run, truth, mean_key_direction(transformed.group));
    for (const std::size_t place : work.places)
        sums.levels[place].add(truth, place, stored_at(plan, place, work.grouped()));
    return sums;
}

}  // namespace

Work::Work(const LayerCapture& the_layer, const RoundingPlan& the_plan, const AttributionOptions& options)
    : layer(the_layer),
      plan(for_layer(the_plan, the_layer)),
      groups(groups_of(the_layer, options.heads, options.seed)),
      faults{options.faults, static_cast<int>(the_layer.heads())},
      backend(*options.backend) {
    for (const Fault& fault : faults.list)
        (void)AttentionInjector(fault, plan, faults.heads);  // says now what cannot stand in this plan
    for (const Output o : options.outputs)
        if (o == Output::o || !layer.dout.empty()) places.push_back(static_cast<std::size_t>(o));
    if (options.lse && std::any_of(layer.observed.begin(), layer.observed.end(),
                                   [](const ObservedKernel& kernel) { return kernel.lse.has_value(); }))
        places.push_back(lse_place);
    if (places.empty() && options.outputs.empty())
        throw RequestError(fmt::format("{}: no kernel has an lse there: expected LAYER.KERNEL.lse, or another output",
                                       escaped(layer.name)));
    if (places.empty())
        throw RequestError(
            fmt::format("{}: the layer has no \"{}.do\": expected it for dq, dk, dv; only o can be attributed",
                        layer.name, layer.name));
    std::vector<Site> rounding = plan.rounding_sites();
    for (const Fault& fault : faults.list)  // a site at fault is one to attribute, though its rule be exact
        if (std::count(rounding.begin(), rounding.end(), std::get<Site>(fault.site)) == 0)
            rounding.push_back(std::get<Site>(fault.site));
    std::sort(rounding.begin(), rounding.end());
    for (const Site site : rounding) {
        const bool reached =
            (!layer.dout.empty() || info(site).pass != Pass::backward) && takes_part(site, layer.extras());
        if (!reached) continue;
        if (options.sites.empty() || std::count(options.sites.begin(), options.sites.end(), site) > 0)
            sites.push_back(site);
        else
            all_sites = false;
    }
    for (const Site site : options.sites) {
        if (!takes_part(site, layer.extras()))
            throw RequestError(fmt::format(
                "site \"{}\" has nothing to do in {}: expected a layer with the softcap, sink or dropout that "
                "it belongs to",
                faultline::name(site), layer.name));
        if (std::count(rounding.begin(), rounding.end(), site) == 0)
            throw RequestError(fmt::format("site \"{}\" is exact in plan \"{}\": there is no rounding to attribute",
                                           faultline::name(site), plan.name));
    }
    for (const int head : options.heads)
        if (head < 0 || head >= layer.heads())
            throw RequestError(
                fmt::format("head {} of {}: expected 0 to {}", head, escaped(layer.name), layer.heads() - 1));
    const std::string problem = problem_with(plan);
    if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
    if (const std::string cannot = problem_with(plan, layer.extras()); !cannot.empty())
        throw RequestError(fmt::format("{}: {}", escaped(layer.name), cannot));
    expect_faults_passed(*this);
    std::string left_out;
    for (const Correction& correction : options.corrections) {
        const std::string cannot = problem_with(apply(correction, plan, layer.name), layer.extras());
        if (cannot.empty())
            corrections.push_back(correction);
        else
            left_out = cannot;
    }
    if (corrections.empty() && !options.corrections.empty())
        throw RequestError(fmt::format("{}: {}", escaped(layer.name), left_out));
}

FirstStage::FirstStage(const Work& work, const AttributionOptions& options, WorkCount& count)
    : bases(work.groups.size()),
      recorders(work.groups.size()),
      exact(work.groups.size()),
      verified(work.groups.size()) {
    // Where there are fewer groups than threads, the rest of them verify beside each other.
    const int threads = options.threads > 0 ? options.threads : hardware_threads();
    const int threads_each = std::max(1, threads / std::max(1, static_cast<int>(work.groups.size())));
    parallel_for(2 * work.groups.size(), options.threads, [&](std::size_t task) {
        count.check();
        const std::size_t g = task / 2;
        const Group& group = work.groups[g];
        if (task % 2 == 0) {
            bases[g].truth = work.backend.truth(group.problem, certified);
            if (options.verify_truth > 0)
                verified[g] = faultline::verify_truth(group.problem, bases[g].truth, options.verify_truth,
                                                      options.seed + g, 320, options.cancelled, threads_each);
            count.check();
            count.step(work.layer.name + ": truth");
        } else {
            recorders[g] = std::make_unique<TileRecorder>(group.inputs, work.plan);
            bases[g].plan =
                run_plan(group, work.plan, work.faults, recorders[g].get(), &bases[g].realised, work.backend);
            exact[g] = run_plan(group, exact_of(work.plan), nullptr, work.backend);
            count.step(work.layer.name + ": plan");
        }
    });
    for (std::size_t g = 0; g < bases.size(); ++g) {
        bases[g].direction = mean_key_direction(work.groups[g]);
        for (const std::size_t o : work.places) {
            bases[g].plan_error[o] = error_vector_at(values_at(bases[g].plan, o), bases[g].truth, o);
            bases[g].plan_error_squared[o] = squared(bases[g].plan_error[o]);
        }
    }
}

void LevelSums::add(const GroupTruth& group, std::size_t place, const std::optional<Format>& format) {
    for (const CertifiedMatrix& matrix : truths_at(group, place)) {
        const WideReal norm = frobenius_norm(matrix);
        truth = truth + norm * norm;
        if (!format) continue;
        const WideReal error = rounding_error(matrix, *format);
        rounding = rounding + error * error;
    }
}

void LevelSums::join(const LevelSums& next) {
    rounding = rounding + next.rounding;
    truth = truth + next.truth;
}

WideReal LevelSums::level() const { return truth == WideReal(0.0) ? WideReal(0.0) : sqrt(rounding) / sqrt(truth); }

SecondStage::SecondStage(const Work& work, const FirstStage& first, const AttributionOptions& options,
                         WorkCount& count) {
    const std::size_t groups = work.groups.size();
    sites.assign(work.sites.size(), std::vector<PlaceSums>(groups));
    corrections.assign(work.corrections.size(), std::vector<CorrectedGroup>(groups));
    const std::size_t per_group = work.sites.size() + work.corrections.size();
    parallel_for(groups * per_group, work.backend.calls_at_once(options.threads), [&](std::size_t task) {
        count.check();
        const std::size_t g = task / per_group;
        const std::size_t item = task % per_group;
        if (item < work.sites.size()) {
            const Site site = work.sites[item];
            sites[item][g] = site_counterfactuals(work.groups[g], first.bases[g], work.plan, work.faults, site,
                                                  work.places, work.backend);
            count.step(fmt::format("{}: site {}", escaped(work.layer.name), faultline::name(site)));
        } else {
            const std::size_t c = item - work.sites.size();
            corrections[c][g] = corrected(work, work.groups[g], first.bases[g], work.corrections[c]);
            count.step(fmt::format("{}: correction {}", escaped(work.layer.name), work.corrections[c].name));
        }
    });
}

}  // namespace faultline::attribution
