// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/layer_plan.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/base/work_count.hpp>
#include <faultline/format/format.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using attribution::format_of;

/// The type that a file holds values of this format in.
Dtype dtype_of(const Format& format) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::e4m3, Dtype::e5m2}) {
        const Format candidate = format_of(dtype);
        if (candidate.precision == format.precision && candidate.emin == format.emin && candidate.emax == format.emax)
            return dtype;
    }
    return Dtype::f64;
}

/// Looks at no tile, and ends the run where the caller asked for it: a head of some thousand rows takes seconds.
class UntilCancelled final : public Instrument {
  public:
    explicit UntilCancelled(const std::function<bool()>& cancelled) : cancelled_(cancelled) {}
    [[nodiscard]] bool watches(Site) const override {
        if (cancelled_()) throw Cancelled{};
        return false;
    }
    void at(Site, const TileAt&, MatrixView<double>, MatrixView<const double>) override {}

  private:
    const std::function<bool()>& cancelled_;
};

}  // namespace

double generation::on_grid(double x) {
    if (x == 0 || !std::isfinite(x)) return 0;
    const double rounded = round(x, e5m2, Rounding::nearest_even);
    const double size = std::clamp(std::abs(rounded), smallest_value, largest_value);
    return std::copysign(std::abs(x) < smallest_value / 2 ? 0 : size, x);
}

void observe(LayerCapture& layer, const RoundingPlan& plan, const std::string& kernel, std::uint64_t seed, int threads,
             const std::function<bool()>& cancelled) {
    const RoundingPlan settled = for_layer(plan, layer);
    const std::string problem = problem_with(settled);
    if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
    if (const std::string cannot = problem_with(settled, layer.extras()); !cannot.empty())
        throw RequestError(fmt::format("{}: {}", escaped(layer.name), cannot));
    ObservedKernel seen;
    seen.name = kernel;
    std::replace(seen.name.begin(), seen.name.end(), '.', '-');
    const std::vector<attribution::Group> groups = attribution::groups_of(layer, {}, seed);
    std::vector<attribution::RunOutputs> runs(groups.size());
    try {
        parallel_for(groups.size(), threads, [&](std::size_t g) {
            UntilCancelled asked(cancelled);
            runs[g] = attribution::run_plan(groups[g], settled, cancelled ? &asked : nullptr);
        });
    } catch (const Cancelled&) {
        return;
    }
    for (const Output output : all_outputs) {
        if (runs.front()[output].empty()) continue;
        const std::optional<Format> format = stored_format(settled, output, layer.heads() > layer.kv_heads());
        const Matrix& first = runs.front()[output].front();
        const bool per_query = output == Output::o || output == Output::dq;
        HeadArray array{layer.q.batch,
                        per_query ? layer.heads() : layer.kv_heads(),
                        first.rows,
                        first.cols,
                        {},
                        format ? dtype_of(*format) : Dtype::f64};
        for (const attribution::RunOutputs& run : runs)
            for (const Matrix& m : run[output])
                array.values.insert(array.values.end(), m.values.begin(), m.values.end());
        seen.outputs[static_cast<std::size_t>(output)] = std::move(array);
    }
    layer.observed.push_back(std::move(seen));
}

}  // namespace faultline
