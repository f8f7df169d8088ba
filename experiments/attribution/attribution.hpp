// SPDX-License-Identifier: Apache-2.0
// Attribution: which rounding of which kernel made which output wrong, with which sign, and what repairs it. For every
// site of a plan the local error against the exact result of the site's operation, and its effect on each output by two
// counterfactuals: `alone`, every other site exact; `repaired`, this site exact. Truth is certified (lib/truth).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/attribution/capture.hpp>
#include <faultline/attribution/error_sums.hpp>
#include <faultline/attribution/plan_origin.hpp>
#include <faultline/attribution/sink_gradient.hpp>
#include <faultline/corrections/correction.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/cpu/recorder.hpp>
#include <faultline/injectors/fault.hpp>
#include <faultline/injectors/realised.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline {

/// The effect of one site on one output. Vectors below are errors over all elements of the output.
struct SiteEffect {
    ErrorMeasure alone;     ///< of the plan with every other site exact
    ErrorMeasure repaired;  ///< of the plan with this site exact
    double share =
        0;  ///< (|E|^2 - |E_repaired|^2) / |E|^2: the part of the plan's squared error by which it falls when
            ///< the site is repaired; negative where it grows, since the site cancels others' error
    double alone_squared = 0;  ///< |E_alone|^2 / |E|^2
    double interaction = 0;    ///< share - alone_squared: 0 where the site's error is added to the others' and has no
                               ///< correlation with them; below 0 where others do the same (redundant) or cancel it
    bool alone_below_floor = false;  ///< alone is not distinguishable from binary64 arithmetic: read it as 0
    double moved_squared =
        0;  ///< |E - E_repaired|^2 / |E|^2: how far the repair moves the output, whichever way. Large with a share near or
            ///< below 0 where the site hides what others do; infinite where it changes which elements are finite
};

/// Sites that do much alone and whose repair, one at a time, changes next to nothing (is_redundant): another of them rounds
/// the same thing again. What they are responsible for shows when all of them are repaired.
struct RedundantSites {
    std::vector<Site> sites;   ///< schedule order, two or more
    ErrorMeasure repaired;     ///< of the plan with all of them exact
    double share = 0;          ///< as SiteEffect::share
    double moved_squared = 0;  ///< as SiteEffect::moved_squared
};

/// Alone the site is worth naming, and its repair changes the squared error by less than a tenth of what it does alone.
[[nodiscard]] bool is_redundant(const SiteEffect& effect);

/// Of the plan's squared error: from here on the findings name a site.
inline constexpr double worth_naming = 0.05;

struct ObservedOutput {
    std::string kernel;
    ErrorMeasure error;
    double bit_equal_to_plan = 0;       ///< share of elements, by SameElement, as identify counts them
    double within_one_ulp_of_plan = 0;  ///< share, in ulps of the stored format
    // Of an lse alone.
    bool in_log2 = false;  ///< it is the truth's times log2(e), in every head
    std::size_t finite_without_key =
        0;  ///< rows that see neither key nor sink, and whose lse is finite, or NaN: they are in no sum
    // By the type of the kernel's tensor, which need not be what the plan stores. Empty: not known, as the plan's.
    std::optional<Format> format = std::nullopt;
    std::optional<WideReal> level = std::nullopt;     ///< relative error of the truth stored in it
    std::optional<ErrorMeasure> plan = std::nullopt;  ///< of the plan's own run rounded to it
};

struct CorrectedOutput {
    std::string correction;
    bool changes_function = false;  ///< the truth is then that of the changed function
    ErrorMeasure error;
    std::optional<WideReal> level;  ///< of the truth that it is compared with
};

struct OutputAttribution {
    Output output = Output::o;
    bool lse = false;      ///< it is the log-sum-exp, natural units, of the rows that see a key; `output` says nothing
    bool grouped = false;  ///< several query heads share a key head
    std::size_t elements = 0;  ///< compared, of the plan
    WideReal truth_norm;       ///< Frobenius, all heads
    WideReal truth_bound;      ///< |truth_norm - exact| and every element's error, Frobenius
    std::optional<WideReal>
        level;  ///< relative error of the truth stored in the output's format (level.hpp); empty: the plan stores no format
    ErrorMeasure plan;
    ErrorMeasure floor;  ///< the exact plan in binary64: what no counterfactual can resolve
    std::optional<double>
        unexplained;  ///< 1 - sum over all rounding sites of alone_squared: 0 where their errors add up without
                      ///< correlation, below 0 where they cancel or repeat each other; empty where counterfactuals ran
                      ///< for some only
    std::vector<ObservedOutput> observed;
    std::vector<SiteEffect> sites;             ///< parallel to LayerAttribution::sites
    std::vector<RedundantSites> redundant;     ///< sets of redundant sites that have the same error alone, in schedule
                                               ///< order; last those that differ in it, where there are two or more
    std::vector<CorrectedOutput> corrections;  ///< in the order asked for
    std::string
        best_correction;  ///< smallest rel_error among those that keep the function; empty if none is better than the plan
};

/// "o", "dq", "dk", "dv" or "lse".
[[nodiscard]] std::string_view name(const OutputAttribution& output);

/// Rows of all heads, [head][query].
struct RowStatistics {
    std::vector<double> p_max;         ///< largest true probability of the row
    std::vector<double> repeated_max;  ///< keys whose score, as the plan's softmax receives it, is the largest of the
                                       ///< whole row exactly; 1 = not repeated
    std::vector<double>
        rounded_to_one;  ///< keys whose true p / p_max is above 1 - 2^-9 (rounds to 1 in bf16); 1 = the largest alone
    std::vector<double> zero_sum;           ///< sum_j ds_ij after its cast, under the plan; nat/logit, whatever unit
                                            ///< the plan's kernel holds ds in
    std::vector<double> zero_sum_relative;  ///< the same over sum_j |ds_ij|; 0 where that is 0; +-1 in a row of one key
    std::vector<double> keys;               ///< number of keys that the row sees
    std::vector<double> delta_error;        ///< delta of the plan minus true delta
    std::vector<double> key_mean_norm;      ///< of each [head]: |mean key| of the keys that it sees, masked ones too
    std::vector<double> key_spread;         ///< [head] rms |key - mean key|
    // Of the rows of two keys and more; 0 where there is none.
    double saturated_fraction = 0;  ///< p_max > 1 - 2^-9
    double zero_sum_rms = 0;  ///< rms of zero_sum_relative over the rows of two keys and more (of one key, |x| / |x|
        ///< says nothing); NaN where the plan's ds is not finite, as below, or there is no such row
    double zero_sum_coherence = 0;       ///< |sum zero_sum| / sum |zero_sum|, with the sign of the sum
    double repeated_max_fraction = 0;    ///< repeated_max >= 2
    double rounded_to_one_fraction = 0;  ///< rounded_to_one >= 2
};

struct LayerAttribution {
    std::string name;
    std::ptrdiff_t batch = 1, heads = 0, kv_heads = 0, seq_q = 0, seq_k = 0, head_dim = 0, head_dim_v = 0;
    std::vector<std::ptrdiff_t> head_indices;  ///< query heads of each batch element that this speaks of: all, or those
                                               ///< asked for with those that share their keys; [head] below runs over
                                               ///< them, batch by batch
    double softcap = 0;                        ///< 0: none
    bool has_sinks = false;
    std::optional<double> keep;  ///< of dropout; empty: nothing is dropped
    bool causal = true;
    std::vector<Site> sites;            ///< the plan's rounding sites, schedule order; of them those asked for
    bool all_sites = true;              ///< those are all that round in this layer
    std::vector<Realised> faults;       ///< parallel to AttributionOptions::faults: what each did in the plan's run
    std::vector<Site> fault_sites;      ///< parallel to faults: where each stood
    std::vector<TileStatistics> local;  ///< local error by site (all rounding sites), per head and tile
    std::vector<OutputAttribution> outputs;  ///< those asked for, then the lse where a kernel left one
    RowStatistics rows;
    std::optional<SinkGradient> dsink;  ///< where there are sinks and a gradient
    std::size_t truth_slow_elements = 0;
    std::optional<TruthVerification> verified;
};

struct Attribution {
    std::string input;
    RoundingPlan plan;
    std::vector<LayerAttribution> layers;
    PlanOrigin origin;          ///< filled by who chose or compared the plan
    std::vector<Fault> faults;  ///< that stood in the plan's kernel
    bool complete = true;       ///< false: interrupted; the layers present are whole
};

struct AttributionOptions {
    std::vector<Output> outputs{all_outputs.begin(), all_outputs.end()};
    bool lse = true;                      ///< the log-sum-exp too, in layers where a kernel left one
    std::vector<Site> sites;              ///< counterfactuals for these; empty: all rounding sites
    std::vector<Correction> corrections;  ///< compared on every output
    std::vector<Fault> faults;            ///< planted in the plan's kernel: kernel sites, every layer, step 0
    std::vector<int> heads;               ///< empty: all query heads (a kv head's group is computed whole)
    int threads = 0;                      ///< 0: one per hardware thread; results do not depend on it
    const AttentionBackend* backend = &cpu_backend();  ///< where plans run; results do not depend on it
    std::size_t verify_truth = 0;                      ///< elements per output to recompute in MPFR
    std::uint64_t seed = 0;                            ///< of stochastic rounding and of the sampling of verify_truth
    /// Called from worker threads, serialised: done of total units of work, and what is being done.
    std::function<void(std::size_t done, std::size_t total, const std::string& what)> progress;
    /// Called when a layer is whole, with all that there are so far; on the thread that asked for the attribution.
    std::function<void(const Attribution& so_far)> layer_done;
    /// Polled between units of work; true stops after the layers that are whole.
    std::function<bool()> cancelled;
};

/// One layer. RequestError where the options name what the layer has not.
[[nodiscard]] LayerAttribution attribute(const LayerCapture& layer, const RoundingPlan& plan,
                                         const AttributionOptions& options);
/// Every layer of the capture.
[[nodiscard]] Attribution attribute(const Capture& capture, const RoundingPlan& plan,
                                    const AttributionOptions& options = {});

}  // namespace faultline
