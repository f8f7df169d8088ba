// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/attribution.hpp>

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include <faultline/attribution/layer_plan.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/lse_units.hpp>
#include <faultline/attribution/rows.hpp>
#include <faultline/attribution/same_element.hpp>
#include <faultline/attribution/stages.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/format/bulk.hpp>

namespace faultline {
namespace {

using namespace attribution;

ErrorMeasure over_groups(const std::vector<ErrorSums>& by_group) {
    ErrorSums sums = by_group.front();
    for (std::size_t g = 1; g < by_group.size(); ++g) sums.join(by_group[g]);
    return sums.measure();
}

template <class F>
ErrorMeasure measured(std::size_t groups, F&& sums_of) {
    std::vector<ErrorSums> all;
    for (std::size_t g = 0; g < groups; ++g) all.push_back(sums_of(g));
    return over_groups(all);
}

const std::optional<HeadArray>& array_at(const ObservedKernel& kernel, std::size_t place) {
    return place == lse_place ? kernel.lse : kernel.outputs[place];
}

ObservedOutput observed_output(const Work& work, const FirstStage& first, const ObservedKernel& kernel,
                               std::size_t place) {
    const HeadArray& array = *array_at(kernel, place);
    ObservedOutput seen;
    seen.kernel = kernel.name;
    seen.in_log2 = place == lse_place;
    std::size_t equal = 0, near = 0, total = 0;
    const SameElement same(array.dtype);
    std::vector<ErrorSums> sums, stored_sums;
    seen.format = with_saturation(format_of(array.dtype), false);
    LevelSums level;
    for (std::size_t g = 0; g < work.groups.size(); ++g) {
        const Group& group = work.groups[g];
        std::vector<Matrix> values;
        const std::vector<Matrix>& of_plan = values_at(first.bases[g].plan, place);
        for (std::size_t i = 0; i < of_plan.size(); ++i) {
            const bool per_query =
                place != static_cast<std::size_t>(Output::dk) && place != static_cast<std::size_t>(Output::dv);
            const std::ptrdiff_t head = per_query ? group.kv_head * static_cast<std::ptrdiff_t>(group.query_heads()) +
                                                        static_cast<std::ptrdiff_t>(i)
                                                  : group.kv_head;
            values.emplace_back(array(group.batch, head));
            const std::vector<double>& plan = of_plan[i].values;
            const std::vector<double>* lse = place == lse_place ? &first.bases[g].truth.heads[i].lse.value : nullptr;
            if (lse != nullptr) seen.in_log2 = seen.in_log2 && reads_as_log2(values.back().values, *lse);
            for (std::size_t a = 0; a < plan.size(); ++a) {
                const double x = values.back().values[a];
                if (lse != nullptr && !std::isfinite((*lse)[a])) {
                    seen.finite_without_key += !std::isinf(x);
                    continue;
                }
                const SameElement::Answer answer = same(plan[a], x);
                equal += answer.equal;
                near += answer.within_one_ulp;
                ++total;
            }
        }
        sums.push_back(errors_at(values, first.bases[g].truth, place, first.bases[g].direction));
        level.add(first.bases[g].truth, place, seen.format);
        std::vector<Matrix> stored = of_plan;
        for (Matrix& m : stored) round_bulk(m.values, *seen.format);
        stored_sums.push_back(errors_at(stored, first.bases[g].truth, place, first.bases[g].direction));
    }
    seen.error = over_groups(sums);
    seen.level = level.level();
    seen.plan = over_groups(stored_sums);
    const auto all = static_cast<double>(std::max<std::size_t>(total, 1));  // an lse may have no row with a key
    seen.bit_equal_to_plan = static_cast<double>(equal) / all;
    seen.within_one_ulp_of_plan = static_cast<double>(near) / all;
    return seen;
}

OutputAttribution output_attribution(const Work& work, const FirstStage& first, const SecondStage& second,
                                     std::size_t o) {
    const std::size_t groups = work.groups.size();
    OutputAttribution a;
    a.lse = o == lse_place;
    if (!a.lse) a.output = static_cast<Output>(o);
    WideReal bound_squared;
    LevelSums level;
    a.grouped = work.grouped();
    const std::optional<Format> format = stored_at(work.plan, o, a.grouped);
    long double plan_squared = 0;
    for (std::size_t g = 0; g < groups; ++g) {
        const GroupBase& base = first.bases[g];
        for (const CertifiedMatrix& truth : truths_at(base.truth, o)) {
            const WideReal bound = frobenius_bound(truth);
            bound_squared = bound_squared + bound * bound;
            a.elements += truth.size();
        }
        level.add(base.truth, o, format);
        plan_squared += base.plan_error_squared[o];
    }
    a.truth_norm = sqrt(level.truth);
    if (format) a.level = level.level();
    a.truth_bound = sqrt(bound_squared);
    a.plan = measured(groups, [&](std::size_t g) {
        return errors_at(values_at(first.bases[g].plan, o), first.bases[g].truth, o, first.bases[g].direction);
    });
    a.floor = measured(groups, [&](std::size_t g) {
        return errors_at(values_at(first.exact[g], o), first.bases[g].truth, o, first.bases[g].direction);
    });
    for (const ObservedKernel& kernel : work.layer.observed)
        if (array_at(kernel, o)) a.observed.push_back(observed_output(work, first, kernel, o));
    for (const auto& site : second.sites) a.sites.push_back(site_effect(site, o, plan_squared, a.plan, a.floor));
    if (work.all_sites) {
        a.unexplained = plan_squared > 0 ? 1.0 : 0.0;
        for (const SiteEffect& effect : a.sites) *a.unexplained -= effect.alone_squared;
    }
    WideReal best = a.plan.rel_error;
    for (std::size_t c = 0; c < work.corrections.size(); ++c) {
        CorrectedOutput corrected{work.corrections[c].name, work.corrections[c].changes_function(),
                                  measured(groups, [&](std::size_t g) { return second.corrections[c][g].errors[o]; }),
                                  a.level};
        if (corrected.changes_function) {
            LevelSums own;
            for (std::size_t g = 0; g < groups; ++g) own.join(second.corrections[c][g].levels[o]);
            if (format) corrected.level = own.level();
        }
        if (!corrected.changes_function && corrected.error.nonfinite == 0 && corrected.error.rel_error < best) {
            best = corrected.error.rel_error;
            a.best_correction = corrected.correction;
        }
        a.corrections.push_back(std::move(corrected));
    }
    return a;
}

std::optional<SinkGradient> sink_gradient(const Work& work, const FirstStage& first) {
    if (work.layer.sink.empty() || work.layer.dout.empty()) return std::nullopt;
    SinkGradient all;
    std::size_t at = 0;
    std::ptrdiff_t batch = 0;
    std::vector<std::size_t> heads;  // of the first batch element
    for (std::size_t g = 0; g < work.groups.size(); ++g) {
        const Group& group = work.groups[g];
        if (group.batch != batch) at = 0, batch = group.batch;
        add_sink_gradient(first.bases[g].truth, first.bases[g].plan.dsink, at, all);
        at += group.query_heads();
        if (group.batch != 0) continue;
        for (std::size_t h = 0; h < group.query_heads(); ++h)
            heads.push_back(static_cast<std::size_t>(group.kv_head) * group.query_heads() + h);
    }
    for (const ObservedKernel& kernel : work.layer.observed) {
        if (kernel.dsink.empty()) continue;
        SinkGradient::Observed seen{kernel.name, {}};
        for (const std::size_t head : heads) seen.values.push_back(kernel.dsink[head]);
        all.observed.push_back(std::move(seen));
    }
    return all;
}

/// Runs the redundant sites of each output repaired together: one run more for each set of them.
void add_redundant(const Work& work, const FirstStage& first, const AttributionOptions& options, WorkCount& count,
                   std::vector<OutputAttribution>& outputs) {
    std::map<std::vector<Site>, std::vector<PlaceSums>> runs;  // by group
    for (OutputAttribution& a : outputs)
        for (std::vector<Site>& sites : redundant_sets(work.sites, a.sites)) {
            runs[sites].resize(work.groups.size());
            a.redundant.push_back({std::move(sites), {}, 0, 0});
        }
    count.expect(runs.size() * work.groups.size());
    for (auto& [sites, by_group] : runs)
        parallel_for(work.groups.size(), work.backend.calls_at_once(options.threads),
                     [&, &set = sites, &found = by_group](std::size_t g) {
                         count.check();
                         found[g] = repaired_together(work.groups[g], first.bases[g], work.plan, work.faults, set,
                                                      work.places, work.backend);
                         count.step(work.layer.name + ": redundant sites");
                     });
    for (OutputAttribution& a : outputs)
        for (RedundantSites& together : a.redundant) {
            const std::size_t o = a.lse ? lse_place : static_cast<std::size_t>(a.output);
            long double plan_squared = 0;
            for (const GroupBase& base : first.bases) plan_squared += base.plan_error_squared[o];
            const SiteEffect effect = site_effect(runs[together.sites], o, plan_squared, a.plan, a.floor);
            together.repaired = effect.repaired;
            together.share = effect.share;
            together.moved_squared = effect.moved_squared;
        }
}

/// Of the plan with its recorder, of truth and of what corrections make of it, with faults; what is wrong with a plan itself is said later.
void expect_room_for(const LayerCapture& layer, const RoundingPlan& plan, const AttributionOptions& options) {
    const std::vector<Group> groups = groups_of(layer, options.heads, options.seed);
    Faults faults{{}, static_cast<int>(layer.heads())};
    for (const Fault& fault : options.faults)
        if (std::holds_alternative<Site>(fault.site)) faults.list.push_back(fault);
    SeenSites all_sites;
    const auto check = [&](const RoundingPlan& run, Instrument* instrument) {
        const RoundingPlan own = for_layer(run, layer);
        if (problem_with(own).empty()) expect_room(layer.name, groups, own, *options.backend, instrument, faults);
    };
    check(plan, &all_sites);
    expect_room_for_truth(layer.name, groups, *options.backend);
    for (const Correction& correction : options.corrections) check(apply(correction, plan, layer.name), nullptr);
}

}  // namespace

std::string_view name(const OutputAttribution& output) { return output.lse ? "lse" : name(output.output); }

LayerAttribution attribute(const LayerCapture& layer, const RoundingPlan& plan, const AttributionOptions& options) {
    const Work work(layer, plan, options);
    WorkCount count(options.progress, options.cancelled,
                    work.groups.size() * (2 + work.sites.size() + work.corrections.size()));
    const FirstStage first(work, options, count);
    const SecondStage second(work, first, options, count);

    LayerAttribution a;
    a.name = layer.name;
    a.batch = layer.q.batch;
    a.heads = layer.heads();
    a.kv_heads = layer.kv_heads();
    for (const Group& group : work.groups)
        if (group.batch == 0)
            for (std::size_t h = 0; h < group.query_heads(); ++h)
                a.head_indices.push_back(group.kv_head * static_cast<std::ptrdiff_t>(group.query_heads()) +
                                         static_cast<std::ptrdiff_t>(h));
    a.seq_q = layer.q.rows;
    a.seq_k = layer.k.rows;
    a.head_dim = layer.head_dim();
    a.head_dim_v = layer.v.cols;
    a.causal = layer.causal;
    a.softcap = layer.softcap;
    a.has_sinks = !layer.sink.empty();
    if (layer.dropout) a.keep = layer.keep;
    a.sites = work.sites;
    a.all_sites = work.all_sites;
    a.faults.resize(work.faults.list.size());
    for (const Fault& fault : work.faults.list) a.fault_sites.push_back(std::get<Site>(fault.site));
    for (const GroupBase& base : first.bases)
        for (std::size_t f = 0; f < base.realised.size(); ++f) a.faults[f].join(base.realised[f]);
    for (const Site site : work.sites) {
        TileStatistics all;
        for (const auto& recorder : first.recorders) all = joined(all, recorder->statistics(site));
        a.local.push_back(std::move(all));
    }
    for (const std::size_t place : work.places) a.outputs.push_back(output_attribution(work, first, second, place));
    add_redundant(work, first, options, count, a.outputs);
    for (std::size_t g = 0; g < work.groups.size(); ++g) {
        append_rows(work.groups[g], first.bases[g].truth, first.recorders[g]->rows(), a.rows);
        a.truth_slow_elements += first.bases[g].truth.slow_elements;
        if (options.verify_truth == 0) continue;
        if (!a.verified) a.verified.emplace();
        a.verified->checked += first.verified[g].checked;
        a.verified->outside += first.verified[g].outside;
        if (first.verified[g].worst_ratio >= a.verified->worst_ratio) {
            a.verified->worst_ratio = first.verified[g].worst_ratio;
            a.verified->worst = first.verified[g].worst;
        }
    }
    summarize(a.rows);
    a.dsink = sink_gradient(work, first);
    return a;
}

Attribution attribute(const Capture& capture, const RoundingPlan& plan, const AttributionOptions& options) {
    Attribution a;
    a.input = capture.path;
    a.plan = plan;
    a.faults = options.faults;
    const auto named = [&](auto&& work) {
        try {
            work();
        } catch (const RequestError& error) {
            throw RequestError(fmt::format("{}: {}", capture.path, error.what()));
        } catch (const NoRoom& error) {
            throw NoRoom(fmt::format("{}: {}", capture.path, error.what()));
        }
    };
    named([&] {  // before the work on any layer
        for (const LayerCapture& layer : capture.layers) expect_room_for(layer, plan, options);
    });
    for (const LayerCapture& layer : capture.layers) {
        try {
            named([&] { a.layers.push_back(attribute(layer, plan, options)); });
            if (options.layer_done) options.layer_done(a);
        } catch (const Cancelled&) {
            a.complete = false;
            break;
        }
    }
    return a;
}

}  // namespace faultline
