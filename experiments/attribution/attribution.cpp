// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/attribution.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>

#include <fmt/format.h>

#include <faultline/attribution/counterfactuals.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/rows.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

using namespace attribution;

/// Thrown inside a layer when the caller asked to stop; the layer is dropped.
struct Cancelled {};

/// Certified bounds, without the last step that makes every 53-bit value the correctly rounded one: in a saturated row an
/// element of dq whose leading terms cancel exactly (two keys with the same coordinate) is 1e-80 of its row, and deciding
/// its last bit took longer than everything else. Its bound says what is known of it.
constexpr TruthOptions certified{.correctly_rounded = false};

/// Counts units of work done, tells the caller, and stops the work when asked.
class Progress {
  public:
    Progress(const AttributionOptions& options, std::size_t total) : options_(options), total_(total) {}
    void step(const std::string& what) {
        const std::lock_guard lock(mutex_);
        ++done_;
        if (options_.progress) options_.progress(done_, total_, what);
    }
    /// Work that turned up on the way.
    void expect(std::size_t more) {
        const std::lock_guard lock(mutex_);
        total_ += more;
    }
    void check() const {
        if (options_.cancelled && options_.cancelled()) throw Cancelled{};
    }

  private:
    const AttributionOptions& options_;
    std::mutex mutex_;
    std::size_t done_ = 0, total_;
};

/// How the layer's work is cut: groups of heads, sites with counterfactuals, corrections, outputs.
struct Work {
    const LayerCapture& layer;
    RoundingPlan plan;
    std::vector<Group> groups;
    std::vector<Output> outputs;
    std::vector<Site> sites;
    bool all_sites = true;  ///< that round and are reached: only then do their effects add up to anything
    const std::vector<Correction>& corrections;
    Faults faults;

    Work(const LayerCapture& the_layer, const RoundingPlan& the_plan, const AttributionOptions& options)
        : layer(the_layer),
          plan(for_head_dim(the_plan, static_cast<int>(the_layer.head_dim()), the_layer.causal)),
          groups(groups_of(the_layer, options.heads, options.seed)),
          corrections(options.corrections),
          faults{options.faults, static_cast<int>(the_layer.heads())} {
        for (const Fault& fault : faults.list)
            (void)AttentionInjector(fault, plan, faults.heads);  // says now what cannot stand in this plan
        for (const Output o : options.outputs)
            if (o == Output::o || !layer.dout.empty()) outputs.push_back(o);
        if (outputs.empty())
            throw RequestError(
                fmt::format("{}: the layer has no \"{}.do\": expected it for dq, dk, dv; only o can be attributed",
                            layer.name, layer.name));
        std::vector<Site> rounding = plan.rounding_sites();
        for (const Fault& fault : faults.list)  // a site at fault is one to attribute, though its rule be exact
            if (std::count(rounding.begin(), rounding.end(), std::get<Site>(fault.site)) == 0)
                rounding.push_back(std::get<Site>(fault.site));
        std::sort(rounding.begin(), rounding.end());
        for (const Site site : rounding) {
            const bool reached = !layer.dout.empty() || info(site).pass != Pass::backward;
            if (!reached) continue;
            if (options.sites.empty() || std::count(options.sites.begin(), options.sites.end(), site) > 0)
                sites.push_back(site);
            else
                all_sites = false;
        }
        for (const Site site : options.sites)
            if (std::count(rounding.begin(), rounding.end(), site) == 0)
                throw RequestError(fmt::format("site \"{}\" is exact in plan \"{}\": there is no rounding to attribute",
                                               faultline::name(site), plan.name));
        for (const int head : options.heads)
            if (head < 0 || head >= layer.heads())
                throw RequestError(fmt::format("head {} of {}: expected 0 to {}", head, layer.name, layer.heads() - 1));
        const std::string problem = problem_with(plan);
        if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
    }
};

/// First stage, per group: truth, the plan with its recorder, the exact plan in binary64.
struct FirstStage {
    std::vector<GroupBase> bases;
    std::vector<std::unique_ptr<TileRecorder>> recorders;
    std::vector<RunOutputs> exact;
    std::vector<TruthVerification> verified;

    FirstStage(const Work& work, const AttributionOptions& options, Progress& progress)
        : bases(work.groups.size()),
          recorders(work.groups.size()),
          exact(work.groups.size()),
          verified(work.groups.size()) {
        parallel_for(2 * work.groups.size(), options.threads, [&](std::size_t task) {
            progress.check();
            const std::size_t g = task / 2;
            const Group& group = work.groups[g];
            if (task % 2 == 0) {
                bases[g].truth = attention_truth(group.problem, certified);
                if (options.verify_truth > 0)
                    verified[g] = faultline::verify_truth(group.problem, bases[g].truth, options.verify_truth,
                                                          options.seed + g, 320, options.cancelled);
                progress.check();
                progress.step(work.layer.name + ": truth");
            } else {
                recorders[g] = std::make_unique<TileRecorder>(group.inputs, work.plan);
                bases[g].plan = run_plan(group, work.plan, work.faults, recorders[g].get(), &bases[g].realised);
                exact[g] = run_plan(group, exact_of(work.plan));
                progress.step(work.layer.name + ": plan");
            }
        });
        for (std::size_t g = 0; g < bases.size(); ++g) {
            bases[g].direction = mean_key_direction(work.groups[g]);
            for (const Output output : work.outputs) {
                const auto o = static_cast<std::size_t>(output);
                bases[g].plan_error[o] = error_vector(bases[g].plan[output], bases[g].truth, output);
                bases[g].plan_error_squared[o] = squared(bases[g].plan_error[o]);
            }
        }
    }

    /// The plan's schedule with no rounding.
    static RoundingPlan exact_of(const RoundingPlan& plan) {
        RoundingPlan exact = plan;
        for (const Site site : plan.rounding_sites()) exact.set(site, Rule{});
        return exact;
    }
};

/// Squares that a level is made of, summed over groups.
struct LevelSums {
    WideReal rounding, truth;
    void add(const GroupTruth& group, Output output, std::size_t matrices, const std::optional<Format>& format) {
        for (std::size_t i = 0; i < matrices; ++i) {
            const CertifiedMatrix& matrix = truth_of(group, output, i);
            const WideReal norm = frobenius_norm(matrix);
            truth = truth + norm * norm;
            if (!format) continue;
            const WideReal error = rounding_error(matrix, *format);
            rounding = rounding + error * error;
        }
    }
    void join(const LevelSums& next) {
        rounding = rounding + next.rounding;
        truth = truth + next.truth;
    }
    [[nodiscard]] WideReal level() const {
        return truth == WideReal(0.0) ? WideReal(0.0) : sqrt(rounding) / sqrt(truth);
    }
};

/// A correction on one group.
struct CorrectedGroup {
    std::array<ErrorSums, 4> errors;
    std::array<LevelSums, 4> levels;  ///< of its own truth, where that is another
};

/// Second stage: counterfactuals and corrections, by (group, item).
struct SecondStage {
    std::vector<std::vector<std::array<SiteSums, 4>>> sites;  ///< [site][group]
    std::vector<std::vector<CorrectedGroup>> corrections;     ///< [correction][group]

    SecondStage(const Work& work, const FirstStage& first, const AttributionOptions& options, Progress& progress) {
        const std::size_t groups = work.groups.size();
        sites.assign(work.sites.size(), std::vector<std::array<SiteSums, 4>>(groups));
        corrections.assign(work.corrections.size(), std::vector<CorrectedGroup>(groups));
        const std::size_t per_group = work.sites.size() + work.corrections.size();
        parallel_for(groups * per_group, options.threads, [&](std::size_t task) {
            progress.check();
            const std::size_t g = task / per_group;
            const std::size_t item = task % per_group;
            if (item < work.sites.size()) {
                const Site site = work.sites[item];
                sites[item][g] =
                    site_counterfactuals(work.groups[g], first.bases[g], work.plan, work.faults, site, work.outputs);
                progress.step(fmt::format("{}: site {}", work.layer.name, faultline::name(site)));
            } else {
                const std::size_t c = item - work.sites.size();
                corrections[c][g] = corrected(work, work.groups[g], first.bases[g], work.corrections[c]);
                progress.step(fmt::format("{}: correction {}", work.layer.name, work.corrections[c].name));
            }
        });
    }

    static CorrectedGroup corrected(const Work& work, const Group& group, const GroupBase& base,
                                    const Correction& correction) {
        const RoundingPlan plan = apply(correction, work.plan, work.layer.name);
        CorrectedGroup sums;
        const auto measure = [&](const RunOutputs& run, const GroupTruth& truth, const std::vector<double>& direction) {
            for (const Output output : work.outputs)
                sums.errors[static_cast<std::size_t>(output)] = errors_of(run[output], truth, output, direction);
        };
        if (!correction.changes_function()) {
            measure(run_plan(group, plan, work.faults), base.truth, base.direction);
            return sums;
        }
        const TransformedGroup transformed(group, correction, format_of(work.layer.q.dtype),
                                           format_of(work.layer.k.dtype));
        const GroupTruth truth = attention_truth(transformed.group.problem, certified);
        const RunOutputs run = run_plan(transformed.group, plan, work.faults);
        // dq is then made of the transformed keys, and their mean is what a broken zero-sum law leaks.
        measure(run, truth, mean_key_direction(transformed.group));
        for (const Output output : work.outputs)
            sums.levels[static_cast<std::size_t>(output)].add(truth, output, run[output].size(),
                                                              faultline::stored_format(plan, output));
        return sums;
    }
};

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

ObservedOutput observed_output(const Work& work, const FirstStage& first, const ObservedKernel& kernel, Output output) {
    const HeadArray& array = *kernel[output];
    ObservedOutput seen;
    seen.kernel = kernel.name;
    std::size_t equal = 0, near = 0, total = 0;
    const Format stored = format_of(array.dtype);
    std::vector<ErrorSums> sums;
    for (std::size_t g = 0; g < work.groups.size(); ++g) {
        const Group& group = work.groups[g];
        std::vector<Matrix> values;
        for (std::size_t i = 0; i < first.bases[g].plan[output].size(); ++i) {
            const bool per_query = output == Output::o || output == Output::dq;
            const std::ptrdiff_t head = per_query ? group.kv_head * static_cast<std::ptrdiff_t>(group.query_heads()) +
                                                        static_cast<std::ptrdiff_t>(i)
                                                  : group.kv_head;
            values.emplace_back(array(group.batch, head));
            const std::vector<double>& plan = first.bases[g].plan[output][i].values;
            for (std::size_t a = 0; a < plan.size(); ++a) {
                const double x = values.back().values[a];
                equal += plan[a] == x;
                near += plan[a] == x || std::abs(plan[a] - x) <= ulp(x, stored);
                ++total;
            }
        }
        sums.push_back(errors_of(values, first.bases[g].truth, output, first.bases[g].direction));
    }
    seen.error = over_groups(sums);
    seen.bit_equal_to_plan = static_cast<double>(equal) / static_cast<double>(total);
    seen.within_one_ulp_of_plan = static_cast<double>(near) / static_cast<double>(total);
    return seen;
}

OutputAttribution output_attribution(const Work& work, const FirstStage& first, const SecondStage& second,
                                     Output output) {
    const auto o = static_cast<std::size_t>(output);
    const std::size_t groups = work.groups.size();
    OutputAttribution a;
    a.output = output;
    WideReal bound_squared;
    LevelSums level;
    const std::optional<Format> format = faultline::stored_format(work.plan, output);
    long double plan_squared = 0;
    for (std::size_t g = 0; g < groups; ++g) {
        const GroupBase& base = first.bases[g];
        for (std::size_t i = 0; i < base.plan[output].size(); ++i) {
            const WideReal bound = frobenius_bound(truth_of(base.truth, output, i));
            bound_squared = bound_squared + bound * bound;
        }
        level.add(base.truth, output, base.plan[output].size(), format);
        plan_squared += base.plan_error_squared[o];
    }
    a.truth_norm = sqrt(level.truth);
    if (format) a.level = level.level();
    a.truth_bound = sqrt(bound_squared);
    a.plan = measured(groups, [&](std::size_t g) {
        return errors_of(first.bases[g].plan[output], first.bases[g].truth, output, first.bases[g].direction);
    });
    a.floor = measured(groups, [&](std::size_t g) {
        return errors_of(first.exact[g][output], first.bases[g].truth, output, first.bases[g].direction);
    });
    for (const ObservedKernel& kernel : work.layer.observed)
        if (kernel[output]) a.observed.push_back(observed_output(work, first, kernel, output));
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

/// Runs the redundant sites of each output repaired together: one run more for each set of them.
void add_redundant(const Work& work, const FirstStage& first, const AttributionOptions& options, Progress& progress,
                   std::vector<OutputAttribution>& outputs) {
    std::map<std::vector<Site>, std::vector<std::array<SiteSums, 4>>> runs;  // by group
    for (OutputAttribution& a : outputs)
        for (std::vector<Site>& sites : redundant_sets(work.sites, a.sites)) {
            runs[sites].resize(work.groups.size());
            a.redundant.push_back({std::move(sites), {}, 0});
        }
    progress.expect(runs.size() * work.groups.size());
    for (auto& [sites, by_group] : runs)
        parallel_for(work.groups.size(), options.threads, [&, &set = sites, &found = by_group](std::size_t g) {
            progress.check();
            found[g] = repaired_together(work.groups[g], first.bases[g], work.plan, work.faults, set, work.outputs);
            progress.step(work.layer.name + ": redundant sites");
        });
    for (OutputAttribution& a : outputs)
        for (RedundantSites& together : a.redundant) {
            const auto o = static_cast<std::size_t>(a.output);
            long double plan_squared = 0;
            for (const GroupBase& base : first.bases) plan_squared += base.plan_error_squared[o];
            const SiteEffect effect = site_effect(runs[together.sites], o, plan_squared, a.plan, a.floor);
            together.repaired = effect.repaired;
            together.share = effect.share;
        }
}

}  // namespace

LayerAttribution attribute(const LayerCapture& layer, const RoundingPlan& plan, const AttributionOptions& options) {
    const Work work(layer, plan, options);
    Progress progress(options, work.groups.size() * (2 + work.sites.size() + work.corrections.size()));
    const FirstStage first(work, options, progress);
    const SecondStage second(work, first, options, progress);

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
    a.sites = work.sites;
    a.faults.resize(work.faults.list.size());
    for (const GroupBase& base : first.bases)
        for (std::size_t f = 0; f < base.realised.size(); ++f) a.faults[f].join(base.realised[f]);
    for (const Site site : work.sites) {
        TileStatistics all;
        for (const auto& recorder : first.recorders) all = joined(all, recorder->statistics(site));
        a.local.push_back(std::move(all));
    }
    for (const Output output : work.outputs) a.outputs.push_back(output_attribution(work, first, second, output));
    add_redundant(work, first, options, progress, a.outputs);
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
    return a;
}

Attribution attribute(const Capture& capture, const RoundingPlan& plan, const AttributionOptions& options) {
    Attribution a;
    a.input = capture.path;
    a.plan = plan;
    a.faults = options.faults;
    for (const LayerCapture& layer : capture.layers) {
        try {
            a.layers.push_back(attribute(layer, plan, options));
        } catch (const Cancelled&) {
            a.complete = false;
            break;
        } catch (const RequestError& error) {
            throw RequestError(fmt::format("{}: {}", capture.path, error.what()));
        }
    }
    return a;
}

}  // namespace faultline
