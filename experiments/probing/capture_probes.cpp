// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/probes/plan_conservation.hpp>
#include <faultline/probing/layer_probes.hpp>

namespace faultline::probing {
namespace {

/// Whether the bias of a row is 0 or -inf everywhere.
bool masks_alone(const HeadInputs& in, std::ptrdiff_t row) {
    if (in.bias.data == nullptr) return true;
    for (std::ptrdiff_t j = 0; j < in.bias.cols; ++j)
        if (in.bias(row, j) != 0 && in.bias(row, j) != -INFINITY) return false;
    return true;
}

}  // namespace

void LayerProbes::run_plan() {
    Source& source = sources_[1];
    const bool sites = options_.wants("coherence") && backward_;
    std::vector<std::vector<TileStatistics>> tiles(groups_.size());
    parallel_for(groups_.size(), options_.backend->calls_at_once(options_.threads), [&](std::size_t n) {
        expect_going_on(options_);
        const attribution::Group& group = groups_[n];
        const HeadGroup& in = group.inputs;
        TileRecorder recorder(in, plan_);
        const GroupForward forward = options_.backend->forward(in, plan_, sites ? &recorder : nullptr);
        std::vector<PlanRows> rows;
        if (backward_) {
            ConservationWatch watch(in, plan_, forward);
            std::vector<Instrument*> parts{&watch};
            if (sites) parts.push_back(&recorder);
            Instruments both(parts);
            (void)options_.backend->backward(in, forward, plan_, &both);
            rows = watch.rows();
        }
        for (std::size_t i = 0; i < in.q.size(); ++i) {
            const std::size_t h = position_in(group, i);
            if (h == heads_.size()) continue;
            const auto b = static_cast<std::size_t>(group.batch);
            std::ranges::copy(forward.heads[i].o.values, output_of(source, h, b).begin());
            if (!backward_) continue;
            source.p_sum.set(h, b, rows[i].p_sum);
            source.gradient_sum.set(h, b, rows[i].gradient.sum);
            source.gradient_abs.set(h, b, rows[i].gradient.magnitude);
            source.delta_error.set(h, b, rows[i].delta);  // the exact one is taken off in visit()
            source.delta_gap.set(h, b, rows[i].delta_p_dp);
        }
        if (!sites) return;
        for (const Site site : plan_.rounding_sites()) tiles[n].push_back(recorder.statistics(site));
    });
    for (std::size_t n = 0; n < groups_.size(); ++n)
        for (const TileStatistics& site : tiles[n]) add_site_errors(groups_[n], site);
}

void LayerProbes::add_site_errors(const attribution::Group& group, const TileStatistics& tiles) {
    const std::size_t per_head = static_cast<std::size_t>(tiles.q_tiles) * static_cast<std::size_t>(tiles.k_tiles);
    auto& errors = site_errors_[tiles.site];
    errors.resize(heads_.size());
    for (std::size_t i = 0; i < group.inputs.q.size(); ++i) {
        const std::size_t h = position_in(group, i);
        if (h == heads_.size()) continue;
        for (std::size_t t = i * per_head; t < (i + 1) * per_head; ++t)
            if (tiles.count[t] > 0) errors[h].push_back(tiles.signed_mean[t]);
    }
}

void LayerProbes::visit(std::size_t h, std::ptrdiff_t b) {
    const HeadInputs in = inputs_of(layer_, b, heads_[h], options_);
    const ScoreGradient g = score_gradient(in);
    const auto sequence = static_cast<std::size_t>(b);
    for (Source& source : sources_) {
        if (source.is_plan) {
            if (backward_) take_off(source, h, sequence, g.delta);
            continue;
        }
        if (source.kernel == nullptr) {
            fill(source, h, sequence, g, g.delta, g.delta, in.bias, !g.lse.empty());
            std::ranges::copy(exact_output(g, in).values, output_of(source, h, sequence).begin());
            continue;
        }
        const MatrixView<const double> o = (*(*source.kernel)[Output::o])(b, heads_[h]);
        std::ranges::copy(Matrix(o).values, output_of(source, h, sequence).begin());
        std::vector<double> lse, delta;
        if (source.kernel->lse) {
            const MatrixView<const double> column = (*source.kernel->lse)(b, heads_[h]);
            for (std::ptrdiff_t i = 0; i < column.rows; ++i) lse.push_back(column(i, 0));
        }
        if (backward_) delta = delta_of_output(in.dout, o);
        fill(source, h, sequence, with_statistics(g, in, lse, delta), delta, g.delta, in.bias,
             source.kernel->lse.has_value());
    }
    std::size_t at = h * rows_ + sequence * static_cast<std::size_t>(in.q.rows);
    std::ptrdiff_t i = 0;
    for (const RowSaturation& row : saturation(g, options_.tolerance, in.sink)) {
        saturation_[at] = row;
        // The largest q.k follows from the largest score where that is scale q.k: without a cap, and under a bias that masks.
        if (in.softcap == 0 && masks_alone(in, i)) {
            winner_fused_[at] = winner_exponent(row.max_logit / in.scale, in.scale, true);
            winner_unfused_[at] = winner_exponent(row.max_logit / in.scale, in.scale, false);
        }
        ++at;
        ++i;
    }
    key_spread_[h * static_cast<std::size_t>(layer_.q.batch) + sequence] = key_mean_over_spread(in.k);
}

void LayerProbes::fill(Source& source, std::size_t h, std::size_t sequence, const ScoreGradient& g,
                       const std::vector<double>& delta, const std::vector<double>& exact_delta,
                       MatrixView<const double> bias, bool p_is_its_own) {
    const Conservation c = conservation(g, softcap_of(layer_, options_), bias);
    if (p_is_its_own) source.p_sum.set(h, sequence, c.p_sum);
    if (!backward_) return;
    source.gradient_sum.set(h, sequence, c.gradient_sum);
    source.gradient_abs.set(h, sequence, c.gradient_abs);
    source.delta_error.set(h, sequence, delta);
    source.delta_gap.set(h, sequence, delta_of_scores(g));
    take_off(source, h, sequence, exact_delta);
}

void LayerProbes::take_off(Source& source, std::size_t h, std::size_t sequence,
                           const std::vector<double>& exact_delta) {
    const std::size_t first = sequence * exact_delta.size();
    for (std::size_t i = 0; i < exact_delta.size(); ++i) {
        double& delta = source.delta_error.head(h)[first + i];
        double& gap = source.delta_gap.head(h)[first + i];
        gap = delta - gap;
        delta -= exact_delta[i];
    }
}

Matrix LayerProbes::exact_output(const ScoreGradient& g, const HeadInputs& in) {
    Matrix o(in.q.rows, in.v.cols);
    for (std::ptrdiff_t i = 0; i < o.rows; ++i)
        for (std::ptrdiff_t j = 0; j < in.v.rows; ++j)
            if (g.p(i, j) != 0)
                for (std::ptrdiff_t c = 0; c < o.cols; ++c) o(i, c) += g.p(i, j) * in.v(j, c);
    return o;
}

namespace {

/// Of LayerProbes::run_plan: what sees the backward are its recorder and its watch, or the watch alone.
void expect_room_for(const std::string& file, const LayerCapture& layer, const ProbeOptions& options) {
    const RoundingPlan plan = for_layer(options.plan, layer);
    const std::vector<attribution::Group> groups = attribution::groups_of(layer, options.heads, 0);
    const GroupForward unread;
    ConservationWatch watch(groups.front().inputs, plan, unread);
    attribution::SeenSites all_sites;
    Instrument* const seen = layer.dout.empty()           ? nullptr
                             : options.wants("coherence") ? static_cast<Instrument*>(&all_sites)
                                                          : &watch;
    attribution::expect_room(file + ": " + layer.name, groups, plan, *options.backend, seen);
}

}  // namespace

Report probe_captures(std::span<const ProbeCapture> captures, const ProbeOptions& options) {
    Report report{"capture", {}, options.plan.name, {}};
    const auto runs_plan = [&](const LayerCapture& layer) {
        return softcap_of(layer, options) == 0 && layer.sink.empty();
    };
    for (const ProbeCapture& capture : captures)  // before the work on any
        for (const LayerCapture& layer : capture.capture.layers)
            if (runs_plan(layer)) expect_room_for(capture.capture.path, layer, options);
    for (const ProbeCapture& capture : captures) {
        report.inputs.push_back(capture.capture.path);
        for (const LayerCapture& layer : capture.capture.layers)
            LayerProbes(capture, layer, place_of(capture, layer, captures.size()), options).run(report);
    }
    if (std::ranges::none_of(captures, [&](const ProbeCapture& capture) {
            return std::ranges::any_of(capture.capture.layers, runs_plan);
        }))
        report.plan.clear();
    if (options.wants("similarity")) add_similarity(captures, options, report);
    for (const std::string& probe : options.probes)
        if (std::ranges::none_of(report.blocks, [&](const Block& block) { return block.probe == probe; }))
            throw RequestError(
                fmt::format("{}: {}: there is nothing to measure: expected {}", captures.front().tensors.source, probe,
                            probe == "invariance"     ? "a layer without softcap and sink"
                            : probe == "output-error" ? "a layer without softcap and sink, or an observed KERNEL.o"
                                                      : "a layer with a tensor LAYER.do"));
    return report;
}

}  // namespace faultline::probing
