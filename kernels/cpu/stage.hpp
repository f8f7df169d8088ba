// SPDX-License-Identifier: Apache-2.0
// One kernel call's way of passing a site: compute, round as the plan says, show the instrument.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <faultline/cpu/instrument.hpp>
#include <faultline/format/bulk.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/matrix.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::cpu {

/// The instrument that is not there: every question about it is answered at compile time.
struct NoInstrument {};

/// The numbers that a stochastic rounding at this place draws: a stream of its own for every (seed, layer, head, site,
/// tile, part), counted by the element's place in the tile, so that the same element gets the same bits for any order of
/// tiles and any thread count, and no two elements share them.
inline RandomStream stochastic_stream(std::uint64_t seed, int layer, Site site, const TileAt& where) {
    return RandomStream(seed, static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(where.head), index(site),
                        (static_cast<std::uint64_t>(where.query0) << 32) | static_cast<std::uint64_t>(where.key0),
                        static_cast<std::uint64_t>(where.part));
}

/// The instrument of a sweep that repeats what is shown elsewhere.
template <class I>
class Unseen {
  public:
    explicit Unseen(I* instrument) : repeated_(instrument) {}
    I* get() { return &repeated_; }

  private:
    Repeated repeated_;
};
template <>
class Unseen<NoInstrument> {
  public:
    explicit Unseen(NoInstrument* instrument) : none_(instrument) {}
    NoInstrument* get() { return none_; }

  private:
    NoInstrument* none_;
};

/// A tile's storage that is reused from tile to tile.
class Scratch {
  public:
    MatrixView<double> shaped(std::ptrdiff_t rows, std::ptrdiff_t cols) {
        const auto count = static_cast<std::size_t>(rows * cols);
        if (values_.size() < count) values_.resize(count);
        return {values_.data(), rows, cols};
    }

  private:
    std::vector<double> values_;
};

template <class F>
void for_each(MatrixView<double> tile, F&& f) {
    for (std::ptrdiff_t i = 0; i < tile.rows; ++i) {
        double* row = tile.row(i);
        for (std::ptrdiff_t j = 0; j < tile.cols; ++j) row[j] = f(row[j], i, j);
    }
}

inline void copy(MatrixView<const double> from, MatrixView<double> to) {
    for (std::ptrdiff_t i = 0; i < from.rows; ++i) std::copy(from.row(i), from.row(i) + from.cols, to.row(i));
}

template <class I>
class Stage {
  public:
    Stage(const RoundingPlan& plan, I* instrument, std::uint64_t seed, int layer)
        : plan_(plan), instrument_(instrument), seed_(seed), layer_(layer) {}

    [[nodiscard]] const Rule& rule(Site site) const { return plan_[site]; }

    [[nodiscard]] bool watches([[maybe_unused]] Site site) const {
        if constexpr (std::is_same_v<I, NoInstrument>)
            return false;
        else
            return instrument_->watches(site);
    }

    /// The tile holds the exact result of the site's operation; afterwards what the kernel has.
    void pass(Site site, TileAt where, MatrixView<double> tile) {
        if (watches(site)) {
            const MatrixView<double> exact = exact_.shaped(tile.rows, tile.cols);
            copy(tile, exact);
            round(site, where, tile);
            show(site, where, tile, exact);
        } else {
            round(site, where, tile);
        }
    }

    /// The same for an operation that the kernel does in several roundings: `in_kernel(tile)` leaves the kernel's value,
    /// not yet rounded the last time; `exactly(tile)` the exact result, called only when somebody looks. Both start from
    /// what the tile holds.
    template <class Kernel, class Exact>
    void pass(Site site, TileAt where, MatrixView<double> tile, Kernel&& in_kernel, Exact&& exactly) {
        if (plan_[site].is_exact()) {
            exactly(tile);
            if (watches(site)) {
                const MatrixView<double> exact = exact_.shaped(tile.rows, tile.cols);
                copy(tile, exact);
                show(site, where, tile, exact);
            }
            return;
        }
        if (watches(site)) {
            const MatrixView<double> exact = exact_.shaped(tile.rows, tile.cols);
            copy(tile, exact);
            exactly(exact);
            in_kernel(tile);
            round(site, where, tile);
            show(site, where, tile, exact);
        } else {
            in_kernel(tile);
            round(site, where, tile);
        }
    }

    /// c <- c + a b in the site's order and width; then the site's format, where it has one.
    void accumulate(Site site, TileAt where, MatrixView<const double> a, MatrixView<const double> b,
                    MatrixView<double> c) {
        if (watches(site)) {
            const MatrixView<double> exact = exact_.shaped(c.rows, c.cols);
            copy(c, exact);
            multiply_accumulate(exact_sum, a, b, exact);
            multiply_accumulate(plan_[site].accumulation, a, b, c);
            round(site, where, c);
            show(site, where, c, exact);
        } else {
            multiply_accumulate(plan_[site].accumulation, a, b, c);
            round(site, where, c);
        }
    }

    /// An intermediate rounding inside a site: its format, to nearest where the site rounds stochastically, since a
    /// kernel that does so does it once, at the cast.
    void round_intermediate(Site site, MatrixView<double> tile) const {
        const Rule& r = plan_[site];
        if (is_exact(r.format)) return;
        round_rows(r.format, r.rounding == Rounding::stochastic ? Rounding::nearest_even : r.rounding, RandomStream{},
                   tile);
    }
    [[nodiscard]] double round_intermediate(Site site, double x) const {
        const Rule& r = plan_[site];
        return faultline::round(x, r.format, r.rounding == Rounding::stochastic ? Rounding::nearest_even : r.rounding);
    }

    [[nodiscard]] I* instrument() const { return instrument_; }
    [[nodiscard]] std::uint64_t seed() const { return seed_; }
    [[nodiscard]] int layer() const { return layer_; }

    void show([[maybe_unused]] Site site, [[maybe_unused]] TileAt where, [[maybe_unused]] MatrixView<double> value,
              [[maybe_unused]] MatrixView<const double> exact) {
        if constexpr (!std::is_same_v<I, NoInstrument>) {
            where.layer = layer_;
            instrument_->at(site, where, value, exact);
        }
    }

    void round(Site site, TileAt where, MatrixView<double> tile) const {
        const Rule& r = plan_[site];
        if (is_exact(r.format)) return;
        const RandomStream stream =
            r.rounding == Rounding::stochastic ? stochastic_stream(seed_, layer_, site, where) : RandomStream{};
        round_rows(r.format, r.rounding, stream, tile);
    }

  private:
    static void round_rows(const Format& format, Rounding rounding, const RandomStream& stream,
                           MatrixView<double> tile) {
        if (tile.stride == tile.cols) {
            round_bulk(std::span(tile.data, static_cast<std::size_t>(tile.rows * tile.cols)), format, rounding, stream,
                       0);
            return;
        }
        for (std::ptrdiff_t i = 0; i < tile.rows; ++i)
            round_bulk(std::span(tile.row(i), static_cast<std::size_t>(tile.cols)), format, rounding, stream,
                       static_cast<std::uint64_t>(i * tile.cols));
    }

    const RoundingPlan& plan_;
    I* instrument_;
    std::uint64_t seed_;
    int layer_;
    Scratch exact_;
};

}  // namespace faultline::cpu
