// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/check.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/base/work_count.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/verdict/null_model.hpp>
#include <faultline/verdict/statistics.hpp>

namespace faultline {
namespace {

using namespace verdict;
using attribution::Group;
using attribution::RunOutputs;

constexpr TruthOptions certified{.correctly_rounded = false};
constexpr std::ptrdiff_t default_block = 64;  // rows, where the plan has one tile for all

/// Of the rms of the truth: what arithmetic in fp32 in another order than the plan's may do to an element, 2^-24.
constexpr double fp32_floor = 0x1p-24;
/// The same where the plan itself is fp32: binary64 in which it is emulated.
constexpr double binary64_floor = 0x1p-50;

const ObservedKernel* kernel_of(const LayerCapture& layer, const std::string& name) {
    for (const ObservedKernel& kernel : layer.observed)
        if (kernel.name == name) return &kernel;
    return nullptr;
}

/// What is known of one output of one head.
struct HeadCells {
    std::vector<Cell> cells;
    std::vector<CellNull> null;
    std::vector<double> observed, plan;  // statistics
    std::vector<double> observed_sums, plan_sums;
    WideReal expected_squared;  // mean over runs of the squared error norm
    std::size_t nonfinite = 0;  // elements of the kernel
};

struct OutputWork {
    std::vector<HeadCells> heads;  // in the order of groups
    std::vector<ErrorSums> observed_errors, plan_errors;
    std::size_t equal = 0, total = 0;
    WideReal truth_squared, expected_squared;
};

std::ptrdiff_t block_of(const RoundingPlan& plan, Output output, std::ptrdiff_t rows) {
    const bool keys = output == Output::dk || output == Output::dv;
    const std::ptrdiff_t block = keys                  ? plan.schedule.bwd_block_k
                                 : output == Output::o ? plan.schedule.block_q
                                                       : plan.schedule.bwd_block_q;
    return std::min(block > 0 ? block : default_block, std::max<std::ptrdiff_t>(rows, 1));
}

Matrix observed_matrix(const Group& group, const HeadArray& array, Output output, std::size_t i) {
    const bool per_query = output == Output::o || output == Output::dq;
    const std::ptrdiff_t head =
        per_query ? group.kv_head * static_cast<std::ptrdiff_t>(group.query_heads()) + static_cast<std::ptrdiff_t>(i)
                  : group.kv_head;
    return Matrix(array(group.batch, head));
}

/// Root of the sum of squares, which neither overflows nor underflows.
class Norm {
  public:
    void add(double x) {
        x = std::abs(x);
        if (x == 0 || !std::isfinite(x)) return;
        if (x > scale_) {
            sum_ *= (scale_ / x) * (scale_ / x);
            scale_ = x;
        }
        sum_ += (x / scale_) * (x / scale_);
    }
    [[nodiscard]] double rms(double count) const { return scale_ * std::sqrt(sum_ / count); }
    [[nodiscard]] WideReal squared() const { return WideReal(scale_) * WideReal(scale_) * WideReal(sum_); }

  private:
    double scale_ = 0, sum_ = 0;
};

/// rms error of each row over the runs, with the floor.
std::vector<double> row_sizes(const std::vector<RunOutputs>& runs, Output output, std::size_t i, const Matrix& truth,
                              double floor, WideReal& expected_squared) {
    std::vector<double> sigma;
    const auto count = static_cast<double>(runs.size());
    for (std::ptrdiff_t r = 0; r < truth.rows; ++r) {
        Norm errors;
        for (const RunOutputs& run : runs)
            for (std::ptrdiff_t c = 0; c < truth.cols; ++c) errors.add(run[output][i](r, c) - truth(r, c));
        expected_squared = expected_squared + errors.squared() * WideReal(1 / count);
        sigma.push_back(std::hypot(errors.rms(count * static_cast<double>(truth.cols)), floor));
    }
    return sigma;
}

class LayerWork {
  public:
    LayerWork(const LayerCapture& layer, const ObservedKernel& kernel, const RoundingPlan& plan,
              const CheckOptions& options)
        : layer_(layer),
          kernel_(kernel),
          plan_(for_head_dim(plan, static_cast<int>(layer.head_dim()), layer.causal)),
          options_(options),
          groups_(attribution::groups_of(layer, options.heads, options.seed)),
          flipped_(low_precision_sites(plan_)) {
        for (const Output output : options.outputs)
            if (kernel[output] && (output == Output::o || !layer.dout.empty())) outputs_.push_back(output);
        const std::string problem = problem_with(plan_);
        if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
        if (const std::string cannot = problem_with(plan_, layer.extras()); !cannot.empty())
            throw RequestError(fmt::format("{}: {}", layer.name, cannot));
    }

    [[nodiscard]] std::size_t units() const { return groups_.size() * (2 + static_cast<std::size_t>(options_.runs)); }
    [[nodiscard]] bool empty() const { return outputs_.empty(); }
    [[nodiscard]] const std::string& name() const { return layer_.name; }

    void run(WorkCount& count) {
        for (const Output output : outputs_) work_[static_cast<std::size_t>(output)] = {};
        for (const Group& group : groups_) add(group, count);
    }
    [[nodiscard]] std::size_t tests() const {
        std::size_t count = 0;
        for (const Output output : outputs_)
            for (const HeadCells& head : work_[static_cast<std::size_t>(output)].heads) count += head.cells.size();
        return count;
    }
    [[nodiscard]] LayerCheck judged(double log10_threshold) const {
        LayerCheck check;
        check.name = layer_.name;
        for (const Output output : outputs_) {
            check.outputs.push_back(judged(output, log10_threshold));
            check.verdict = std::max(check.verdict, check.outputs.back().verdict);
        }
        return check;
    }

  private:
    /// One group whole: memory for the runs of one group at a time.
    void add(const Group& group, WorkCount& units) {
        const auto runs = static_cast<std::size_t>(options_.runs);
        std::vector<RunOutputs> null(runs);
        GroupTruth truth;
        RunOutputs plan;
        parallel_for(runs + 2, options_.backend->calls_at_once(options_.threads), [&](std::size_t task) {
            if (task == 0)
                truth = options_.backend->truth(group.problem, certified);
            else if (task == 1)
                plan = attribution::run_plan(group, plan_, nullptr, *options_.backend);
            else {
                SignFlip flip(flipped_, options_.seed, task - 2);
                OtherSumOrder order(plan_, options_.seed, task - 2);
                Instruments both({&flip, &order});
                null[task - 2] = attribution::run_plan(group, plan_, &both, *options_.backend);
            }
            units.step(layer_.name + (task == 0 ? ": truth" : task == 1 ? ": plan" : ": null model"));
        });
        const std::vector<double> mean_key = attribution::mean_key_direction(group);
        for (const Output output : outputs_) {
            OutputWork& work = work_[static_cast<std::size_t>(output)];
            const std::size_t first = work.heads.size(), count = plan[output].size();
            work.heads.resize(first + count);
            std::vector<Matrix> observed;
            for (std::size_t i = 0; i < count; ++i)
                observed.push_back(observed_matrix(group, *kernel_[output], output, i));
            parallel_for(count, options_.threads, [&](std::size_t i) {
                work.heads[first + i] = head_cells(truth, null, plan, observed[i], output, i, mean_key);
            });
            work.observed_errors.push_back(attribution::errors_of(observed, truth, output, mean_key));
            work.plan_errors.push_back(attribution::errors_of(plan[output], truth, output, mean_key));
            for (std::size_t i = 0; i < count; ++i) {
                work.expected_squared = work.expected_squared + work.heads[first + i].expected_squared;
                for (std::size_t a = 0; a < observed[i].values.size(); ++a)
                    work.equal += observed[i].values[a] == plan[output][i].values[a];
                work.total += observed[i].values.size();
                const WideReal norm = frobenius_norm(attribution::truth_of(truth, output, i));
                work.truth_squared = work.truth_squared + norm * norm;
            }
        }
    }

    [[nodiscard]] HeadCells head_cells(const GroupTruth& group_truth, const std::vector<RunOutputs>& runs,
                                       const RunOutputs& plan, const Matrix& observed, Output output, std::size_t i,
                                       const std::vector<double>& mean_key) const {
        const CertifiedMatrix& certified_truth = attribution::truth_of(group_truth, output, i);
        Matrix truth(certified_truth.rows, certified_truth.cols);
        certified_truth.copy_to(truth.view());
        HeadCells head;
        Norm of_truth;
        for (const double x : truth.values) of_truth.add(x);
        const double rms = of_truth.rms(static_cast<double>(truth.values.size()));
        const bool low = std::any_of(flipped_.begin(), flipped_.end(), [&](Site site) {
            return !is_exact(plan_[site].format) && plan_[site].format.precision < fp32.precision;
        });
        const double floor = rms * (low ? fp32_floor : binary64_floor);
        const std::vector<double> sigma = row_sizes(runs, output, i, truth, floor, head.expected_squared);
        const std::ptrdiff_t block = block_of(plan_, output, truth.rows);
        const std::vector<double> direction = output == Output::dq ? mean_key : std::vector<double>{};
        head.cells = cells_of(truth.rows, truth.cols, block, !direction.empty());
        std::vector<std::vector<double>> sums;
        for (const RunOutputs& run : runs)
            sums.push_back(cell_sums(run[output][i].view(), truth.view(), sigma, block, direction));
        head.observed_sums = cell_sums(observed.view(), truth.view(), sigma, block, direction);
        head.plan_sums = cell_sums(plan[output][i].view(), truth.view(), sigma, block, direction);
        for (std::size_t c = 0; c < head.cells.size(); ++c) {
            std::vector<double> of_cell;
            for (const std::vector<double>& s : sums) of_cell.push_back(s[c]);
            head.null.push_back(
                null_of(head.cells[c], of_cell, floor_variance(head.cells[c], sigma, floor), options_.slack));
            head.observed.push_back(head.null.back().t(head.observed_sums[c]));
            head.plan.push_back(head.null.back().t(head.plan_sums[c]));
        }
        for (std::size_t a = 0; a < observed.values.size(); ++a)
            head.nonfinite += !std::isfinite(observed.values[a]) && std::isfinite(truth.values[a]);
        return head;
    }

    /// Variance that independent errors of the floor's size give a cell's signed sum.
    static double floor_variance(const Cell& cell, const std::vector<double>& sigma, double floor) {
        double variance = 0;
        for (std::ptrdiff_t i = cell.extent == Extent::rows ? cell.index : 0, end = i + cell.rows; i < end; ++i) {
            const double size = sigma[static_cast<std::size_t>(i)];
            const double share = size > 0 ? floor / size : 0;
            variance += share * share;
        }
        return variance * cell.elements / static_cast<double>(cell.rows);
    }

    [[nodiscard]] OutputCheck judged(Output output, double log10_threshold) const {
        const OutputWork& work = work_[static_cast<std::size_t>(output)];
        OutputCheck out;
        out.output = output;
        ErrorSums observed = work.observed_errors.front(), plan = work.plan_errors.front();
        for (std::size_t g = 1; g < groups_.size(); ++g)
            observed.join(work.observed_errors[g]), plan.join(work.plan_errors[g]);
        out.observed = observed.measure();
        out.plan = plan.measure();
        if (work.truth_squared > WideReal(0.0)) out.expected = sqrt(work.expected_squared / work.truth_squared);
        out.bit_equal_to_plan = static_cast<double>(work.equal) / static_cast<double>(work.total);
        double sizes = 0, expected = 0;
        for (std::size_t h = 0; h < work.heads.size(); ++h) {
            const HeadCells& head = work.heads[h];
            out.cells = head.cells;
            out.t.push_back(head.observed);
            out.tests += head.cells.size();
            add_findings(head, head_number(output, h), log10_threshold, out);
            for (std::size_t c = 0; c < head.cells.size(); ++c) {
                if (head.cells[c].direction != Direction::size || head.cells[c].extent != Extent::head) continue;
                sizes += head.observed_sums[c];
                if (!head.null[c].exact) expected += std::exp(head.null[c].center);
            }
        }
        constexpr double infinity = std::numeric_limits<double>::infinity();
        out.size_ratio = expected > 0 ? std::sqrt(sizes / expected) : sizes > 0 ? infinity : 0;
        std::stable_sort(out.findings.begin(), out.findings.end(), [](const Finding& a, const Finding& b) {
            return a.kind != b.kind ? a.kind > b.kind : a.log10_p < b.log10_p;
        });
        for (const Finding& finding : out.findings) out.verdict = std::max(out.verdict, finding.kind);
        return out;
    }

    [[nodiscard]] int head_number(Output output, std::size_t h) const {
        const bool per_query = output == Output::o || output == Output::dq;
        const std::size_t per_group = per_query ? groups_.front().query_heads() : 1;
        const Group& group = groups_[h / per_group];
        if (per_query) return group.inputs.first_head + static_cast<int>(h % per_group);
        return static_cast<int>(group.batch * layer_.kv_heads() + group.kv_head);
    }

    /// Whether a size goes beyond the plan's own run too. Where it does not, it is the plan's numerics that make errors of
    /// agreeing signs, larger than random ones: biased.
    [[nodiscard]] bool beyond_plan(const HeadCells& head, std::size_t c) const {
        const double power = head.cells[c].direction == Direction::element ? 1 : 2;
        return head.observed_sums[c] > head.plan_sums[c] * std::pow(options_.slack, power);
    }

    void add_findings(const HeadCells& head, int number, double log10_threshold, OutputCheck& out) const {
        if (head.nonfinite > 0) {
            Finding finding;
            finding.kind = Verdict::wrong;
            finding.head = number;
            finding.nonfinite = true;
            finding.effect = static_cast<double>(head.nonfinite);
            finding.log10_p = -std::numeric_limits<double>::infinity();
            out.findings.push_back(finding);
        }
        for (std::size_t c = 0; c < head.cells.size(); ++c) {
            const double log10_p = head.null[c].log10_p(head.observed[c]);
            if (!(log10_p < log10_threshold)) continue;
            Finding finding;
            const Cell& cell = head.cells[c];
            const bool by_size = cell.direction == Direction::size || cell.direction == Direction::element;
            finding.kind = by_size && beyond_plan(head, c) ? Verdict::wrong : Verdict::biased;
            finding.head = number;
            finding.cell = cell;
            finding.t = head.observed[c];
            finding.log10_p = log10_p;
            finding.plan_t = head.plan[c];
            finding.of_plan = head.null[c].log10_p(head.plan[c]) < log10_threshold &&
                              std::signbit(head.plan[c]) == std::signbit(head.observed[c]);
            if (is_signed(cell.direction))
                finding.effect = head.observed_sums[c] / cell.elements;
            else if (head.null[c].exact)
                finding.effect = std::numeric_limits<double>::infinity();
            else
                finding.effect = std::exp((std::log(head.observed_sums[c]) - head.null[c].center) /
                                          (cell.direction == Direction::element ? 1 : 2));
            out.findings.push_back(finding);
        }
    }

    const LayerCapture& layer_;
    const ObservedKernel& kernel_;
    RoundingPlan plan_;
    const CheckOptions& options_;
    std::vector<Group> groups_;
    std::vector<Site> flipped_;
    std::vector<Output> outputs_;
    std::array<OutputWork, 4> work_;
};

std::string chosen_kernel(const Capture& capture, const CheckOptions& options) {
    std::vector<std::string> known;
    for (const LayerCapture& layer : capture.layers)
        for (const ObservedKernel& kernel : layer.observed)
            if (std::find(known.begin(), known.end(), kernel.name) == known.end()) known.push_back(kernel.name);
    const std::string file = escaped(capture.path, capture.path.size());
    if (known.empty())
        throw RequestError(fmt::format(
            "{}: no layer has an output of a kernel: expected tensors LAYER.KERNEL.{{o,dq,dk,dv}} to check", file));
    const std::vector<std::string_view> names(known.begin(), known.end());
    if (options.kernel.empty()) {
        if (known.size() == 1) return known.front();
        throw RequestError(fmt::format("{}: {} kernels left outputs: expected one, chosen with --kernel: {}", file,
                                       known.size(), expected_one_of("", names)));
    }
    if (std::find(known.begin(), known.end(), options.kernel) == known.end())
        throw RequestError(
            fmt::format("{}: kernel {}: {}", file, in_quotes(options.kernel), expected_one_of(options.kernel, names)));
    return options.kernel;
}

}  // namespace

const char* name(Verdict verdict) {
    return verdict == Verdict::within_rounding ? "within its rounding"
           : verdict == Verdict::biased        ? "biased"
                                               : "wrong";
}

Verdict Check::verdict() const {
    Verdict worst = Verdict::within_rounding;
    for (const LayerCheck& layer : layers) worst = std::max(worst, layer.verdict);
    return worst;
}

Check check(const Capture& capture, const RoundingPlan& plan, const CheckOptions& options) {
    Check result;
    result.input = capture.path;
    result.kernel = chosen_kernel(capture, options);
    result.plan = plan;
    result.alpha = options.alpha;
    std::vector<LayerWork> layers;
    std::size_t units = 0;
    for (const LayerCapture& layer : capture.layers) {
        const ObservedKernel* kernel = kernel_of(layer, result.kernel);
        if (kernel == nullptr) continue;
        LayerWork work(layer, *kernel, plan, options);
        if (work.empty()) continue;
        units += work.units();
        layers.push_back(std::move(work));
    }
    if (layers.empty())
        throw RequestError(
            fmt::format("{}: kernel {} left none of the outputs asked for: expected one of o, dq, dk, dv "
                        "(gradients need LAYER.do)",
                        escaped(capture.path, capture.path.size()), in_quotes(result.kernel)));
    WorkCount count(options.progress, options.cancelled, units);
    std::size_t whole = 0;
    try {
        for (LayerWork& layer : layers) {
            layer.run(count);
            result.tests += layer.tests();
            ++whole;
        }
    } catch (const Cancelled&) {
        result.complete = false;
    }
    result.log10_threshold = std::log10(options.alpha / static_cast<double>(std::max<std::size_t>(result.tests, 1)));
    for (std::size_t l = 0; l < whole; ++l) result.layers.push_back(layers[l].judged(result.log10_threshold));
    return result;
}

}  // namespace faultline
