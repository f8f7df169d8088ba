// SPDX-License-Identifier: Apache-2.0
// The emulation of a plan as it runs on a CUDA device, and on the host to be tested there: what a block of threads does
// together, and how one element passes a site. The meaning is that of kernels/cpu, which the tests hold it to, bit for bit;
// rounding, formats, matrix units, random numbers, tiles and the plan itself are the same headers in both.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <faultline/base/host_device.hpp>
#include <faultline/cpu/tiles.hpp>
#include <faultline/format/format.hpp>
#include <faultline/format/stochastic_bits.hpp>
#include <faultline/plan/rule.hpp>
#include <faultline/plan/schedule.hpp>
#include <faultline/plan/site.hpp>

namespace faultline::emulated {

/// A plan without its names: what is copied to a device.
struct FlatPlan {
    Schedule schedule;
    Rule rules[site_count];

    [[nodiscard]] FAULTLINE_HD const Rule& operator[](Site site) const { return rules[static_cast<std::size_t>(site)]; }
};
static_assert(std::is_trivially_copyable_v<FlatPlan>);

/// A row-major matrix, MatrixView for both sides.
template <class T>
struct View {
    T* data = nullptr;
    std::ptrdiff_t rows = 0, cols = 0, stride = 0;

    [[nodiscard]] FAULTLINE_HD T& operator()(std::ptrdiff_t i, std::ptrdiff_t j) const { return data[i * stride + j]; }
    [[nodiscard]] FAULTLINE_HD T* row(std::ptrdiff_t i) const { return data + i * stride; }
};

/// Where a tile stands, as far as stochastic rounding asks (TileAt of kernels/cpu/instrument.hpp).
struct Place {
    int head = 0;
    std::ptrdiff_t query0 = 0, key0 = 0;
    int part = 0;
};

/// One thread that is the whole block: the host's team. A device's has the block's threads and __syncthreads.
struct SerialTeam {
    [[nodiscard]] std::ptrdiff_t rank() const { return 0; }
    [[nodiscard]] std::ptrdiff_t size() const { return 1; }
    void sync() const {}
};

/// f(i, j) for every element, over the team's threads; on return every thread sees what all have written.
template <class Team, class F>
FAULTLINE_HD void each(const Team& team, std::ptrdiff_t rows, std::ptrdiff_t cols, F&& f) {
    for (std::ptrdiff_t at = team.rank(); at < rows * cols; at += team.size()) f(at / cols, at % cols);
    team.sync();
}
/// f(i) for every row.
template <class Team, class F>
FAULTLINE_HD void each_row(const Team& team, std::ptrdiff_t rows, F&& f) {
    for (std::ptrdiff_t i = team.rank(); i < rows; i += team.size()) f(i);
    team.sync();
}

FAULTLINE_HD inline double to_float(double x) { return static_cast<double>(static_cast<float>(x)); }
FAULTLINE_HD inline bool is_float(double x) { return to_float(x) == x; }
FAULTLINE_HD constexpr double infinity() { return detail::bits_as<double>(detail::infinity64); }

// As functions, since device code cannot take the address of a constant of the host: exact_sum, fp32_sequential, and
// whether a format is fp32.
FAULTLINE_HD constexpr Accumulation exact_order() { return {}; }
FAULTLINE_HD constexpr Accumulation fp32_order() { return {.kind = Accumulation::Kind::sequential}; }
FAULTLINE_HD constexpr bool is_fp32(const Format& format) {
    return format == Format{.precision = 24, .emin = -126, .emax = 127};
}

/// How values pass the sites of one call. The counters of stochastic rounding are an element's place in its tile.
struct Sites {
    const FlatPlan& plan;
    std::uint64_t seed;
    int layer;

    [[nodiscard]] FAULTLINE_HD bool is_exact_rule(Site site) const {
        return is_exact(plan[site].format) && plan[site].accumulation.kind == Accumulation::Kind::exact;
    }
    [[nodiscard]] FAULTLINE_HD_CALLED double rounded(Site site, const Place& at, std::ptrdiff_t counter,
                                                     double x) const {
        const Rule& rule = plan[site];
        if (is_exact(rule.format)) return x;
        if (rule.rounding != Rounding::stochastic) return faultline::round(x, rule.format, rule.rounding);
        const RandomStream stream(seed, static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(at.head),
                                  static_cast<std::size_t>(site),
                                  (static_cast<std::uint64_t>(at.query0) << 32) | static_cast<std::uint64_t>(at.key0),
                                  static_cast<std::uint64_t>(at.part));
        return faultline::round(x, rule.format, Rounding::stochastic,
                                stochastic_bits(stream, static_cast<std::uint64_t>(counter)));
    }
    /// Stage::round_intermediate: to nearest where the site rounds stochastically.
    [[nodiscard]] FAULTLINE_HD_CALLED double intermediate(Site site, double x) const {
        const Rule& rule = plan[site];
        return faultline::round(x, rule.format,
                                rule.rounding == Rounding::stochastic ? Rounding::nearest_even : rule.rounding);
    }
    /// Stage::pass of an operation in several roundings, for one element.
    template <class Kernel, class Exact>
    [[nodiscard]] FAULTLINE_HD double pass(Site site, const Place& at, std::ptrdiff_t counter, Kernel&& in_kernel,
                                           Exact&& exactly) const {
        if (is_exact_rule(site)) return exactly();
        return rounded(site, at, counter, in_kernel());
    }
};

}  // namespace faultline::emulated
