// SPDX-License-Identifier: Apache-2.0
// Causal attention of one head at the speed of matrix products, for training where the plan is the plain one: fp32 state,
// and in bf16 precision bf16 operands of every product, as a FlashAttention-2 without key tiles. The backward recomputes p
// from lse. fast_plan() is the same kernel as a rounding plan, and a test holds the two together.
//
// Sums: products as lib/gemm specifies; the row sum as vector_math.hpp; query blocks of `fast_block` rows in ascending
// order, which dk and dv add up.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include <faultline/cpu/instrument.hpp>
#include <faultline/gpt/cancelled.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline::gpt {

/// Rows of a query block: what is beyond the last one's diagonal is never computed.
inline constexpr std::ptrdiff_t fast_block = 64;

struct FastOptions {
    double scale = 1;                      ///< of q k^T
    double softcap = 0;                    ///< s <- c tanh(s/c) where c > 0 (arXiv 2408.00118)
    bool bf16 = false;                     ///< casts of p, o, ds, dq, dk, dv; inputs are taken as they are
    const Cancelled* cancelled = nullptr;  ///< asked before each query block: PassCancelled
};

/// The kernel as a plan (no softcap): for bf16, or with fp32 everywhere.
[[nodiscard]] RoundingPlan fast_plan(bool bf16);
/// The sites that fast attention shows an instrument. Row sites and tiles are those of a query block: TileAt has its first
/// row, and k_tile = 0. `exact` is the value before the cast, binary64 sums at row_sum, lse and delta, and the value
/// itself at pv_accumulate, dp_accumulate and ds, whose local error is not measured here (the emulated kernel does).
[[nodiscard]] std::span<const Site> fast_sites();
[[nodiscard]] bool is_fast_site(Site site);

/// What a head's forward and backward saw, over one sequence.
struct HeadStatistics {
    double max_logit = -std::numeric_limits<double>::infinity();  ///< largest score after scale and cap
    double zero_sum = 0;      ///< sum over rows of sum_j ds_ij, ds after its cast (before the cap's slope), nat/logit
    double zero_sum_abs = 0;  ///< the same of |ds_ij|
    bool detailed = false;    ///< asks for what follows
    double saturated = 0;     ///< rows with p_max > 1 - 2^-9, of those that see two keys or more
    double entropy = 0;       ///< sum over those rows, nats
    double rows = 0;          ///< how many those are
};

/// Buffers that calls reuse; one for each thread.
template <class T>
struct FastScratch {
    std::vector<T> s, dp, dk, dv, o, rows;
    std::vector<double> shown, shown_exact;
};

/// o [n, d], lse [n] from q, k, v [n, d]. `instrument` may be null.
template <class T>
void fast_forward(MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v, const FastOptions& options,
                  MatrixView<T> o, std::span<T> lse, HeadStatistics& statistics, FastScratch<T>& scratch,
                  Instrument* instrument = nullptr, const TileAt& where = {});

/// dq, dk, dv [n, d] from the forward's o and lse.
template <class T>
void fast_backward(MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v, MatrixView<const T> o,
                   std::span<const T> lse, MatrixView<const T> dout, const FastOptions& options, MatrixView<T> dq,
                   MatrixView<T> dk, MatrixView<T> dv, HeadStatistics& statistics, FastScratch<T>& scratch,
                   Instrument* instrument = nullptr, const TileAt& where = {});

/// The forward's statistics alone, from q and k: for heads whose kernel does not give them.
template <class T>
void head_statistics(MatrixView<const T> q, MatrixView<const T> k, const FastOptions& options,
                     HeadStatistics& statistics, FastScratch<T>& scratch);

}  // namespace faultline::gpt
