// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/check.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <fmt/format.h>

#include <faultline/attribution/level.hpp>
#include <faultline/attribution/same_element.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/base/work_count.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/verdict/lse.hpp>
#include <faultline/verdict/null_model.hpp>

namespace faultline {
namespace {

using namespace verdict;
using attribution::Group;
using attribution::RunOutputs;

constexpr TruthOptions certified{.correctly_rounded = false};
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::size_t lse_place = all_outputs.size();
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

/// One output, or lse, over the heads.
struct OutputWork {
    std::vector<HeadCells> heads;  // in the order of groups
    std::vector<ErrorSums> observed_errors, plan_errors;
    std::size_t equal = 0, total = 0;
    WideReal truth_squared;
    std::vector<WideReal> run_squared;  // by run
    bool in_log2 = true;                // lse: of every head
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
        has_lse_ = options.lse && kernel.lse.has_value();
        const std::string problem = problem_with(plan_);
        if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
        if (const std::string cannot = problem_with(plan_, layer.extras()); !cannot.empty())
            throw RequestError(fmt::format("{}: {}", layer.name, cannot));
    }

    [[nodiscard]] std::size_t units() const { return groups_.size() * (2 + static_cast<std::size_t>(options_.runs)); }
    [[nodiscard]] bool empty() const { return outputs_.empty() && !has_lse_; }
    [[nodiscard]] const std::string& name() const { return layer_.name; }

    void run(WorkCount& count) {
        work_ = {};
        for (const Group& group : groups_) add(group, count);
    }
    [[nodiscard]] std::size_t tests() const {
        std::size_t count = 0;
        for (const OutputWork& work : work_)
            for (const HeadCells& head : work.heads) count += head.cells.size();
        return count;
    }
    [[nodiscard]] LayerCheck judged(double log10_threshold) const {
        LayerCheck check;
        check.name = layer_.name;
        for (const Output output : outputs_) check.outputs.push_back(judged(output, log10_threshold));
        if (has_lse_) check.outputs.push_back(judged(std::nullopt, log10_threshold));
        for (const OutputCheck& output : check.outputs) check.verdict = std::max(check.verdict, output.verdict);
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
            const Dtype dtype = kernel_[output]->dtype;
            for (std::size_t i = 0; i < plan[output].size(); ++i) {
                store(dtype, plan.outputs[static_cast<std::size_t>(output)][i]);
                for (std::size_t r = 0; r < runs; ++r)
                    store_with_signs(dtype, group, output, i, r, null[r].outputs[static_cast<std::size_t>(output)][i]);
            }
            std::vector<Matrix> observed;
            for (std::size_t i = 0; i < plan[output].size(); ++i)
                observed.push_back(observed_matrix(group, *kernel_[output], output, i));
            OutputWork& work = work_[static_cast<std::size_t>(output)];
            std::vector<HeadCells> heads(observed.size());
            parallel_for(observed.size(), options_.threads, [&](std::size_t i) {
                const CertifiedMatrix& certified_truth = attribution::truth_of(truth, output, i);
                Matrix true_values(certified_truth.rows, certified_truth.cols);
                certified_truth.copy_to(true_values.view());
                HeadValues values{&true_values, &plan[output][i], &observed[i], {}};
                for (const RunOutputs& run : null) values.runs.push_back(&run[output][i]);
                heads[i] = head_cells(values, layout_of(output, true_values, mean_key));
            });
            for (std::size_t i = 0; i < observed.size(); ++i)
                join(work, std::move(heads[i]), observed[i], plan[output][i], attribution::truth_of(truth, output, i),
                     dtype);
            work.observed_errors.push_back(attribution::errors_of(observed, truth, output, mean_key));
            work.plan_errors.push_back(attribution::errors_of(plan[output], truth, output, mean_key));
        }
        if (has_lse_) add_lse(group, truth, plan, null);
    }

    void add_lse(const Group& group, const GroupTruth& truth, RunOutputs& plan, std::vector<RunOutputs>& null) {
        OutputWork& work = work_[lse_place];
        for (std::size_t i = 0; i < plan.lse.size(); ++i) {
            CertifiedMatrix certified_truth = truth.heads[i].lse;
            Matrix true_values(certified_truth.rows, 1), observed = observed_matrix(group, *kernel_.lse, Output::o, i);
            certified_truth.copy_to(true_values.view());
            HeadLayout layout;
            layout.floor = lse_floor(group, i, certified_truth, !plan_.rounding_sites().empty(), kernel_.lse->dtype);
            layout.common_floor = true;
            layout.block = block_of(plan_, Output::o, true_values.rows);
            layout.slack = options_.slack;
            layout.sizes_and_shift = true;
            std::vector<Matrix*> others{&plan.lse[i]};
            for (RunOutputs& run : null) others.push_back(&run.lse[i]);
            for (std::size_t r = 0; r < true_values.values.size(); ++r)
                if (!std::isfinite(true_values.values[r])) {
                    certified_truth.value[r] = certified_truth.bound[r] = 0;
                    certified_truth.exponent[r] = 0;
                }
            const std::size_t finite = settle_rows_without_keys(true_values, observed, others);
            HeadValues values{&true_values, &plan.lse[i], &observed, {}};
            for (const RunOutputs& run : null) values.runs.push_back(&run.lse[i]);
            HeadCells cells = head_cells(values, layout);
            cells.finite = finite;
            work.in_log2 = work.in_log2 && reads_as_log2(observed, true_values);
            join(work, std::move(cells), observed, plan.lse[i], certified_truth, kernel_.lse->dtype);
            work.observed_errors.emplace_back(observed.view(), certified_truth, nullptr);
            work.plan_errors.emplace_back(plan.lse[i].view(), certified_truth, nullptr);
        }
    }

    /// As the file holds it, whatever the plan stores.
    static void store(Dtype dtype, Matrix& values) {
        const Format format = with_saturation(attribution::format_of(dtype), false);
        for (double& x : values.values) x = round(x, format, Rounding::nearest_even);
    }
    /// The same with an error of random sign: storing rounds as any site does. Nothing where the plan itself stores that type
    /// or a narrower one: what a run of the null model has then is its value with the sign of that rounding changed.
    void store_with_signs(Dtype dtype, const Group& group, Output output, std::size_t i, std::size_t number,
                          Matrix& values) const {
        const Format file = attribution::format_of(dtype);
        std::optional<Format> own = stored_format(plan_, output);
        const bool of_keys = output == Output::dk || output == Output::dv;
        if (of_keys && group.query_heads() > 1 && plan_.schedule.group_reduce == GroupReduce::after_cast) {
            const Format& sum = plan_[Site::kv_group_reduce].format;  // what is rounded last
            own = is_exact(sum) ? std::nullopt : std::optional(sum);
        }
        if (own && own->precision <= file.precision && own->emax <= file.emax &&
            own->emin - own->precision >= file.emin - file.precision)
            return;
        const Matrix exact = values;
        store(dtype, values);
        const RandomStream stream(options_.seed, number, static_cast<std::uint64_t>(site_count),
                                  static_cast<std::uint64_t>(group.inputs.first_head), static_cast<std::uint64_t>(i),
                                  static_cast<std::uint64_t>(output));
        for (std::size_t a = 0; a < values.values.size(); ++a) {
            const double error = values.values[a] - exact.values[a];
            if (error != 0 && std::isfinite(error) && (stream.bits(a / 64) >> a % 64 & 1) != 0)
                values.values[a] = exact.values[a] - error;
        }
    }

    static void join(OutputWork& work, HeadCells&& head, const Matrix& observed, const Matrix& plan,
                     const CertifiedMatrix& truth, Dtype dtype) {
        if (work.run_squared.empty()) work.run_squared.resize(head.run_squared.size());
        for (std::size_t r = 0; r < head.run_squared.size(); ++r)
            work.run_squared[r] = work.run_squared[r] + head.run_squared[r];
        const attribution::SameElement same(dtype);
        for (std::size_t a = 0; a < observed.values.size(); ++a)
            work.equal += same(plan.values[a], observed.values[a]).equal;
        work.total += observed.values.size();
        const WideReal norm = frobenius_norm(truth);
        work.truth_squared = work.truth_squared + norm * norm;
        work.heads.push_back(std::move(head));
    }

    [[nodiscard]] HeadLayout layout_of(Output output, const Matrix& truth, const std::vector<double>& mean_key) const {
        Norm of_truth;
        for (const double x : truth.values) of_truth.add(x);
        const double rms = of_truth.rms(static_cast<double>(truth.values.size()));
        const bool low = std::any_of(flipped_.begin(), flipped_.end(), [&](Site site) {
            return !is_exact(plan_[site].format) && plan_[site].format.precision < fp32.precision;
        });
        HeadLayout layout;
        layout.floor.assign(static_cast<std::size_t>(truth.rows), rms * (low ? fp32_floor : binary64_floor));
        layout.block = block_of(plan_, output, truth.rows);
        if (output == Output::dq) layout.direction = mean_key;
        layout.slack = options_.slack;
        return layout;
    }

    /// Without an output: lse.
    [[nodiscard]] OutputCheck judged(std::optional<Output> output, double log10_threshold) const {
        const OutputWork& work = work_[output ? static_cast<std::size_t>(*output) : lse_place];
        OutputCheck out;
        out.lse = !output;
        out.output = output.value_or(Output::o);
        ErrorSums observed = work.observed_errors.front(), plan = work.plan_errors.front();
        for (std::size_t g = 1; g < work.observed_errors.size(); ++g)
            observed.join(work.observed_errors[g]), plan.join(work.plan_errors[g]);
        out.observed = observed.measure();
        out.plan = plan.measure();
        out.in_log2 = out.lse && work.in_log2;
        std::vector<WideReal> runs = work.run_squared;
        std::nth_element(runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2), runs.end());
        const WideReal median = runs[runs.size() / 2];
        if (work.truth_squared > WideReal(0.0))
            out.expected = sqrt(median / work.truth_squared);
        else if (median > WideReal(0.0))
            out.expected = WideReal(infinity);
        out.bit_equal_to_plan = static_cast<double>(work.equal) / static_cast<double>(work.total);
        for (std::size_t h = 0; h < work.heads.size(); ++h) {
            const HeadCells& head = work.heads[h];
            out.cells = head.cells;
            out.t.push_back(head.observed);
            out.tests += head.cells.size();
            add_findings(head, head_number(out.output, h), log10_threshold, out);
        }
        set_ratios(work, out);
        put_in_order(out.findings);
        for (const Finding& finding : out.findings) out.verdict = std::max(out.verdict, finding.kind);
        return out;
    }

    static void set_ratios(const OutputWork& work, OutputCheck& out) {
        double observed = 0, plan = 0, expected = 0;
        std::vector<double> runs(work.run_squared.size());
        for (const HeadCells& head : work.heads) {
            for (std::size_t c = 0; c < head.cells.size(); ++c) {
                if (head.cells[c].direction != Direction::size || head.cells[c].extent != Extent::head) continue;
                observed += head.observed_sums[c];
                plan += head.plan_sums[c];
                if (!head.null[c].exact) expected += std::exp(head.null[c].center);
            }
            for (std::size_t r = 0; r < runs.size(); ++r) runs[r] += head.run_sizes[r];
        }
        const auto ratio = [&](double size) {
            return expected > 0 ? std::sqrt(size / expected) : size > 0 ? infinity : 0;
        };
        out.size_ratio = ratio(observed);
        out.plan_ratio = ratio(plan);
        out.least_ratio = ratio(*std::min_element(runs.begin(), runs.end()));
        out.largest_ratio = ratio(*std::max_element(runs.begin(), runs.end()));
    }

    static void put_in_order(std::vector<Finding>& findings) {
        const auto before = [](const Finding& a, const Finding& b) {
            return a.kind != b.kind ? a.kind > b.kind : a.log10_p < b.log10_p;
        };
        std::stable_sort(findings.begin(), findings.end(), before);
        // The first of its direction, of a kind that has not told of it yet.
        std::vector<std::pair<Verdict, Direction>> told;
        std::stable_partition(findings.begin(), findings.end(), [&](const Finding& f) {
            const std::pair<Verdict, Direction> test{f.kind, f.cell.direction};
            if (f.nonfinite || f.finite) return true;
            if (std::find(told.begin(), told.end(), test) != told.end()) return false;
            told.push_back(test);
            return true;
        });
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
        for (const bool nonfinite : {true, false}) {
            const std::size_t count = nonfinite ? head.nonfinite : head.finite;
            if (count == 0) continue;
            Finding finding;
            finding.kind = Verdict::wrong;
            finding.head = number;
            finding.nonfinite = nonfinite;
            finding.finite = !nonfinite;
            finding.effect = static_cast<double>(count);
            finding.log10_p = -infinity;
            finding.of_plan = nonfinite && head.nonfinite_of_plan == head.nonfinite;
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
            finding.worst = head.worst[c];
            finding.t = head.observed[c];
            finding.log10_p = log10_p;
            finding.plan_t = head.plan[c];
            finding.of_plan = head.null[c].log10_p(head.plan[c]) < log10_threshold &&
                              std::signbit(head.plan[c]) == std::signbit(head.observed[c]);
            if (is_signed(cell.direction))
                finding.effect = head.observed_sums[c] / cell.elements;
            else if (head.null[c].exact)
                finding.effect = infinity;
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
    bool has_lse_ = false;
    std::array<OutputWork, 5> work_;  // by Output, then lse
};

std::string chosen_kernel(const Capture& capture, const CheckOptions& options) {
    std::vector<std::string> known;
    for (const LayerCapture& layer : capture.layers)
        for (const ObservedKernel& kernel : layer.observed)
            if (std::find(known.begin(), known.end(), kernel.name) == known.end()) known.push_back(kernel.name);
    const std::string file = escaped(capture.path, capture.path.size());
    if (known.empty())
        throw RequestError(fmt::format(
            "{}: no layer has an output of a kernel: expected tensors LAYER.KERNEL.{{o,dq,dk,dv,lse}} to check", file));
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

std::string_view name(const OutputCheck& output) { return output.lse ? "lse" : name(output.output); }

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
    result.slack = options.slack;
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
            fmt::format("{}: kernel {} left none of the outputs asked for: expected one of o, dq, dk, dv, lse "
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
