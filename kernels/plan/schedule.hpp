// SPDX-License-Identifier: Apache-2.0
// The shape of a kernel: tiles, order, and the algebraic form of each step. In exact arithmetic every setting here gives
// the same result; which roundings there are to make depends on it.
#pragma once

#include <faultline/base/host_device.hpp>

namespace faultline {

enum class Order : unsigned char { ascending, descending };

/// Where scale = 1/sqrt(head_dim) is multiplied in.
enum class ScaleAt : unsigned char {
    exponent,  ///< inside the exponent: exp2(s*c - m*c), c = scale*log2(e) (FlashAttention-2 and later)
    scores,    ///< s <- scale*s before the maximum is taken (standard attention, arXiv 2510.04212's code)
    inputs,    ///< q and k times sqrt(scale) each, before the product (PyTorch's math path)
};

enum class ExpBase : unsigned char { two, e };

/// What computes exp2 and the logarithm of the row sum.
enum class Functions : unsigned char {
    correctly_rounded,  ///< binary64 functions, rounded once to the site's format
    hopper,             ///< ex2.approx.f32 and lg2.approx.f32 as a Hopper card has them, bit for bit (lib/special)
};

/// How scale (s - m) is computed where the scale stands in the exponent.
enum class ArgumentForm : unsigned char {
    fused,                ///< fma(s, c, -round(m*c)): exact product minus rounded product, so s = m does not give 0
    unfused,              ///< round(s*c) - round(m*c): s = m gives 0 (UNFUSE_FMA of FlashAttention-2)
    subtract_then_scale,  ///< (s - m)*c
};

/// How the running maximum follows the true one.
enum class MaxPolicy : unsigned char {
    exact,
    lazy,    ///< keep the old maximum while it moves by less than max_threshold log2 units (FlashAttention-4)
    stable,  ///< Algorithm 1 of arXiv 2510.04212: repeated maxima are shifted by beta
};

/// What the row sum adds: p before or after its cast; `two_sums` keeps both, rounded for the output, unrounded for lse.
enum class RowSumAdds : unsigned char { unrounded, rounded, two_sums };

/// In which order the row sum adds the columns.
enum class RowSumOrder : unsigned char {
    sequential,
    pairwise,
    quad,  ///< four partial sums over columns 8j+2t, 8j+2t+1 (t = 0..3: an mma fragment), joined as (0+2)+(1+3) at the end;
           ///< the rescale of the running sum and the tile's first term are one fma, as nvcc contracts FlashAttention-2
    warp_of_32,  ///< within 32 columns four such sums from zero, joined as (0+1)+(2+3), then added to the running sum
                 ///< (PyTorch's memory-efficient attention)
    mod_8,  ///< a tile's columns in eight sums from zero, by column mod 8, joined as neighbours, then (0+2)+(1+3); the
            ///< running sum's rescale and the addition of the tile's sum are one fma (ThunderKittens' row_reduce)
};

/// Where p is divided by the row sum.
enum class Normalize : unsigned char {
    after_pv,   ///< once, on the output (FlashAttention-2)
    before_pv,  ///< on p, before P V; needs one key tile (standard attention)
    each_tile,  ///< the output is kept normalised from tile to tile, and the running statistic is lse (FlashAttention-1)
};

/// How the output is divided by the row sum.
enum class Division : unsigned char { divide, reciprocal };

/// How a sum continues from one tile to the next.
enum class Carry : unsigned char {
    chained,  ///< the accumulator of the matrix unit starts from the running value
    added,    ///< each tile is summed from zero, then added in the site's format
};

/// What delta is made of.
enum class DeltaFrom : unsigned char {
    o,            ///< rowsum(dO o O), O as stored
    o_unrounded,  ///< rowsum(dO o O), O before its cast
    p_dp,         ///< rowsum(P o dP) of the backward's own dP and the P that ds is made of (ds_p)
    p_dp_normalized,  ///< the same over rowsum(P): the delta for which the scores' gradient sums to zero, whatever lse's error
};

/// Where dk and dv of the query heads that share a key head are summed.
enum class GroupReduce : unsigned char {
    after_cast,   ///< each query head's dk is stored in the output format, then summed (FlashAttention-2)
    before_cast,  ///< summed in working precision, then cast (FlashAttention-3)
};

/// Whether delta is known only after dp.
FAULTLINE_HD constexpr bool needs_dp(DeltaFrom from) {
    return from == DeltaFrom::p_dp || from == DeltaFrom::p_dp_normalized;
}

/// Where delta is subtracted from dp.
enum class DeltaIn : unsigned char {
    difference,   ///< ds = p (dp - delta), the difference rounded
    accumulator,  ///< the accumulator of dO V^T starts at -delta (FlashAttention-1)
};

/// Where lse is subtracted from the score that the backward recomputes.
enum class LseIn : unsigned char {
    argument,     ///< in the exponent's argument, as bwd_argument says
    accumulator,  ///< the accumulator of q k^T starts at -lse/scale, so that the sum is s - lse/scale, which is then
    ///< multiplied (ThunderKittens); its bits are those of the matrix unit at the size of lse/scale. Under a
    ///< softcap, which lies between that sum and the logit, it is subtracted in the argument
};

/// In which order delta's dot product adds the head's columns.
enum class DeltaOrder : unsigned char {
    sequential,
    octets,  ///< delta_threads threads take eight columns each in turn, each adds its own in order; joined by a tree over
             ///< thread xor half, …, 2, 1 (FlashAttention-2: eight threads)
    octet_pairs,  ///< the same, but two products are added to each other before they are added to the thread's sum (cuDNN)
    mod_8,  ///< eight sums by column mod 8, each product added by one fma; joined as RowSumOrder::mod_8 (ThunderKittens)
};

/// How lse is made of the maximum and the row sum, where the scale stands in the exponent.
enum class LseForm : unsigned char {
    natural,   ///< fma(max, scale, log(sum)) (FlashAttention-2)
    log2,      ///< fma(round(max scale log2(e)), ln 2, log(sum)): the maximum as the exponent subtracts it (cuDNN)
    log2_sum,  ///< fma(log2(sum), ln 2, round(round(max scale log2(e)) ln 2)): the logarithm's factor in the fma instead
               ///< (ThunderKittens, as nvcc contracts it)
};

/// Which p the score gradient p (dp - delta) is made of.
enum class DsP : unsigned char {
    unrounded,  ///< p in working precision (FlashAttention-2/3)
    cast,       ///< p after bwd_p_cast (PyTorch's memory-efficient attention)
};

/// Where the score gradient is scaled.
enum class DsScale : unsigned char {
    after,       ///< dq and dk are scaled after the sum (FlashAttention-2/3)
    before,      ///< ds is scaled before its cast (ThunderKittens, arXiv 2510.04212's code)
    after_cast,  ///< the cast ds is scaled and rounded again (autograd of standard attention; cudnn-frontend issue 1046)
};

/// Zero-sum projections of the cast score gradient: sum_j ds_ij = 0 in exact arithmetic, and the cast breaks it.
/// Our readings of "project so that the sum is 0"; r_i = sum_j ds_ij after the cast.
enum class ZeroSum : unsigned char {
    none,
    uniform,  ///< dq_i -= scale r_i mean_j(k_j), dk_j -= scale sum_i (r_i/n_i) q_i, over visible keys, after the products
    weighted,  ///< the same with weights p_ij / sum_j p_ij in place of 1/n_i
    largest,   ///< -r_i is put on the element of largest magnitude, which is then kept in fp32
};

struct Schedule {
    int block_q = 0;  ///< rows of a query tile; 0 = the whole sequence
    int block_k = 0;  ///< keys of a key tile; 0 = the whole sequence
    Order key_order = Order::ascending;
    int key_splits =
        1;  ///< the keys are cut in so many runs of tiles, each with its own softmax, merged by lse (split-KV, ring)
    int bwd_block_q = 0;
    int bwd_block_k = 0;
    Order bwd_query_order = Order::ascending;  ///< in which dk and dv are summed
    Order bwd_key_order = Order::ascending;    ///< in which dq is summed across key tiles

    ScaleAt scale_at = ScaleAt::exponent;
    ExpBase exp_base =
        ExpBase::two;  ///< with scale_at = scores, base two has the scores in log2 units: scaled, then times log2(e)
    ExpBase bwd_exp_base = ExpBase::two;
    Functions functions = Functions::correctly_rounded;
    /// Of every so many columns of a forward tile the last exp_poly_count take exp2 by a polynomial of degree 3
    /// (special/ex2_polynomial.hpp) in place of `functions`; 0: none. Within fragments of 32 columns, in pairs; the first
    /// exp_poly_skip fragments of a tile and its last one have none (FlashAttention-4, flash_attn/cute/softmax.py,
    /// apply_exp2_convert: ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg).
    int exp_poly_every = 0;
    int exp_poly_count = 4;
    int exp_poly_skip = 1;
    ArgumentForm argument = ArgumentForm::fused;
    ArgumentForm bwd_argument = ArgumentForm::fused;
    LseIn lse_in = LseIn::argument;
    /// How scale (m_old - m_new) is computed, which rescales row sum and output when the maximum moves.
    ArgumentForm rescale_argument = ArgumentForm::subtract_then_scale;
    MaxPolicy max_policy = MaxPolicy::exact;
    bool sink_in_max =
        true;  ///< the running maximum starts at the sink's logit (gpt-oss); false: it is that of the keys,
               ///< and a sink far above them overflows (FlashAttention-4)
    double max_threshold = 8;        ///< log2 units, for `lazy`
    double max_offset = 0;           ///< added to the exponent in log2 units (8 in FlashAttention-3 fp8)
    double stable_beta = 7;          ///< for `stable`
    double stable_tolerance = 1e-3;  ///< logits this close to the maximum count as repeated, for `stable`
    RowSumAdds row_sum_adds = RowSumAdds::unrounded;
    RowSumOrder row_sum_order = RowSumOrder::sequential;
    Normalize normalize = Normalize::after_pv;
    Division division = Division::reciprocal;
    LseForm lse_form = LseForm::natural;
    Carry pv_carry = Carry::chained;
    Carry dq_carry = Carry::added;
    Carry dkv_carry = Carry::chained;
    bool p_saved =
        false;  ///< the backward reads the forward's normalised p, before its cast, in place of recomputing it
    DeltaFrom delta_from = DeltaFrom::o;
    DeltaOrder delta_order = DeltaOrder::sequential;
    int delta_threads = 8;  ///< a power of two, for `octets`
    DeltaIn delta_in = DeltaIn::difference;
    DsP ds_p = DsP::unrounded;
    DsScale ds_scale = DsScale::after;
    GroupReduce group_reduce = GroupReduce::after_cast;

    // Corrections that are an extra step.
    ZeroSum zero_sum = ZeroSum::none;
    bool key_centering = false;  ///< dq = ds (k - mean k), k - mean k cast like k

    friend bool operator==(const Schedule&, const Schedule&) = default;
};

}  // namespace faultline
