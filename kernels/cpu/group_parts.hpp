// SPDX-License-Identifier: Apache-2.0
// What a call does once for its group, before and after the tiles: casts of the inputs, the scale, and the gradients scaled,
// cast and summed over the query heads. Every back end does these on the host, here.
#pragma once

#include <numbers>
#include <utility>
#include <vector>

#include <faultline/cpu/scores.hpp>

namespace faultline::cpu {

/// std::invalid_argument where shapes disagree, RequestError where the plan cannot run the problem.
void check_call(const HeadGroup& in, const RoundingPlan& plan, bool backward);

inline Mask mask_of(const HeadGroup& in, std::size_t head) {
    return {in.causal,
            in.q[head].rows,
            in.k.rows,
            in.bias.empty() ? MatrixView<const double>{} : in.bias[head],
            in.sink.empty() ? nullptr : &in.sink[head],
            in.dropout.empty() ? MatrixView<const double>{} : in.dropout[head],
            in.keep};
}

/// An input after its cast; q and k also carry sqrt(scale) where the plan scales inputs.
template <class I>
Matrix cast_input(Stage<I>& stage, Site site, int head, MatrixView<const double> x, double factor) {
    Matrix cast(x);
    if (factor != 1.0)
        for (double& value : cast.values) value *= factor;
    stage.pass(site, TileAt{0, head, 0, 0, 0, 0}, cast.view());
    return cast;
}

inline Matrix transposed(MatrixView<const double> x) {
    Matrix t(x.cols, x.rows);
    transpose(x, t.view());
    return t;
}

template <class I>
void show_scale(Stage<I>& stage, const HeadGroup& in, const Scales& scales, const Schedule& schedule) {
    if (!stage.watches(Site::scale)) return;
    const double in_log2 =
        schedule.exp_base == ExpBase::two && schedule.scale_at == ScaleAt::exponent ? std::numbers::log2e : 1.0;
    const bool capped = schedule.scale_at == ScaleAt::exponent && scales.cap > 0;
    double value = schedule.scale_at == ScaleAt::exponent ? scales.exponent : scales.gradient;
    const double exact = (capped ? in.softcap : in.scale) * in_log2;
    stage.show(Site::scale, TileAt{0, in.first_head, 0, 0, 0, 0}, {&value, 1, 1}, {&exact, 1, 1});
}

/// k for dq: k itself, or with key centering k - mean k, cast as k is; sum_j ds_ij = 0 makes the two the same.
inline Matrix centered_keys(const RoundingPlan& plan, const HeadGroup& in, const Matrix& k) {
    if (!plan.schedule.key_centering) return k;
    Matrix centered = k;
    const Rule& cast = plan[Site::k_cast];
    const std::vector<double> mean = mean_visible_key(in, k.view());
    for_each(centered.view(), [&](double x, auto, auto c) {
        return faultline::round(x - mean[static_cast<std::size_t>(c)], cast.format, Rounding::nearest_even);
    });
    return centered;
}

/// Scaled where the plan scales after the sum, rounded to fp32 in between as the kernels do, then cast.
template <class I>
void finish_gradient(Stage<I>& stage, Site site, int head, double factor, Matrix& gradient, int part = 0) {
    const auto scaled = [&](MatrixView<double> t) { for_each(t, [&](double x, auto, auto) { return x * factor; }); };
    stage.pass(
        site, TileAt{0, head, 0, 0, 0, 0, part}, gradient.view(),
        [&](MatrixView<double> t) {
            for_each(t, [&](double x, auto, auto) { return static_cast<double>(static_cast<float>(x * factor)); });
        },
        scaled);
}

/// The sum over the query heads of a group.
template <class I>
Matrix reduce_group(Stage<I>& stage, Site cast, int head, double factor, GroupReduce when, std::vector<Matrix> parts) {
    if (when == GroupReduce::after_cast)
        for (std::size_t h = 0; h < parts.size(); ++h)
            finish_gradient(stage, cast, head, factor, parts[h], static_cast<int>(h));
    Matrix sum = std::move(parts.front());
    if (parts.size() > 1) {
        for (std::size_t h = 1; h < parts.size(); ++h)
            for (std::size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += parts[h].values[i];
        stage.pass(Site::kv_group_reduce, TileAt{0, head, 0, 0, 0, 0, cast == Site::dv_cast ? 1 : 0}, sum.view());
    }
    if (when == GroupReduce::before_cast) finish_gradient(stage, cast, head, factor, sum);
    return sum;
}

/// With what dq and dk are multiplied in the end, and dv.
struct GradientFactors {
    double scores, values;

    template <class I>
    GradientFactors(const Stage<I>& stage, const Schedule& schedule, const Scales& scales) {
        // With scaled inputs the chain rule leaves sqrt(scale) for dq and dk; where ds was scaled before its cast, nothing.
        const double factor = schedule.scale_at == ScaleAt::inputs
                                  ? scales.inputs
                                  : (schedule.ds_scale == DsScale::after ? scales.gradient : 1.0);
        // Where dropout scales the output, dq, dk and dv carry 1/keep at the end, in one constant with the scale.
        const bool at_end = schedule.normalize != Normalize::before_pv && scales.inverse_keep != 1.0;
        values = at_end ? scales.inverse_keep : 1.0;
        scores = at_end ? stage.round_intermediate(Site::scale, factor * values) : factor;
    }
};

}  // namespace faultline::cpu
