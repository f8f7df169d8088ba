// SPDX-License-Identifier: Apache-2.0
#include <faultline/generation/maximize.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/layer_plan.hpp>
#include <faultline/base/counted.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

constexpr std::size_t children = 8;
constexpr std::uint64_t for_change = 101, for_baseline = 102;

/// Sums up one site's error.
class SiteWatch final : public Instrument {
  public:
    explicit SiteWatch(Site site) : site_(site) {}
    [[nodiscard]] bool watches(Site site) const override { return site == site_; }
    void at(Site, const TileAt&, MatrixView<double> value, MatrixView<const double> exact) override {
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
                const double e = value(i, j) - exact(i, j);
                if (!std::isfinite(e)) continue;
                sum_ += e, squares_ += e * e, values_ += exact(i, j) * exact(i, j), count_ += 1;
            }
    }
    [[nodiscard]] SiteBias bias(bool relative) const {
        SiteBias b;
        if (count_ == 0) return b;
        b.mean = sum_ / count_, b.rms = std::sqrt(squares_ / count_), b.value_rms = std::sqrt(values_ / count_);
        b.count = count_;
        const double size = relative ? b.value_rms : 1;
        b.objective = size > 0 && std::isfinite(b.mean / size) ? std::abs(b.mean / size) : 0;
        return b;
    }

  private:
    Site site_;
    double sum_ = 0, squares_ = 0, values_ = 0, count_ = 0;
};

bool is_relative(Site site) { return info(site).unit.find("logit") == std::string_view::npos; }

/// The nearest value of the grid that is no larger.
double limited(double x, double largest) {
    double on = generation::on_grid(x);
    if (std::abs(on) > largest) on = std::copysign(largest, on);
    return on;
}

/// The largest value of the grid up to x.
double grid_limit(double x) {
    double limit = generation::smallest_value;
    for (double power = generation::smallest_value; power <= x && power <= 256; power *= 2)
        for (const double quarter : {1.0, 1.25, 1.5, 1.75})
            if (power * quarter <= x) limit = power * quarter;
    return limit;
}

LayerCapture random_inputs(const MaximizeOptions& options, std::uint64_t number, double largest) {
    const InputFamily& benign = *find_family("benign");
    LayerCapture layer = make_inputs(benign, options.shape, RandomStream(options.seed, for_baseline, number).bits(0));
    // Sizes drawn with it, a power of two for each tensor: within the ranges, any.
    const RandomStream stream(options.seed, for_baseline, number, 1);
    std::uint64_t at = 0;
    for (HeadArray* a : {&layer.q, &layer.k, &layer.v, &layer.dout}) {
        const double power = std::exp2(std::floor(std::log2(largest) * stream.uniform(at++)));
        for (double& x : a->values) x = limited(x * power / 2, largest);
    }
    return layer;
}

/// A change of the inputs: some elements, a row, a column, or a whole tensor.
void change(LayerCapture& layer, const RandomStream& stream, double largest) {
    std::uint64_t at = 0;
    const auto draw = [&](std::size_t n) {
        return std::min(n - 1, static_cast<std::size_t>(stream.uniform(at++) * static_cast<double>(n)));
    };
    std::array<HeadArray*, 4> tensors{&layer.q, &layer.k, &layer.v, &layer.dout};
    const std::size_t changes = 1 + draw(3);
    for (std::size_t n = 0; n < changes; ++n) {
        HeadArray& a = *tensors[draw(tensors.size())];
        const std::size_t rows = a.values.size() / static_cast<std::size_t>(a.cols),
                          cols = static_cast<std::size_t>(a.cols);
        const auto row = [&](std::size_t i) { return a.values.begin() + static_cast<std::ptrdiff_t>(i * cols); };
        switch (draw(8)) {
            case 0:  // other values
                for (std::size_t i = 0, count = 1 + draw(16); i < count; ++i)
                    a.values[draw(a.values.size())] = limited(largest / 2 * stream.normal(at++), largest);
                break;
            case 1: {  // a row twice or half as large
                const std::size_t i = draw(rows);
                const double factor = draw(2) == 0 ? 2 : 0.5;
                std::for_each(row(i), row(i) + a.cols, [&](double& x) { x = limited(factor * x, largest); });
                break;
            }
            case 2: {  // a row like another
                const std::size_t from = draw(rows), to = draw(rows);
                std::copy(row(from), row(from) + a.cols, row(to));
                break;
            }
            case 3: {  // a column of one sign
                const std::size_t c = draw(cols);
                const double sign = draw(2) == 0 ? 1 : -1;
                for (std::size_t i = 0; i < rows; ++i) a.values[i * cols + c] = sign * std::abs(a.values[i * cols + c]);
                break;
            }
            case 4: {  // a column of one value
                const std::size_t c = draw(cols), i = draw(rows);
                for (std::size_t r = 0; r < rows; ++r) a.values[r * cols + c] = a.values[i * cols + c];
                break;
            }
            case 5: {  // all twice or half as large
                const double factor = draw(2) == 0 ? 2 : 0.5;
                for (double& x : a.values) x = limited(factor * x, largest);
                break;
            }
            case 6: {  // the next value of the grid, up or down
                for (std::size_t i = 0, count = 1 + draw(32); i < count; ++i) {
                    double& x = a.values[draw(a.values.size())];
                    x = limited(x * (draw(2) == 0 ? 1.25 : 0.8), largest);
                }
                break;
            }
            default: {  // signs of a row turned
                const std::size_t i = draw(rows);
                std::for_each(row(i), row(i) + a.cols, [](double& x) { x = -x; });
            }
        }
    }
}

struct Candidate {
    LayerCapture inputs;
    SiteBias bias;
    std::string from;
};

}  // namespace

SiteBias site_bias(const LayerCapture& inputs, const RoundingPlan& plan, Site site) {
    SiteWatch watch(site);
    const RoundingPlan settled = for_layer(plan, inputs);
    const bool backward = info(site).pass == Pass::backward || site == Site::do_cast;
    for (const attribution::Group& group : attribution::groups_of(inputs, {}, 0)) {
        const GroupForward forward = attention_forward(group.inputs, settled, &watch);
        if (backward) (void)attention_backward(group.inputs, forward, settled, &watch);
    }
    return watch.bias(is_relative(site));
}

Maximized maximize(Site site, const RoundingPlan& plan, const MaximizeOptions& options) {
    const RoundingPlan settled = for_head_dim(plan, static_cast<int>(options.shape.head_dim), options.shape.causal);
    if (!takes_part(site, {}))
        throw RequestError(
            fmt::format("site {}: the search's inputs have no softcap, sink or dropout: expected a site of "
                        "attention without them",
                        name(site)));
    const std::string problem = problem_with(settled);
    if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
    if (settled[site].is_exact())
        throw RequestError(
            fmt::format("site \"{}\" is exact in plan \"{}\": there is no error to maximize", name(site), plan.name));
    if (info(site).shape == SiteShape::constant)
        throw RequestError(
            fmt::format("site \"{}\" rounds one constant, whatever the inputs: expected another site", name(site)));
    const double largest = grid_limit(options.largest);
    Maximized result;
    result.site = site;
    result.relative = is_relative(site);

    const auto evaluate = [&](std::vector<Candidate>& candidates) {
        parallel_for(candidates.size(), options.threads,
                     [&](std::size_t i) { candidates[i].bias = site_bias(candidates[i].inputs, plan, site); });
        result.evaluations += candidates.size();
        if (options.progress)
            options.progress(std::min(result.evaluations, options.evaluations), options.evaluations,
                             std::string(name(site)));
    };
    const auto best_of = [](const std::vector<Candidate>& candidates) {
        return std::max_element(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
            return a.bias.objective < b.bias.objective;
        });
    };
    std::vector<Candidate> first;
    for (std::size_t i = 0; i < std::max<std::size_t>(options.baseline, 1); ++i)
        first.push_back({random_inputs(options, i, largest), {}, "random"});
    evaluate(first);
    if (first.front().bias.count == 0)  // which no value of the inputs changes
        throw RequestError(fmt::format(
            "site {}: has nothing to do in {} of {} and {} under plan \"{}\": expected a site that the run passes, or "
            "another shape (more keys than a tile has, query heads that share keys)",
            name(site), counted(options.shape.queries, "row", "rows"),
            counted(options.shape.heads, "query head", "query heads"), counted(options.shape.keys, "key", "keys"),
            plan.name));
    std::vector<Candidate> known;
    for (const InputFamily& family : input_families()) {
        if (family.masked || family.extras || family.name == "benign") continue;
        known.push_back({make_inputs(family, options.shape, options.seed), {}, std::string(family.name)});
        LayerCapture& layer = known.back().inputs;
        for (HeadArray* a : {&layer.q, &layer.k, &layer.v, &layer.dout})
            for (double& x : a->values) x = limited(x, largest);
    }
    evaluate(known);
    const auto has_no_error = [](const Candidate& c) { return c.bias.rms == 0; };  // a NaN is one
    if (std::ranges::all_of(first, has_no_error) && std::ranges::all_of(known, has_no_error))
        throw RequestError(fmt::format(
            "site {}: rounds nothing in {} of {} and {} under plan \"{}\", for {} inputs: expected a site that has an "
            "error there, or another shape",
            name(site), counted(options.shape.queries, "row", "rows"),
            counted(options.shape.heads, "query head", "query heads"), counted(options.shape.keys, "key", "keys"),
            plan.name, first.size() + known.size()));
    double squares = 0;
    for (const Candidate& c : first) {
        squares += c.bias.objective * c.bias.objective;
        result.random_largest = std::max(result.random_largest, c.bias.objective);
    }
    result.random_rms = std::sqrt(squares / static_cast<double>(first.size()));
    Candidate best = *best_of(first);
    if (best_of(known)->bias.objective > best.bias.objective) best = *best_of(known);
    for (std::uint64_t generation = 0; result.evaluations + children <= options.evaluations; ++generation) {
        if (options.cancelled && options.cancelled()) {
            result.complete = false;
            break;
        }
        std::vector<Candidate> next(children, best);
        for (std::size_t c = 0; c < children; ++c)
            change(next[c].inputs, RandomStream(options.seed, for_change, generation, c), largest);
        evaluate(next);
        // As good is good enough: the search then moves along a plateau.
        if (best_of(next)->bias.objective >= best.bias.objective) best = *best_of(next);
    }
    result.inputs = std::move(best.inputs);
    result.inputs.name = std::string(name(site));
    result.reached = best.bias;
    result.from = best.from;
    return result;
}

}  // namespace faultline
