// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/layer_work.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <faultline/attribution/layer_plan.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/same_element.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/verdict/lse.hpp>
#include <faultline/verdict/null_model.hpp>

namespace faultline::verdict {

using attribution::Group;
using attribution::RunOutputs;

namespace {

constexpr std::ptrdiff_t default_block = 64;  // rows, where the plan has one tile for all

/// Of the rms of the truth: what arithmetic in fp32 in another order than the plan's may do to an element, 2^-24.
constexpr double fp32_floor = 0x1p-24;
/// The same where the plan itself is fp32: binary64 in which it is emulated.
constexpr double binary64_floor = 0x1p-50;

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

/// As the file holds it, whatever the plan stores.
void store(Dtype dtype, Matrix& values) {
    const Format format = with_saturation(attribution::format_of(dtype), false);
    for (double& x : values.values) x = round(x, format, Rounding::nearest_even);
}

/// What the truth is not known to beyond an ulp of its double: that ulp is a rounding like those of the binary64 in which
/// plans are emulated, for which there is a floor, and no value of a file tells it. 2^-1074 stands for a bound far below it
/// (truth.hpp, masked keys): 0, as doubles have it.
Matrix bounds_of(const CertifiedMatrix& truth) {
    Matrix bounds(truth.rows, truth.cols);
    for (std::ptrdiff_t i = 0; i < truth.rows; ++i)
        for (std::ptrdiff_t j = 0; j < truth.cols; ++j) {
            const double bound = truth.bound_at(i, j).to_double();
            const bool known = bound <= std::numeric_limits<double>::denorm_min();
            bounds(i, j) = known ? 0 : std::max(bound - 0x1p-52 * std::abs(truth(i, j)), 0.0);
        }
    return bounds;
}

WideReal squared(const WideReal& x) { return x * x; }

}  // namespace

/// One matrix of an output, or a head's lse, while the runs go by.
struct LayerWork::Tested {
    std::optional<Output> output;  // none: lse
    std::size_t i = 0;             // of the group's matrices of that output
    HeadTest test;
    std::vector<char> keyless;  // lse: the rows without a key, which count as 0 in every run
    ErrorSums observed_errors{}, plan_errors{};
    std::size_t equal = 0, total = 0;
    WideReal truth_squared{}, bound_squared{};
    std::size_t finite = 0;  // lse: rows without a key that have one
    bool in_log2 = false;

    [[nodiscard]] Matrix values_of(const RunOutputs& run) const {
        if (output) return run[*output][i];
        Matrix lse = run.lse[i];
        for (std::size_t r = 0; r < keyless.size(); ++r)
            if (keyless[r] != 0) lse.values[r] = 0;
        return lse;
    }
    void compare(Dtype dtype, const Matrix& plan, const Matrix& observed, const CertifiedMatrix& truth) {
        const attribution::SameElement same(dtype);
        for (std::size_t a = 0; a < observed.values.size(); ++a)
            equal += same(plan.values[a], observed.values[a]).equal;
        total = observed.values.size();
        truth_squared = squared(frobenius_norm(truth));
        bound_squared = squared(frobenius_bound(truth));
    }
};

LayerWork::LayerWork(const LayerCapture& layer, const ObservedKernel& kernel, const RoundingPlan& plan,
                     const CheckOptions& options)
    : layer_(layer),
      kernel_(kernel),
      plan_(for_layer(plan, layer)),
      options_(options),
      groups_(attribution::groups_of(layer, options.heads, options.seed)),
      flipped_(low_precision_sites(plan_)) {
    for (const Output output : options.outputs)
        if (kernel[output]) (output == Output::o || !layer.dout.empty() ? outputs_ : unjudged_).push_back(output);
    has_lse_ = options.lse && kernel.lse.has_value();
    low_precision_ = std::any_of(flipped_.begin(), flipped_.end(), [&](Site site) {
        return !is_exact(plan_[site].format) && plan_[site].format.precision < fp32.precision;
    });
    const std::string problem = problem_with(plan_);
    if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
    if (const std::string cannot = problem_with(plan_, layer.extras()); !cannot.empty())
        throw RequestError(fmt::format("{}: {}", escaped(layer.name), cannot));
    SignFlip flip(flipped_, options.seed, 0);  // of every run of the null model
    OtherSumOrder order(plan_, options.seed, 0);
    Instruments both({&flip, &order});
    attribution::expect_room(layer.name, groups_, plan_, *options.backend, options.runs > 0 ? &both : nullptr);
    attribution::expect_room_for_truth(layer.name, groups_, *options.backend);
}

std::size_t LayerWork::held(const Group& group) const {
    const HeadGroup& in = group.inputs;
    const std::ptrdiff_t n_q = in.q.front().rows, n_k = in.k.rows, d = in.k.cols, d_v = in.v.cols;
    const bool gradient = !in.dout.empty();
    const std::ptrdiff_t of_heads = static_cast<std::ptrdiff_t>(in.q.size()) * n_q * (d_v + 1 + (gradient ? d : 0));
    const auto bytes = static_cast<std::size_t>(of_heads + (gradient ? n_k * (d + d_v) : 0)) * sizeof(double);
    return std::min(static_cast<std::size_t>(options_.runs), options_.held_bytes / std::max<std::size_t>(bytes, 1));
}

std::size_t LayerWork::units() const {
    std::size_t count = 0;
    if (empty()) return count;
    for (const Group& group : groups_) count += 2 + 2 * static_cast<std::size_t>(options_.runs) - held(group);
    return count;
}

std::size_t LayerWork::tests() const {
    std::size_t count = 0;
    for (const OutputWork& work : work_)
        for (const HeadCells& head : work.heads) count += head.cells.size();
    return count;
}

void LayerWork::run(WorkCount& count) {
    work_ = {};
    if (empty()) return;
    for (const Group& group : groups_) add(group, count);
}

RunOutputs LayerWork::null_run(const Group& group, std::size_t number) const {
    SignFlip flip(flipped_, options_.seed, number);
    OtherSumOrder order(plan_, options_.seed, number);
    Instruments both({&flip, &order});
    RunOutputs run = attribution::run_plan(group, plan_, &both, *options_.backend);
    for (const Output output : outputs_) {
        std::vector<Matrix>& matrices = run.outputs[static_cast<std::size_t>(output)];
        for (std::size_t i = 0; i < matrices.size(); ++i)
            store_with_signs(kernel_[output]->dtype, group, static_cast<std::size_t>(output), i, number, matrices[i]);
    }
    for (std::size_t i = 0; has_lse_ && i < run.lse.size(); ++i)
        store_with_signs(kernel_.lse->dtype, group, attribution::lse_place, i, number, run.lse[i]);
    return run;
}

void LayerWork::add(const Group& group, WorkCount& units) {
    const auto runs = static_cast<std::size_t>(options_.runs);
    const int threads = options_.backend->calls_at_once(options_.threads);
    const std::string null_model = layer_.name + ": null model";
    std::vector<RunOutputs> kept(held(group));
    // Beside rounding to fp32 and less, the fast path's bound is nothing; beside binary64's it can be as large.
    const TruthOptions options{.correctly_rounded = !low_precision_};
    GroupTruth truth;
    RunOutputs plan;
    parallel_for(kept.size() + 2, threads, [&](std::size_t task) {
        if (task == 0)
            truth = options_.backend->truth(group.problem, options);
        else if (task == 1)
            plan = attribution::run_plan(group, plan_, nullptr, *options_.backend);
        else
            kept[task - 2] = null_run(group, task - 2);
        units.step(task == 0 ? layer_.name + ": truth" : task == 1 ? layer_.name + ": plan" : null_model);
    });
    std::vector<Tested> tests = tests_of(group, truth, plan);
    // Every run goes by twice, and each test sees them in their order. Those that are not held are run a second time, which
    // gives the same bits; to hold them all would take memory in proportion to their number.
    const auto each_run = [&](auto take) {
        const auto show = [&](const std::vector<RunOutputs>& some) {
            parallel_for(tests.size(), options_.threads, [&](std::size_t t) {
                for (const RunOutputs& run : some) take(tests[t].test, tests[t].values_of(run));
            });
        };
        show(kept);
        const auto at_once = static_cast<std::size_t>(threads > 0 ? threads : hardware_threads());
        for (std::size_t first = kept.size(); first < runs; first += at_once) {
            std::vector<RunOutputs> some(std::min(at_once, runs - first));
            parallel_for(some.size(), threads, [&](std::size_t r) {
                some[r] = null_run(group, first + r);
                units.step(null_model);
            });
            show(some);
        }
    };
    each_run([](HeadTest& test, const Matrix& run) { test.add_size(run); });
    for (Tested& tested : tests) tested.test.sizes_are_whole();
    each_run([](HeadTest& test, const Matrix& run) { test.add_sums(run); });
    for (Tested& tested : tests) {
        OutputWork& work = tested.output ? work_[static_cast<std::size_t>(*tested.output)] : work_.back();
        HeadCells head = std::move(tested.test).result();
        head.finite = tested.finite;
        if (work.run_squared.empty()) work.run_squared.resize(head.run_squared.size());
        for (std::size_t r = 0; r < head.run_squared.size(); ++r)
            work.run_squared[r] = work.run_squared[r] + head.run_squared[r];
        work.equal += tested.equal;
        work.total += tested.total;
        work.truth_squared = work.truth_squared + tested.truth_squared;
        work.bound_squared = work.bound_squared + tested.bound_squared;
        work.in_log2 = work.in_log2 && tested.in_log2;
        work.observed_errors.push_back(tested.observed_errors);
        work.plan_errors.push_back(tested.plan_errors);
        work.numbers.push_back(head_number(group, tested.output.value_or(Output::o), tested.i));
        work.heads.push_back(std::move(head));
    }
}

std::vector<LayerWork::Tested> LayerWork::tests_of(const Group& group, const GroupTruth& truth,
                                                   RunOutputs& plan) const {
    const std::vector<double> mean_key = attribution::mean_key_direction(group);
    std::vector<Tested> tests;
    for (const Output output : outputs_) {
        const Dtype dtype = kernel_[output]->dtype;
        const double* along = output == Output::dq && !mean_key.empty() ? mean_key.data() : nullptr;
        std::vector<Matrix>& of_plan = plan.outputs[static_cast<std::size_t>(output)];
        for (std::size_t i = 0; i < of_plan.size(); ++i) {
            const CertifiedMatrix& exact = attribution::truth_of(truth, output, i);
            store(dtype, of_plan[i]);
            const Matrix observed = observed_matrix(group, *kernel_[output], output, i);
            Matrix true_values(exact.rows, exact.cols);
            exact.copy_to(true_values.view());
            HeadLayout layout = layout_of(output, true_values, mean_key);
            Tested tested{
                output, i, HeadTest({true_values, bounds_of(exact), of_plan[i], observed}, std::move(layout)), {}};
            tested.compare(dtype, of_plan[i], observed, exact);
            tested.observed_errors = ErrorSums(observed.view(), exact, along);
            tested.plan_errors = ErrorSums(of_plan[i].view(), exact, along);
            if (output == Output::dk || output == Output::dv) {
                tested.observed_errors.rows_are_keys();
                tested.plan_errors.rows_are_keys();
            }
            tests.push_back(std::move(tested));
        }
    }
    for (std::size_t i = 0; has_lse_ && i < plan.lse.size(); ++i)
        tests.push_back(lse_test(group, truth, plan.lse[i], i));
    return tests;
}

LayerWork::Tested LayerWork::lse_test(const Group& group, const GroupTruth& truth, const Matrix& plan,
                                      std::size_t i) const {
    CertifiedMatrix exact = truth.heads[i].lse;
    const Dtype dtype = kernel_.lse->dtype;
    Matrix true_values(exact.rows, 1), observed = observed_matrix(group, *kernel_.lse, Output::o, i), own = plan;
    store(dtype, own);
    exact.copy_to(true_values.view());
    HeadLayout layout;
    layout.floor = lse_floor(group, i, exact, !plan_.rounding_sites().empty(), dtype);
    layout.common_floor = true;
    layout.block = block_of(plan_, Output::o, true_values.rows);
    layout.slack = options_.slack;
    layout.sizes_and_shift = true;
    std::vector<char> keyless;
    for (std::size_t r = 0; r < true_values.values.size(); ++r) {
        keyless.push_back(std::isfinite(true_values.values[r]) ? 0 : 1);
        if (keyless.back() == 0) continue;
        exact.value[r] = exact.bound[r] = 0;
        exact.exponent[r] = 0;
    }
    const std::size_t finite = settle_rows_without_keys(true_values, observed, own);
    Tested tested{std::nullopt, i, HeadTest({true_values, bounds_of(exact), own, observed}, std::move(layout)),
                  std::move(keyless)};
    tested.finite = finite;
    tested.in_log2 = reads_as_log2(observed, true_values);
    tested.compare(dtype, own, observed, exact);
    tested.observed_errors = ErrorSums(observed.view(), exact, nullptr);
    tested.plan_errors = ErrorSums(own.view(), exact, nullptr);
    return tested;
}

/// The same with an error of random sign: storing rounds as any site does. Nothing where the plan itself stores that type
/// or a narrower one: what a run of the null model has then is its value with the sign of that rounding changed.
void LayerWork::store_with_signs(Dtype dtype, const Group& group, std::size_t place, std::size_t i, std::size_t number,
                                 Matrix& values) const {
    const Format file = attribution::format_of(dtype);
    const std::optional<Format> own = stored_at(plan_, place, group.query_heads() > 1);
    if (own && own->precision <= file.precision && own->emax <= file.emax &&
        own->emin - own->precision >= file.emin - file.precision)
        return;
    const Matrix exact = values;
    store(dtype, values);
    const RandomStream stream(options_.seed, number, static_cast<std::uint64_t>(site_count),
                              static_cast<std::uint64_t>(group.inputs.first_head), static_cast<std::uint64_t>(i),
                              static_cast<std::uint64_t>(place));
    for (std::size_t a = 0; a < values.values.size(); ++a) {
        const double error = values.values[a] - exact.values[a];
        if (error != 0 && std::isfinite(error) && (stream.bits(a / 64) >> a % 64 & 1) != 0)
            values.values[a] = exact.values[a] - error;
    }
}

HeadLayout LayerWork::layout_of(Output output, const Matrix& truth, const std::vector<double>& mean_key) const {
    Norm of_truth;
    for (const double x : truth.values) of_truth.add(x);
    const double rms = of_truth.rms(static_cast<double>(truth.values.size()));
    HeadLayout layout;
    layout.floor.assign(static_cast<std::size_t>(truth.rows), rms * (low_precision_ ? fp32_floor : binary64_floor));
    layout.block = block_of(plan_, output, truth.rows);
    if (output == Output::dq) layout.direction = mean_key;
    layout.slack = options_.slack;
    return layout;
}

int LayerWork::head_number(const Group& group, Output output, std::size_t i) const {
    if (output == Output::o || output == Output::dq) return group.inputs.first_head + static_cast<int>(i);
    return static_cast<int>(group.batch * layer_.kv_heads() + group.kv_head);
}

}  // namespace faultline::verdict
