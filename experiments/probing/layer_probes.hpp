// SPDX-License-Identifier: Apache-2.0
// The probes of one layer of a capture. Private to this folder.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/layer_plan.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/cpu/recorder.hpp>
#include <faultline/probes/coherence.hpp>
#include <faultline/probes/output_error.hpp>
#include <faultline/probes/saturation.hpp>
#include <faultline/probing/probing.hpp>

namespace faultline::probing {

/// A number per head, sequence and row of one source.
struct RowArray {
    std::vector<double> values;
    std::size_t per_head = 0;  ///< sequences x rows
    RowArray(std::size_t heads, std::size_t count) : values(heads * count, NAN), per_head(count) {}
    [[nodiscard]] std::span<double> head(std::size_t h) { return std::span(values).subspan(h * per_head, per_head); }
    void set(std::size_t h, std::size_t sequence, std::span<const double> rows) {
        std::ranges::copy(rows, head(h).begin() + static_cast<std::ptrdiff_t>(sequence * rows.size()));
    }
};

/// Exact arithmetic, the plan's kernel, or an observed one.
struct Source {
    std::string name;
    const ObservedKernel* kernel = nullptr;
    bool is_plan = false;
    RowArray p_sum, gradient_sum, gradient_abs, delta_error, delta_gap;
    std::vector<FeatureError> features;  ///< [head, feature]
    std::vector<double> o;               ///< [head, sequence, row, feature]
    Source(std::string source, std::size_t heads, std::size_t rows)
        : name(std::move(source)),
          p_sum(heads, rows),
          gradient_sum(heads, rows),
          gradient_abs(heads, rows),
          delta_error(heads, rows),
          delta_gap(heads, rows) {}
};

class LayerProbes {
  public:
    LayerProbes(const ProbeCapture& capture, const LayerCapture& layer, std::string place, const ProbeOptions& options)
        : capture_(capture),
          layer_(layer),
          place_(std::move(place)),
          options_(options),
          heads_(heads_of(layer, options)),
          rows_(static_cast<std::size_t>(layer.q.batch * layer.q.rows)),
          backward_(!layer.dout.empty()),
          plan_(for_layer(options.plan, layer)),
          plan_runs_(softcap_of(layer, options) == 0 && layer.sink.empty()) {
        expect_no_dropout(capture, layer);
        add_source("exact", "");
        if (plan_runs_) add_source(options.plan.name, "plan").is_plan = true;
        for (const ObservedKernel& kernel : layer.observed)
            if (kernel[Output::o]) add_source(kernel.name, "kernel").kernel = &kernel;
    }

    void run(Report& report) {
        groups_ = attribution::groups_of(layer_, options_.heads, 0);
        if (needs_rows()) {
            if (plan_runs_) run_plan();
            saturation_.resize(heads_.size() * rows_);
            winner_fused_.assign(saturation_.size(), NAN);
            winner_unfused_ = winner_fused_;
            const auto sequences = static_cast<std::size_t>(layer_.q.batch);
            key_spread_.assign(heads_.size() * sequences, NAN);
            parallel_for(heads_.size() * sequences, options_.threads, [&](std::size_t n) {
                expect_going_on(options_);
                visit(n / sequences, static_cast<std::ptrdiff_t>(n % sequences));
            });
        }
        if (options_.wants("conservation")) conservation_block(report);
        if (options_.wants("invariance") && plan_runs_) invariance_block(report);
        if (options_.wants("coherence") && backward_) coherence_blocks(report);
        if (options_.wants("saturation")) saturation_block(report);
        if (options_.wants("output-error") && sources_.size() > 1) output_blocks(report);
    }

  private:
    Source& add_source(const std::string& name, const std::string& kind) {
        const bool taken = std::ranges::any_of(sources_, [&](const Source& s) { return s.name == name; });
        Source& source = sources_.emplace_back(taken ? name + " (" + kind + ")" : name, heads_.size(), rows_);
        source.o.assign(heads_.size() * rows_ * static_cast<std::size_t>(layer_.v.cols), NAN);
        return source;
    }
    [[nodiscard]] bool needs_rows() const {
        return options_.wants("conservation") || options_.wants("coherence") || options_.wants("saturation") ||
               options_.wants("output-error");
    }
    [[nodiscard]] Block block(const std::string& probe, std::string note) const {
        if (!plan_runs_ && probe != "saturation") note += fmt::format("; {}", plan_left_out);
        return {place_, probe, std::move(note), head_names(heads_), {}, {}, {}};
    }
    [[nodiscard]] std::vector<Axis> axes(std::initializer_list<Axis> more, bool by_source) const {
        std::vector<Axis> all;
        if (by_source) all.push_back({"source", static_cast<std::int64_t>(sources_.size())});
        all.push_back({"head", static_cast<std::int64_t>(heads_.size())});
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    [[nodiscard]] std::vector<Axis> row_axes(bool by_source) const {
        return axes({{"sequence", layer_.q.batch}, {"row", layer_.q.rows}}, by_source);
    }
    void label(Block& block, bool by_source) const {
        std::vector<std::string> heads, names;
        for (const int h : heads_) heads.push_back(std::to_string(h));
        block.labels.emplace_back("head", heads);
        for (const Source& source : sources_) names.push_back(source.name);
        if (by_source) block.labels.emplace_back("source", names);
    }
    template <class Get>
    std::vector<double> of_sources(Get&& get) {
        std::vector<double> all;
        for (Source& source : sources_) {
            const auto& part = get(source);
            all.insert(all.end(), part.begin(), part.end());
        }
        return all;
    }
    [[nodiscard]] std::size_t position(int head) const {
        return static_cast<std::size_t>(std::ranges::find(heads_, head) - heads_.begin());
    }

    /// The plan's kernel over every group: its rows, its output, and its sites' errors.
    /// Where query head i of a group stands among the heads probed; heads_.size() where it does not.
    [[nodiscard]] std::size_t position_in(const attribution::Group& group, std::size_t i) const {
        const int first = group.inputs.first_head % static_cast<int>(layer_.heads());
        return position(first + static_cast<int>(i));
    }
    /// [row, feature] of a source's output, one head and sequence.
    [[nodiscard]] std::span<double> output_of(Source& source, std::size_t h, std::size_t sequence) const {
        const auto size = static_cast<std::size_t>(layer_.q.rows * layer_.v.cols);
        return std::span(source.o).subspan((h * static_cast<std::size_t>(layer_.q.batch) + sequence) * size, size);
    }
    void run_plan();
    void add_site_errors(const attribution::Group& group, const TileStatistics& tiles);

    void visit(std::size_t h, std::ptrdiff_t b);

    void fill(Source& source, std::size_t h, std::size_t sequence, const ScoreGradient& g,
              const std::vector<double>& delta, const std::vector<double>& exact_delta, MatrixView<const double> bias,
              bool p_is_its_own);
    /// delta becomes its error, and P.dP its distance from delta.
    void take_off(Source& source, std::size_t h, std::size_t sequence, const std::vector<double>& exact_delta);
    static Matrix exact_output(const ScoreGradient& g, const HeadInputs& in);

    template <class F>
    Line line(const std::string& name, const std::string& unit, F&& of_head) {
        Line line{name, unit, {}};
        for (std::size_t h = 0; h < heads_.size(); ++h) line.values.push_back(of_head(h));
        return line;
    }

    void conservation_block(Report& report);

    void invariance_block(Report& report);

    void add_coherence(Block& out, const std::string& name, const std::vector<Coherence>& by_head);

    void put_coherence(Block& out, const std::vector<Axis>& axes, const std::vector<Coherence>& all,
                       const std::string& unit);

    void coherence_blocks(Report& report);

    void saturation_block(Report& report);

    void output_blocks(Report& report);
    /// The format that a source stores its output in: a plan's rule, an observed kernel's tensor.
    [[nodiscard]] Format output_format(const Source& source) const;
    void running_quantities(Block& out, const std::vector<std::size_t>& feature_of_head);

    static constexpr std::size_t shown_sites = 5;
    /// Of a site in the list: with fewer the least chance, all signs alike, is above 3%, and the list would be of ties.
    static constexpr std::size_t least_tiles = 6;
    const ProbeCapture& capture_;
    const LayerCapture& layer_;
    std::string place_;
    const ProbeOptions& options_;
    std::vector<int> heads_;
    std::size_t rows_;  ///< of a head, all sequences
    bool backward_;
    RoundingPlan plan_;
    bool plan_runs_;
    std::vector<attribution::Group> groups_;
    std::vector<Source> sources_;
    std::map<Site, std::vector<std::vector<double>>> site_errors_;  ///< [head][tile]
    std::vector<RowSaturation> saturation_;                         ///< [head, sequence, row]
    std::vector<double> winner_fused_, winner_unfused_, key_spread_;
};

}  // namespace faultline::probing
