// SPDX-License-Identifier: Apache-2.0
// What the backward of one query head has once for each row, over all of its tiles: lse as the exponent subtracts it, the
// sink's probability, delta. Every back end computes these on the host, here; the tiles are its own.
#pragma once

#include <cmath>
#include <numbers>
#include <vector>

#include <faultline/cpu/row_state.hpp>

namespace faultline::cpu {

/// Row sums of P o dP and of P: in the kernel's arithmetic, and in binary64. [n_q] each.
struct ProbabilitySums {
    std::vector<double> p_dp, exact_p_dp, p, exact_p;

    /// Zeros; the sink has probability and no dP.
    explicit ProbabilitySums(std::size_t rows, const std::vector<double>* sink_p = nullptr)
        : p_dp(rows, 0.0), exact_p_dp(rows, 0.0), p(sink_p == nullptr ? p_dp : *sink_p), exact_p(p) {}
};

/// What sum_mod_8 calls, which compiles for the device too, where a lambda of a host function would not be callable.
struct RoundedToFloat {
    FAULTLINE_HD double operator()(double x) const { return static_cast<double>(static_cast<float>(x)); }
};
struct ProductAdded {
    const double *a, *b;
    FAULTLINE_HD double operator()(double sum, std::ptrdiff_t j) const { return sum + a[j] * b[j]; }
};

template <class I>
class RowQuantities {
  public:
    RowQuantities(Stage<I>& stage, const RoundingPlan& plan, const Scales& scales, const Mask& mask, int head,
                  const HeadForward& forward)
        : stage_(stage), schedule_(plan.schedule), scales_(scales), mask_(mask), head_(head), forward_(forward) {}

    /// (s - lse/scale) c: what is subtracted is in units of the raw score.
    [[nodiscard]] bool subtracts_raw() const {
        return schedule_.bwd_argument == ArgumentForm::subtract_then_scale && schedule_.scale_at == ScaleAt::exponent;
    }

    /// What is subtracted in the exponent: lse in the unit that bwd_argument subtracts it in.
    [[nodiscard]] std::vector<double> scaled_lse() {
        std::vector<double> reference = forward_.lse;
        if (schedule_.p_saved) return reference;
        if (subtracts_raw()) {
            // Kernels that start the accumulator there multiply by a constant of their own (mha_h100.cu:216-221).
            const bool multiplies = schedule_.lse_in == LseIn::accumulator && scales_.cap == 0;
            const auto divided = [&](double x, auto, auto) { return x / scales_.natural; };
            stage_.pass(
                Site::lse_scale, row_place(), column(reference),
                [&](MatrixView<double> t) {
                    if (multiplies)
                        for_each(t, [&](double x, auto, auto) { return x * scales_.inverse; });
                    else
                        for_each(t, divided);
                },
                [&](MatrixView<double> t) { for_each(t, divided); });
            return reference;
        }
        const bool in_log2 = schedule_.bwd_exp_base == ExpBase::two;
        if (!in_log2) return reference;
        constexpr double log2e_fp32 = 1.44269502162933349609375;  // float(M_LOG2E), as the kernels hold it
        stage_.pass(
            Site::lse_scale, row_place(), column(reference),
            [&](MatrixView<double> t) { for_each(t, [&](double x, auto, auto) { return x * log2e_fp32; }); },
            [&](MatrixView<double> t) { for_each(t, [&](double x, auto, auto) { return x * std::numbers::log2e; }); });
        return reference;
    }

    /// exp(sink - lse), of the lse that the scores subtract; read where the forward's softmax is.
    [[nodiscard]] std::vector<double> sink_probabilities(const std::vector<double>& reference) {
        if (schedule_.p_saved) {
            std::vector<double> saved = forward_.sink_p;
            stage_.pass(Site::sink_p, row_place(), column(saved));
            return saved;
        }
        const bool natural = schedule_.bwd_exp_base == ExpBase::e || subtracts_raw();
        std::vector<double> p = natural ? forward_.lse : reference;
        const double unit = natural ? 1.0 : scales_.log2e;
        const ExpBase base = natural ? ExpBase::e : ExpBase::two;
        stage_.pass(
            Site::sink_p, row_place(), column(p),
            [&](MatrixView<double> t) {
                const double sink = stage_.round_intermediate(Site::sink_p, *mask_.sink * unit);
                for_each(t,
                         [&](double lse, auto, auto) { return stage_.round_intermediate(Site::sink_p, sink - lse); });
                exponential(t, base, schedule_.functions);
            },
            [&](MatrixView<double> t) {
                for_each(t, [&](double lse, auto, auto) { return *mask_.sink * unit - lse; });
                exponential(t, base);
            });
        return p;
    }

    /// delta as rowsum(dO o O), with dout after its cast.
    [[nodiscard]] std::vector<double> delta_from_output(MatrixView<const double> dout) {
        const Matrix& o = schedule_.delta_from == DeltaFrom::o_unrounded ? forward_.o_unrounded : forward_.o;
        std::vector<double> exact(static_cast<std::size_t>(mask_.n_q));
        std::vector<double> delta(exact.size());
        const bool is_exact = stage_.rule(Site::delta).is_exact();
        Matrix product(dout);
        for_each(product.view(), [&](double x, auto i, auto j) { return x * o(i, j); });
        stage_.pass(Site::delta_product, row_place(), product.view());
        const std::vector<double> ones(static_cast<std::size_t>(o.cols), 1.0);
        for (std::ptrdiff_t i = 0; i < mask_.n_q; ++i) {
            double sum = 0;
            const double* row = product.view().row(i);
            for (std::ptrdiff_t j = 0; j < o.cols; ++j) sum += row[j];
            exact[static_cast<std::size_t>(i)] = sum * delta_share();
            delta[static_cast<std::size_t>(i)] =
                (is_exact ? sum : dot_in_order(row, ones.data(), o.cols)) * delta_share();
        }
        settle_delta(delta, exact);
        return delta;
    }

    /// rowsum(P o dP), or that over rowsum(P).
    [[nodiscard]] std::vector<double> delta_of(ProbabilitySums sums) {
        const bool is_exact = stage_.rule(Site::delta).is_exact();
        if (schedule_.delta_from == DeltaFrom::p_dp_normalized)
            for (std::size_t i = 0; i < sums.p_dp.size(); ++i) {
                if (sums.exact_p[i] == 0) continue;  // no visible key
                const double delta = sums.p_dp[i] / sums.p[i];
                sums.p_dp[i] = is_exact ? delta : static_cast<double>(static_cast<float>(delta));
                sums.exact_p_dp[i] /= sums.exact_p[i];
            }
        settle_delta(sums.p_dp, sums.exact_p_dp);
        return std::move(sums.p_dp);
    }

    /// -sum_i p_sink delta.
    [[nodiscard]] double sink_gradient(const std::vector<double>& sink_p, std::vector<double>& delta) {
        std::vector<double> minus_p(sink_p);
        for (double& p : minus_p) p = -p;
        double sum = 0;
        const MatrixView<double> total{&sum, 1, 1};
        const double share = delta_share();
        stage_.accumulate(Site::dsink, row_place(), {minus_p.data(), 1, mask_.n_q}, {delta.data(), mask_.n_q, 1},
                          total);
        return share == 1.0 ? sum : stage_.round_intermediate(Site::dsink, sum / share);
    }

  private:
    /// Where dropout scales the output, dO V^T is not divided by the kept share but dq, dk and dv are in the end, and delta
    /// is that share of rowsum(dO o O) (flash_bwd_preprocess_kernel.h:36-48); elsewhere 1.
    [[nodiscard]] double delta_share() const {
        return schedule_.normalize == Normalize::before_pv || mask_.kept.data == nullptr ? 1.0 : mask_.keep;
    }

    /// The sum of row[0..count) in the order of the schedule, every addition rounded to float; products of two bf16 are
    /// exact in float, so fma or multiply-and-add is the same.
    double dot_in_order(const double* a, const double* b, std::ptrdiff_t count) const {
        constexpr RoundedToFloat f;
        if (schedule_.delta_order == DeltaOrder::sequential) {
            double sum = 0;
            for (std::ptrdiff_t j = 0; j < count; ++j) sum = f(sum + f(a[j] * b[j]));
            return sum;
        }
        if (schedule_.delta_order == DeltaOrder::mod_8) return sum_mod_8(count, ProductAdded{a, b}, f);
        std::vector<double> lane(static_cast<std::size_t>(schedule_.delta_threads), 0.0);
        const std::ptrdiff_t step = schedule_.delta_order == DeltaOrder::octet_pairs ? 2 : 1;
        for (std::ptrdiff_t j = 0; j < count; j += step) {
            double& sum = lane[static_cast<std::size_t>((j / 8) % schedule_.delta_threads)];
            double term = f(a[j] * b[j]);
            if (step == 2 && j + 1 < count) term = f(term + f(a[j + 1] * b[j + 1]));
            sum = f(sum + term);
        }
        for (std::size_t half = lane.size() / 2; half > 0; half /= 2)
            for (std::size_t t = 0; t < half; ++t) lane[t] = f(lane[t] + lane[t + half]);
        return lane[0];
    }

    void settle_delta(std::vector<double>& delta, const std::vector<double>& exact) {
        if (!stage_.watches(Site::delta)) {
            stage_.round(Site::delta, row_place(), column(delta));
            return;
        }
        std::vector<double> wanted = exact;
        stage_.round(Site::delta, row_place(), column(delta));
        stage_.show(Site::delta, row_place(), column(delta), column(wanted));
    }

    [[nodiscard]] TileAt row_place() const { return {0, head_, 0, 0, 0, 0}; }
    static MatrixView<double> column(std::vector<double>& x) {
        return {x.data(), static_cast<std::ptrdiff_t>(x.size()), 1};
    }

    Stage<I>& stage_;
    const Schedule& schedule_;
    const Scales& scales_;
    const Mask& mask_;
    int head_;
    const HeadForward& forward_;
};

}  // namespace faultline::cpu
