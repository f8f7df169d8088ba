// SPDX-License-Identifier: Apache-2.0
// A verdict on what a kernel returned: are its errors those that its plan's rounding explains? Four answers:
//   within_rounding  as large as the plan's rounding makes them, and without a sign beyond what rounding of random sign has
//   unresolved       the truth is not known well enough to say: a test's outcome depends on where in its bound it lies; or
//                    the plan's own run is not finite where the kernel is
//   biased           a signed error that independent rounding does not explain, or one that agreeing signs make larger, as
//                    they do in the plan's own run; in training it adds up
//   wrong            larger than the plan's rounding explains and than the plan's own run has it, or not finite
// The null hypothesis is the plan with its low-precision roundings given random signs (null_model.hpp), run some dozens of
// times. docs/checking.md has the statistics, docs/results/check.md what they detect and how often they are wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/verdict/head_cells.hpp>

namespace faultline {

/// From what is told where nothing else is, to what is told whatever else is.
enum class Verdict : unsigned char { within_rounding, unresolved, biased, wrong };
[[nodiscard]] const char* name(Verdict verdict);

/// One test that failed.
struct Finding {
    Verdict kind = Verdict::biased;
    int head = 0;  ///< of o and dq the query head, of dk and dv the key head; batch-major: batch * heads + head
    verdict::Cell cell;
    bool nonfinite = false;         ///< elements that are not finite where the truth is; the cell then says nothing
    bool finite = false;            ///< lse: rows without a key whose lse is finite, or NaN; the same
    verdict::NotFinite not_finite;  ///< of nonfinite elements: how many, and the first of them
    std::size_t not_finite_of_plan = 0;  ///< of those: the plan's own run has them too
    verdict::Worst worst;                ///< of sizes and elements: the row (and feature) that most of it comes from
    double t = 0;        ///< Student's statistic, with as many degrees of freedom as there are runs of the null model
                         ///< (one fewer for sizes)
    double log10_p = 0;  ///< two-sided, before the correction for the number of tests
    double effect = 0;  ///< signed tests: mean error over the cell in rms errors of the plan's rounding; size, scatter,
                        ///< element: the ratio to what the plan's rounding makes, in rms; infinite where it makes none;
                        ///< nonfinite, finite: how many
    double plan_t = 0;  ///< the same statistic of the plan's own run
    bool of_plan = false;  ///< the plan's own run fails the same test with the same sign: its numerics do it; or of
                           ///< elements that are not finite, the plan has all of them
};

struct OutputCheck {
    Output output = Output::o;
    bool lse = false;  ///< it is the log-sum-exp, and `output` says nothing
    Verdict verdict = Verdict::within_rounding;
    ErrorMeasure observed, plan;  ///< against truth
    /// Median over the null model's runs of the error norm, over the truth's norm; infinite where the truth is 0 and it is
    /// not, and where half of the runs or more are not finite.
    WideReal expected;
    /// Error of the kernel, of the plan's own run and of the null model's runs (least and largest) over the null model's
    /// (geometric mean over the runs), in units of its rows, rms.
    double size_ratio = 0, plan_ratio = 0, least_ratio = 0, largest_ratio = 0;
    /// Of the tests of size over a whole head, the most significant: Student's t (of the logarithm of its ratio over slack, in
    /// standard deviations of the runs') and log10 p.
    double size_t = 0, size_log10_p = 0;
    double bit_equal_to_plan = 0;  ///< share of elements
    std::size_t tests = 0;
    std::size_t undecided = 0;         ///< of them those that may fail or not, by where in its bound the truth is
    WideReal truth_norm, truth_bound;  ///< Frobenius, over all heads, as in OutputAttribution
    bool in_log2 = false;              ///< an lse that is the truth's times log2(e)
    /// Elements that are finite in the kernel and not in the plan's own run, which says no size of error there: no test has
    /// them, and where nothing else is found the output is not resolved.
    std::size_t unpredicted = 0;
    int plan_nonfinite_head = 0;               ///< as Finding::head, of
    verdict::NotFinite plan_nonfinite;         ///< the plan's own run, in the first head that has some
    std::size_t runs = 0, nonfinite_runs = 0;  ///< of the null model; of those with an element that is not finite
    /// First the most significant finding of every kind of test and verdict, what is wrong before what is biased, by
    /// significance; then the others likewise: a thousand cells may tell of one fault, and the first lines are what is read.
    std::vector<Finding> findings;
    /// Every statistic, over (head, cell): for files.
    std::vector<verdict::Cell> cells;
    std::vector<std::vector<double>> t;
};

/// Whether the truth's bound is far enough below the truth, or the kernel's error, for the errors to be told (level.hpp);
/// the verdict looks at every test's own instead, in units of what rounding makes there.
[[nodiscard]] bool truth_is_resolved(const OutputCheck& output);

/// Whether the rounding that is expected is so far above the plan's own error that the verdict on this output says next to
/// nothing: no error is found that is not larger still, and an output of zeros passes. So it is where the plan's roundings cancel
/// to the bit, as in dq of saturated rows, whose ds is what delta's rounding leaves.
[[nodiscard]] bool is_blind(const OutputCheck& output);

/// "o", "dq", "dk", "dv" or "lse".
[[nodiscard]] std::string_view name(const OutputCheck& output);

struct LayerCheck {
    std::string name;
    Verdict verdict = Verdict::within_rounding;  ///< of the outputs that were judged; says nothing where there are none
    std::vector<OutputCheck> outputs;            ///< those observed
    /// Gradients that the kernel left and that nothing can be said of: the layer has no gradient at the output, LAYER.do.
    std::vector<Output> unjudged{};
};

struct Check {
    std::string input, kernel;
    RoundingPlan plan;
    PlanOrigin origin;  ///< filled by who chose the plan
    double alpha = 0, slack = 0;
    std::size_t tests = 0;       ///< all layers together
    double log10_threshold = 0;  ///< a test fails below this: log10(alpha / tests)
    std::vector<LayerCheck> layers;
    [[nodiscard]] Verdict verdict() const;
    /// Whether some output that the kernel left was not judged, so that the verdict is not of all.
    [[nodiscard]] bool has_unjudged() const;
    bool complete = true;  ///< false: interrupted; the layers present are whole, and judged for all that were asked for
};

struct CheckOptions {
    std::string kernel;  ///< empty: the only one there is
    std::vector<Output> outputs{all_outputs.begin(), all_outputs.end()};
    bool lse = true;  ///< judge the log-sum-exp where the kernel returned one
    /// The outputs above, and lse, were asked for: one that a layer of the kernel cannot be judged by is an error. Otherwise
    /// those are judged that can be, and LayerCheck::unjudged names the others.
    bool by_name = false;
    double alpha = 1e-3;     ///< chance that a right kernel fails, all tests of a call together (Bonferroni)
    double slack = 1.5;      ///< a size is wrong beyond this many times what the plan's rounding makes
    int runs = 32;           ///< of the null model
    std::vector<int> heads;  ///< empty: all query heads (a kv head's group is computed whole)
    int threads = 0;         ///< 0: one per hardware thread; results do not depend on it
    /// What of the null model's runs of one key head's group is held in memory, in bytes; those beyond are run twice. Results
    /// do not depend on it.
    std::size_t held_bytes = std::size_t{1} << 28;
    std::uint64_t seed = 0;                            ///< of the null model, and of stochastic rounding
    const AttentionBackend* backend = &cpu_backend();  ///< where plans run; results do not depend on it
    std::function<void(std::size_t done, std::size_t total, const std::string& what)> progress;
    std::function<bool()> cancelled;  ///< polled between runs
};

/// RequestError where the kernel is unknown or left no output, naming those there are; CheckOptions::by_name.
[[nodiscard]] Check check(const Capture& capture, const RoundingPlan& plan, const CheckOptions& options);

}  // namespace faultline
