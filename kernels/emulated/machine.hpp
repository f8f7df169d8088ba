// SPDX-License-Identifier: Apache-2.0
// The emulation of a plan as it runs on a CUDA device, and on the host to be tested there: what a block of threads does
// together. The meaning is that of kernels/cpu, which the tests hold it to, bit for bit; rounding, formats, matrix units,
// random numbers, tiles and the plan itself are the same headers in both.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <faultline/base/host_device.hpp>
#include <faultline/cpu/tiles.hpp>
#include <faultline/format/format.hpp>
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
    /// Its memory as so many rows and columns, one row behind the other.
    [[nodiscard]] FAULTLINE_HD View shaped(std::ptrdiff_t r, std::ptrdiff_t c) const { return {data, r, c, c}; }
    /// Other memory in its shape.
    [[nodiscard]] FAULTLINE_HD View shaped_in(T* memory) const { return {memory, rows, cols, cols}; }
    /// Part of it.
    [[nodiscard]] FAULTLINE_HD View part(std::ptrdiff_t i, std::ptrdiff_t j, std::ptrdiff_t r, std::ptrdiff_t c) const {
        return {data + i * stride + j, r, c, stride};
    }
};
/// Numbers of rows as a matrix of one column.
FAULTLINE_HD inline View<double> column(double* x, std::ptrdiff_t rows) { return {x, rows, 1, 1}; }

/// One thread that is the whole block: the host's team. A device's has the block's threads and __syncthreads, and memory that
/// they share on the multiprocessor.
struct SerialTeam {
    static constexpr int lanes = 1;  ///< size(), as a constant
    void* memory = nullptr;          ///< shared(): product::staging_bytes of it where a job multiplies matrices
    [[nodiscard]] void* shared() const { return memory; }
    [[nodiscard]] std::ptrdiff_t rank() const { return 0; }
    [[nodiscard]] std::ptrdiff_t size() const { return 1; }
    void sync() const {}
};

/// f(i, j) for every element, over the team's threads, neighbours taking neighbours; on return every thread sees what all
/// have written.
template <class Team, class F>
FAULTLINE_HD void each(const Team& team, std::ptrdiff_t rows, std::ptrdiff_t cols, F&& f) {
    if (cols > 0) {  // one division a call, not two an element
        std::ptrdiff_t i = team.rank() / cols, j = team.rank() % cols;
        const std::ptrdiff_t down = team.size() / cols, right = team.size() % cols;
        while (i < rows) {
            f(i, j);
            i += down;
            j += right;
            if (j >= cols) {
                j -= cols;
                ++i;
            }
        }
    }
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
// whether a format is one of those.
FAULTLINE_HD constexpr Accumulation exact_order() { return {}; }
FAULTLINE_HD constexpr Accumulation fp32_order() { return {.kind = Accumulation::Kind::sequential}; }
FAULTLINE_HD constexpr bool is_fp32(const Format& format) {
    return format == Format{.precision = 24, .emin = -126, .emax = 127};
}

}  // namespace faultline::emulated
