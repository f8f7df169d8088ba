// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/fast_attention.hpp>

#include <algorithm>
#include <array>
#include <cmath>

#include <faultline/gemm/gemm.hpp>
#include <faultline/gpt/attention_rows.hpp>
#include <faultline/gpt/row_kernels.hpp>
#include <faultline/probes/saturation.hpp>

namespace faultline::gpt {
namespace {

constexpr std::array shown_sites{Site::row_max, Site::row_sum, Site::p_cast,     Site::pv_accumulate, Site::lse,
                                 Site::o_cast,  Site::delta,   Site::bwd_p_cast, Site::dp_accumulate, Site::ds,
                                 Site::ds_cast, Site::dq_cast, Site::dk_cast,    Site::dv_cast};

template <class T>
MatrixView<T> shaped(std::vector<T>& storage, std::ptrdiff_t rows, std::ptrdiff_t cols) {
    const auto count = static_cast<std::size_t>(rows * cols);
    storage.reserve(count);
    if (storage.size() < count) storage.resize(count);
    return {storage.data(), rows, cols};
}

/// Casts and shows what passes a site of one head.
template <class T>
class Sites {
  public:
    Sites(bool bf16, Instrument* instrument, const TileAt& where, FastScratch<T>& scratch)
        : bf16_(bf16), instrument_(instrument), where_(where), scratch_(scratch) {}

    [[nodiscard]] bool watches(Site site) const { return instrument_ != nullptr && instrument_->watches(site); }

    /// To bf16 where that is the precision; shown with the value before.
    void cast(Site site, std::ptrdiff_t row0, MatrixView<T> value) {
        if (!watches(site)) return round(value);
        const MatrixView<double> exact = shaped(scratch_.shown_exact, value.rows, value.cols);
        copy(MatrixView<const T>(value), exact);
        round(value);
        show(site, row0, value, exact);
    }
    /// Shown with itself as the exact value.
    void pass(Site site, std::ptrdiff_t row0, MatrixView<T> value) {
        if (!watches(site)) return;
        const MatrixView<double> exact = shaped(scratch_.shown_exact, value.rows, value.cols);
        copy(MatrixView<const T>(value), exact);
        show(site, row0, value, exact);
    }
    /// A row quantity; exact(i) its exact value.
    template <class F>
    void pass_rows(Site site, std::ptrdiff_t row0, T* value, std::ptrdiff_t rows, F&& exact) {
        if (!watches(site)) return;
        const MatrixView<double> wanted = shaped(scratch_.shown_exact, rows, 1);
        for (std::ptrdiff_t i = 0; i < rows; ++i) wanted(i, 0) = exact(i);
        show(site, row0, MatrixView<T>(value, rows, 1), wanted);
    }

  private:
    void round(MatrixView<T> value) {
        if constexpr (std::is_same_v<T, float>)
            if (bf16_) round_bf16(value);
    }
    template <class From, class To>
    static void copy(MatrixView<const From> from, MatrixView<To> to) {
        for (std::ptrdiff_t i = 0; i < from.rows; ++i)
            for (std::ptrdiff_t j = 0; j < from.cols; ++j) to(i, j) = static_cast<To>(from(i, j));
    }
    void show(Site site, std::ptrdiff_t row0, MatrixView<T> value, MatrixView<const double> exact) {
        const MatrixView<double> shown = shaped(scratch_.shown, value.rows, value.cols);
        copy(MatrixView<const T>(value), shown);
        TileAt where = where_;
        const bool key_tile = site == Site::dk_cast || site == Site::dv_cast;
        where.query0 = key_tile ? 0 : row0;
        where.q_tile = key_tile ? 0 : static_cast<int>(row0 / fast_block);
        if (info(site).shape == SiteShape::score_tile) where.visible0 = row0 + 1;
        instrument_->at(site, where, shown, exact);
        copy(MatrixView<const double>(shown), value);
    }

    bool bf16_;
    Instrument* instrument_;
    TileAt where_;
    FastScratch<T>& scratch_;
};

template <class T>
void count_details(MatrixView<const T> e, std::ptrdiff_t first, const T* row_sum, HeadStatistics& statistics) {
    for (std::ptrdiff_t i = 0; i < e.rows; ++i) {
        if (first + i == 0) continue;  // one key: p is 1 whatever the scores
        statistics.rows += 1;
        statistics.saturated += 1.0 / static_cast<double>(row_sum[i]) > rounds_to_one ? 1 : 0;
        statistics.entropy -= negative_entropy(e.row(i), first + i + 1, row_sum[i]);
    }
}

}  // namespace

std::span<const Site> fast_sites() { return shown_sites; }
bool is_fast_site(Site site) { return std::ranges::find(shown_sites, site) != shown_sites.end(); }

RoundingPlan fast_plan(bool low) {
    RoundingPlan plan;
    plan.name = low ? "fast-bf16" : "fast-fp32";
    plan.description = "the trainer's own attention: fp32 state, whole rows, p recomputed from lse";
    plan.source = "experiments/gpt/fast_attention.cpp";
    Schedule& s = plan.schedule;
    s.block_q = s.bwd_block_q = static_cast<int>(fast_block);
    s.scale_at = ScaleAt::scores;
    s.exp_base = s.bwd_exp_base = ExpBase::e;
    s.argument = s.bwd_argument = ArgumentForm::subtract_then_scale;
    s.row_sum_order = RowSumOrder::pairwise;  // lanes joined by halves: not the same tree, the same error bound
    s.division = Division::divide;
    s.dq_carry = Carry::chained;
    const Accumulation fma{.kind = Accumulation::Kind::fma};
    const auto set = [&](Site site, Rule rule) { plan.set(site, rule); };
    for (const Site site : {Site::scale, Site::s_scale, Site::exp_argument, Site::exp, Site::o_normalize, Site::lse,
                            Site::bwd_s_scale, Site::bwd_exp_argument, Site::bwd_exp, Site::ds})
        set(site, {.format = fp32});
    for (const Site site : {Site::s_accumulate, Site::pv_accumulate, Site::bwd_s_accumulate, Site::dp_accumulate,
                            Site::dv_accumulate, Site::dk_accumulate, Site::dq_accumulate})
        set(site, {.accumulation = fma});
    set(Site::row_sum, {.format = fp32, .accumulation = {.kind = Accumulation::Kind::pairwise}});
    set(Site::delta, {.format = fp32, .accumulation = fp32_sequential});
    for (const Site site :
         {Site::p_cast, Site::o_cast, Site::bwd_p_cast, Site::ds_cast, Site::dq_cast, Site::dk_cast, Site::dv_cast})
        set(site, {.format = low ? bf16 : fp32});
    return plan;
}

template <class T>
void fast_forward(MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v, const FastOptions& options,
                  MatrixView<T> o, std::span<T> lse, HeadStatistics& statistics, FastScratch<T>& scratch,
                  Instrument* instrument, const TileAt& where) {
    const std::ptrdiff_t n = q.rows;
    Sites<T> sites(options.bf16, instrument, where, scratch);
    const MatrixView<T> rows = shaped(scratch.rows, 2, fast_block);
    T *maximum = rows.row(0), *sum = rows.row(1);
    for (std::ptrdiff_t first = 0; first < n; first += fast_block) {
        expect_not(options.cancelled);
        const std::ptrdiff_t count = std::min(fast_block, n - first), keys = first + count;
        const MatrixView<T> s = shaped(scratch.s, count, keys);
        gemm(Transpose::no, q.middle_rows(first, count), Transpose::yes, k.middle_rows(0, keys), s);
        scale_scores(s, first, static_cast<T>(options.scale), static_cast<T>(options.softcap), maximum);
        for (std::ptrdiff_t i = 0; i < count; ++i)
            statistics.max_logit = std::max(statistics.max_logit, static_cast<double>(maximum[i]));
        sites.pass_rows(Site::row_max, first, maximum, count, [&](auto i) { return static_cast<double>(maximum[i]); });
        exponentials(s, first, maximum, sum);
        if (statistics.detailed) count_details(MatrixView<const T>(s), first, sum, statistics);
        const auto exact_sum_of = [&](std::ptrdiff_t i) {
            double total = 0;
            for (std::ptrdiff_t j = 0; j < keys; ++j) total += static_cast<double>(s(i, j));
            return total;
        };
        sites.pass_rows(Site::row_sum, first, sum, count, exact_sum_of);
        for (std::ptrdiff_t i = 0; i < count; ++i)
            lse[static_cast<std::size_t>(first + i)] = maximum[i] + std::log(sum[i]);
        sites.pass_rows(Site::lse, first, lse.data() + first, count, [&](auto i) {
            return static_cast<double>(maximum[i]) + std::log(static_cast<double>(sum[i]));
        });
        sites.cast(Site::p_cast, first, s);
        const MatrixView<T> out = o.middle_rows(first, count);
        gemm(Transpose::no, MatrixView<const T>(s), Transpose::no, v.middle_rows(0, keys), out);
        sites.pass(Site::pv_accumulate, first, out);
        divide_rows(out, sum);
        sites.cast(Site::o_cast, first, out);
    }
}

template <class T>
void fast_backward(MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v, MatrixView<const T> o,
                   std::span<const T> lse, MatrixView<const T> dout, const FastOptions& options, MatrixView<T> dq,
                   MatrixView<T> dk, MatrixView<T> dv, HeadStatistics& statistics, FastScratch<T>& scratch,
                   Instrument* instrument, const TileAt& where) {
    const std::ptrdiff_t n = q.rows, d = q.cols;
    const T scale = static_cast<T>(options.scale), cap = static_cast<T>(options.softcap);
    Sites<T> sites(options.bf16, instrument, where, scratch);
    const MatrixView<T> rows = shaped(scratch.rows, 2, fast_block);
    T *ignored = rows.row(0), *delta = rows.row(1);
    const MatrixView<T> sum_dk = shaped(scratch.dk, n, d), sum_dv = shaped(scratch.dv, n, d);
    std::fill_n(sum_dk.data, n * d, T(0));
    std::fill_n(sum_dv.data, n * d, T(0));
    std::vector<T> capped;  // scores, kept where the cap's slope needs them
    for (std::ptrdiff_t first = 0; first < n; first += fast_block) {
        expect_not(options.cancelled);
        const std::ptrdiff_t count = std::min(fast_block, n - first), keys = first + count;
        const MatrixView<const T> q_rows = q.middle_rows(first, count), dout_rows = dout.middle_rows(first, count);
        const MatrixView<T> p = shaped(scratch.s, count, keys), dp = shaped(scratch.dp, count, keys);
        gemm(Transpose::no, q_rows, Transpose::yes, k.middle_rows(0, keys), p);
        scale_scores(p, first, scale, cap, ignored);
        if (cap > 0) capped.assign(p.data, p.data + count * keys);
        exponentials(p, first, lse.data() + first, static_cast<T*>(nullptr));
        row_dots(dout_rows, o.middle_rows(first, count), delta);
        sites.pass_rows(Site::delta, first, delta, count, [&](auto i) {
            double total = 0;
            for (std::ptrdiff_t j = 0; j < d; ++j)
                total += static_cast<double>(dout_rows(i, j)) * static_cast<double>(o(first + i, j));
            return total;
        });
        gemm(Transpose::no, dout_rows, Transpose::yes, v.middle_rows(0, keys), dp);
        sites.pass(Site::dp_accumulate, first, dp);
        score_gradient(MatrixView<const T>(p), delta, dp);
        sites.pass(Site::ds, first, dp);
        sites.cast(Site::bwd_p_cast, first, p);
        gemm(Transpose::yes, MatrixView<const T>(p), Transpose::no, dout_rows, sum_dv.middle_rows(0, keys), true);
        if (cap > 0) {
            add_sums(MatrixView<const T>(dp), statistics.zero_sum, statistics.zero_sum_abs);
            through_cap(MatrixView<const T>(capped.data(), count, keys), cap, dp);
        }
        sites.cast(Site::ds_cast, first, dp);
        if (!(cap > 0)) add_sums(MatrixView<const T>(dp), statistics.zero_sum, statistics.zero_sum_abs);
        gemm(Transpose::yes, MatrixView<const T>(dp), Transpose::no, q_rows, sum_dk.middle_rows(0, keys), true);
        const MatrixView<T> out = dq.middle_rows(first, count);
        gemm(Transpose::no, MatrixView<const T>(dp), Transpose::no, k.middle_rows(0, keys), out);
        scaled_copy(MatrixView<const T>(out), scale, out);
        sites.cast(Site::dq_cast, first, out);
    }
    scaled_copy(MatrixView<const T>(sum_dk), scale, dk);
    sites.cast(Site::dk_cast, 0, dk);
    scaled_copy(MatrixView<const T>(sum_dv), T(1), dv);
    sites.cast(Site::dv_cast, 0, dv);
}

template <class T>
void head_statistics(MatrixView<const T> q, MatrixView<const T> k, const FastOptions& options,
                     HeadStatistics& statistics, FastScratch<T>& scratch) {
    const MatrixView<T> rows = shaped(scratch.rows, 2, fast_block);
    T *maximum = rows.row(0), *sum = rows.row(1);
    for (std::ptrdiff_t first = 0; first < q.rows; first += fast_block) {
        const std::ptrdiff_t count = std::min(fast_block, q.rows - first), keys = first + count;
        const MatrixView<T> s = shaped(scratch.s, count, keys);
        gemm(Transpose::no, q.middle_rows(first, count), Transpose::yes, k.middle_rows(0, keys), s);
        scale_scores(s, first, static_cast<T>(options.scale), static_cast<T>(options.softcap), maximum);
        for (std::ptrdiff_t i = 0; i < count; ++i)
            statistics.max_logit = std::max(statistics.max_logit, static_cast<double>(maximum[i]));
        if (!statistics.detailed) continue;
        exponentials(s, first, maximum, sum);
        count_details(MatrixView<const T>(s), first, sum, statistics);
    }
}

template void head_statistics(MatrixView<const float>, MatrixView<const float>, const FastOptions&, HeadStatistics&,
                              FastScratch<float>&);
template void head_statistics(MatrixView<const double>, MatrixView<const double>, const FastOptions&, HeadStatistics&,
                              FastScratch<double>&);
template void fast_forward(MatrixView<const float>, MatrixView<const float>, MatrixView<const float>,
                           const FastOptions&, MatrixView<float>, std::span<float>, HeadStatistics&,
                           FastScratch<float>&, Instrument*, const TileAt&);
template void fast_forward(MatrixView<const double>, MatrixView<const double>, MatrixView<const double>,
                           const FastOptions&, MatrixView<double>, std::span<double>, HeadStatistics&,
                           FastScratch<double>&, Instrument*, const TileAt&);
template void fast_backward(MatrixView<const float>, MatrixView<const float>, MatrixView<const float>,
                            MatrixView<const float>, std::span<const float>, MatrixView<const float>,
                            const FastOptions&, MatrixView<float>, MatrixView<float>, MatrixView<float>,
                            HeadStatistics&, FastScratch<float>&, Instrument*, const TileAt&);
template void fast_backward(MatrixView<const double>, MatrixView<const double>, MatrixView<const double>,
                            MatrixView<const double>, std::span<const double>, MatrixView<const double>,
                            const FastOptions&, MatrixView<double>, MatrixView<double>, MatrixView<double>,
                            HeadStatistics&, FastScratch<double>&, Instrument*, const TileAt&);

}  // namespace faultline::gpt
