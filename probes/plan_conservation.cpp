// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/plan_conservation.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/cpu/tiles.hpp>

namespace faultline {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

/// Storage behind a group that is run in changed forms.
struct Variant {
    Matrix k, v;
    std::vector<Matrix> bias;
    HeadGroup group;
    explicit Variant(const HeadGroup& in) : k(in.k), v(in.v), group(in) {
        for (std::size_t h = 0; h < in.q.size(); ++h) {
            Matrix& b = bias.emplace_back(in.q[h].rows, in.k.rows);
            for (std::ptrdiff_t i = 0; i < b.rows; ++i)
                for (std::ptrdiff_t j = 0; j < b.cols; ++j)
                    b(i, j) = !is_visible(in, h, i, j) ? -std::numeric_limits<double>::infinity()
                              : in.bias.empty()        ? 0
                                                       : in.bias[h](i, j);
        }
        group.causal = false;
        settle();
    }
    Variant(const Variant& other) : k(other.k), v(other.v), bias(other.bias), group(other.group) { settle(); }
    Variant& operator=(const Variant&) = delete;
    void settle() {
        group.k = k.view();
        group.v = v.view();
        group.bias.clear();
        for (const Matrix& b : bias) group.bias.push_back(b.view());
    }
    void shift(double by) {
        for (Matrix& b : bias)
            for (double& x : b.values) x += by;
    }
    void reverse_keys() {
        const auto reverse_rows = [](Matrix& m) {
            for (std::ptrdiff_t i = 0; i < m.rows / 2; ++i)
                std::swap_ranges(m.view().row(i), m.view().row(i) + m.cols, m.view().row(m.rows - 1 - i));
        };
        reverse_rows(k);
        reverse_rows(v);
        for (Matrix& b : bias)
            for (std::ptrdiff_t i = 0; i < b.rows; ++i) std::reverse(b.view().row(i), b.view().row(i) + b.cols);
    }
};

struct Outputs {
    std::vector<double> o, dq;
};

Outputs outputs_of(const HeadGroup& in, const RoundingPlan& plan, const AttentionBackend& backend) {
    Outputs out;
    const GroupForward forward = backend.forward(in, plan, nullptr);
    for (const HeadForward& head : forward.heads) out.o.insert(out.o.end(), head.o.values.begin(), head.o.values.end());
    if (in.dout.empty()) return out;
    const GroupBackward backward = backend.backward(in, forward, plan, nullptr);
    for (const Matrix& dq : backward.dq) out.dq.insert(out.dq.end(), dq.values.begin(), dq.values.end());
    return out;
}

double relative_change(const std::vector<double>& plain, const std::vector<double>& changed) {
    double difference = 0, size = 0, largest = 0;
    for (const double x : plain) largest = std::max(largest, std::abs(x));
    if (!(largest > 0) || !std::isfinite(largest)) return nan_value;
    for (std::size_t i = 0; i < plain.size(); ++i) {
        const double d = (changed[i] - plain[i]) / largest, x = plain[i] / largest;
        difference += d * d;
        size += x * x;
    }
    return std::sqrt(difference / size);
}

}  // namespace

ConservationWatch::ConservationWatch(const HeadGroup& in, const RoundingPlan& plan, const GroupForward& forward)
    : forward_(forward),
      schedule_(plan.schedule),
      gradient_(score_gradient_site(plan.schedule, in.scale, in.softcap > 0)),
      first_head_(in.first_head) {
    p_site_ = schedule_.ds_p == DsP::cast ? Site::bwd_p_cast : Site::bwd_exp;
    for (const auto& q : in.q) {
        const std::vector<double> zeros(static_cast<std::size_t>(q.rows), 0.0);
        rows_.push_back({zeros, zeros, zeros, RowSums(zeros.size())});
    }
}

bool ConservationWatch::watches(Site site) const {
    return site == Site::delta || site == p_site_ || site == Site::dp_cast || site == gradient_.site;
}

void ConservationWatch::at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) {
    const auto head = static_cast<std::size_t>(where.head - first_head_);
    PlanRows& rows = rows_[head];
    const auto row = [&](std::ptrdiff_t i) { return static_cast<std::size_t>(where.query0 + i); };
    if (site == Site::delta) {
        for (std::ptrdiff_t i = 0; i < value.rows; ++i) rows.delta[row(i)] = value(i, 0);
        return;
    }
    if (site == gradient_.site) {
        rows.gradient.add(where, value, gradient_.unit);
        return;
    }
    // p is shown before dp, except where it is cast after it (ds_p = cast): then dp waits for p. A saved p is never shown.
    const bool p_comes_last = p_site_ == Site::bwd_p_cast;
    if (site == (p_comes_last ? Site::dp_cast : p_site_)) {
        p_ = Matrix(MatrixView<const double>(value));
        if (p_comes_last || !schedule_.p_saved) return;
    }
    for (std::ptrdiff_t i = 0; i < value.rows; ++i)
        for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
            const double other = !p_comes_last && schedule_.p_saved
                                     ? forward_.heads[head].p(where.query0 + i, where.key0 + j)
                                     : p_(i, j);
            const double p = p_comes_last ? value(i, j) : other;
            double dp = p_comes_last ? other : value(i, j);
            if (schedule_.delta_in == DeltaIn::accumulator) dp += rows.delta[row(i)];
            rows.p_sum[row(i)] += p;
            if (p != 0) rows.delta_p_dp[row(i)] += p * dp;
        }
}

std::vector<PlanRows> plan_conservation(const HeadGroup& in, const RoundingPlan& plan,
                                        const AttentionBackend& backend) {
    const GroupForward forward = backend.forward(in, plan, nullptr);
    ConservationWatch watch(in, plan, forward);
    (void)backend.backward(in, forward, plan, &watch);
    return watch.rows();
}

Invariance plan_invariance(const HeadGroup& in, const RoundingPlan& plan, double shift,
                           const AttentionBackend& backend) {
    Invariance result;
    const Variant plain(in);
    const Outputs reference = outputs_of(plain.group, plan, backend);
    const auto compare = [&](const Variant& variant, double& o, double& dq) {
        const Outputs changed = outputs_of(variant.group, plan, backend);
        o = relative_change(reference.o, changed.o);
        dq = relative_change(reference.dq, changed.dq);
    };
    Variant shifted(plain);
    shifted.shift(shift);
    compare(shifted, result.shift_o, result.shift_dq);
    Variant reversed(plain);
    reversed.reverse_keys();
    compare(reversed, result.permutation_o, result.permutation_dq);

    Variant ones(plain);
    std::fill(ones.v.values.begin(), ones.v.values.end(), 1.0);
    ones.group.dout.clear();
    const GroupForward forward = backend.forward(ones.group, plan, nullptr);
    double count = 0;
    for (std::size_t h = 0; h < forward.heads.size(); ++h)
        for (std::ptrdiff_t i = 0; i < forward.heads[h].o.rows; ++i) {
            bool sees = false;
            for (std::ptrdiff_t j = 0; j < in.k.rows && !sees; ++j) sees = is_visible(in, h, i, j);
            if (!sees) continue;
            for (std::ptrdiff_t c = 0; c < forward.heads[h].o.cols; ++c) {
                const double error = forward.heads[h].o(i, c) - 1;
                if (!(std::abs(error) <= result.ones_largest)) result.ones_largest = std::abs(error);  // a NaN shows
                result.ones_mean += error;
                count += 1;
            }
        }
    result.ones_mean = count > 0 ? result.ones_mean / count : nan_value;
    return result;
}

}  // namespace faultline
