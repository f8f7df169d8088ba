// SPDX-License-Identifier: Apache-2.0
// The sampled verification of a truth against the judge's MPFR loops (the command line's --verify-truth).
#include <algorithm>
#include <functional>
#include <limits>
#include <random>

#include <faultline/base/parallel.hpp>
#include <faultline/truth/judge.hpp>
#include <faultline/truth/problem.hpp>

namespace faultline {
namespace {

using detail::JudgedRow;
using detail::Real;

/// |exact - element| / (bound + noise), noise being what `exact` itself may be off by; 0/0 = 0 and x/0 = infinity.
double error_ratio(const Real& exact, const Real& size, const CertifiedMatrix& m, std::size_t at) {
    const mpfr_prec_t bits = mpfr_get_prec(static_cast<mpfr_srcptr>(exact));
    Real difference(bits + 64);
    mpfr_set_d(difference, m.value[at], MPFR_RNDN);
    mpfr_mul_2si(difference, difference, static_cast<long>(m.exponent[at]), MPFR_RNDN);
    mpfr_sub(difference, exact, difference, MPFR_RNDN);
    if (mpfr_zero_p(static_cast<mpfr_srcptr>(difference))) return 0;
    Real noise(64);
    mpfr_set(noise, size, MPFR_RNDU);
    detail::to_noise(noise, bits);
    Real bound(bits + 64);
    mpfr_set_d(bound, m.bound[at], MPFR_RNDN);
    mpfr_mul_2si(bound, bound, static_cast<long>(m.exponent[at]), MPFR_RNDN);
    mpfr_add(bound, bound, noise, MPFR_RNDU);
    mpfr_div(difference, difference, bound, MPFR_RNDA);
    mpfr_abs(difference, difference, MPFR_RNDN);
    return mpfr_get_d(difference, MPFR_RNDU);
}

class Verifier {
    struct Element {
        std::ptrdiff_t j, c_k, c_v;
    };
    struct Sum {
        Real value, size;
    };
    using Sums = std::vector<Sum>;  // dk and dv of each element, then dsink of each head

  public:
    Verifier(const TruthProblem& problem, const GroupTruth& truth, int bits, int threads,
             const std::function<bool()>& cancelled)
        : problem_(problem),
          truth_(truth),
          cancelled_(cancelled),
          row_(problem, bits),
          x_(bits),
          size_(64),
          bits_(bits),
          threads_(threads) {}

    void check(const Real& exact, const Real& size, const CertifiedMatrix& m, std::ptrdiff_t i, std::ptrdiff_t c,
               const std::string& name) {
        const double ratio = error_ratio(exact, size, m, m.index(i, c));
        ++result_.checked;
        if (!(ratio <= 1)) ++result_.outside;
        if (!(ratio <= result_.worst_ratio)) {
            result_.worst_ratio = ratio;
            result_.worst = name + "[" + std::to_string(i) + ", " + std::to_string(c) + "]";
        }
    }

    /// `count` elements of o and dq each (a few per row), and the lse and delta of those rows.
    void check_rows(std::size_t count, std::mt19937_64& random) {
        constexpr std::size_t per_row = 8;
        const std::size_t rows = static_cast<std::size_t>(detail::query_rows(problem_)) * problem_.q.size();
        if (rows == 0) return;
        const auto widest = static_cast<std::size_t>(std::max(problem_.v.cols, problem_.k.cols));
        if (count / widest >= rows) {
            for (std::size_t row = 0; row < rows && !cancelled(); ++row) {
                begin_row(row);
                for (std::ptrdiff_t c = 0; c < problem_.v.cols; ++c) check_output(c);
                for (std::ptrdiff_t c = 0; c < problem_.k.cols; ++c) check_query_gradient(c);
            }
            return;
        }
        for (std::size_t done = 0; done < count && !cancelled(); done += per_row) {
            begin_row(random() % rows);
            for (std::size_t n = 0; n < std::min(per_row, count - done); ++n) {
                check_output(static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.v.cols)));
                check_query_gradient(static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.k.cols)));
            }
        }
    }

    /// `count` elements of dk and dv each, and dsink.
    void check_columns(std::size_t count, std::mt19937_64& random) {
        const auto n_k = static_cast<std::size_t>(problem_.k.rows);
        if ((n_k == 0 && problem_.sink.empty()) || count == 0) return;
        std::vector<Element> elements;
        const auto add = [&](std::ptrdiff_t j, std::ptrdiff_t c_k, std::ptrdiff_t c_v) {
            elements.push_back({j, c_k, c_v});
        };
        const std::ptrdiff_t widest = std::max(problem_.v.cols, problem_.k.cols);
        if (count / static_cast<std::size_t>(widest) >= n_k) {
            // The narrower of the two has its last column again in place of those that it has not.
            for (std::ptrdiff_t j = 0; j < problem_.k.rows; ++j)
                for (std::ptrdiff_t c = 0; c < widest; ++c)
                    add(j, std::min(c, problem_.k.cols - 1), std::min(c, problem_.v.cols - 1));
        } else if (n_k > 0) {
            for (std::size_t n = 0; n < count; ++n) {
                const auto j = static_cast<std::ptrdiff_t>(random() % n_k);
                const auto c_k = static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.k.cols));
                add(j, c_k, static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.v.cols)));
            }
        }
        if (cancelled()) return;
        // Each part has every 16th row and sums of its own, added in order: nothing depends on the number of threads.
        constexpr std::size_t most_parts = 16;
        const auto rows = static_cast<std::size_t>(detail::query_rows(problem_)) * problem_.q.size();
        const std::size_t parts = std::clamp<std::size_t>(rows, 1, most_parts);
        std::vector<Sums> sums(parts);
        parallel_for(parts, threads_, [&](std::size_t part) {
            const detail::ExponentRange range;
            sums[part] = column_sums(elements, part, parts, rows);
        });
        if (cancelled()) return;
        Sums& all = sums.front();
        for (std::size_t part = 1; part < parts; ++part)
            for (std::size_t n = 0; n < all.size(); ++n)
                detail::add_term(sums[part][n].value, sums[part][n].size, 1, all[n].value, all[n].size);
        for (std::size_t n = 0; n < elements.size(); ++n) {
            const Element& e = elements[n];
            Sum& dk = all[2 * n];
            mpfr_mul(dk.value, dk.value, row_.scale, MPFR_RNDN);
            mpfr_mul(dk.size, dk.size, row_.scale, MPFR_RNDU);
            mpfr_abs(dk.size, dk.size, MPFR_RNDU);
            check(dk.value, dk.size, truth_.dk, e.j, e.c_k, "dk");
            check(all[2 * n + 1].value, all[2 * n + 1].size, truth_.dv, e.j, e.c_v, "dv");
        }
        for (std::size_t h = 0; h < problem_.sink.size(); ++h) {
            const Sum& dsink = all[2 * elements.size() + h];
            check(dsink.value, dsink.size, truth_.heads[h].dsink, 0, 0, "head " + std::to_string(h) + " dsink");
        }
    }

    [[nodiscard]] TruthVerification result() const { return result_; }

  private:
    [[nodiscard]] bool cancelled() const { return cancelled_ && cancelled_(); }

    /// What rows part, part + parts, … of all heads' rows give. Those that see none of the keys are passed over.
    [[nodiscard]] Sums column_sums(const std::vector<Element>& elements, std::size_t part, std::size_t parts,
                                   std::size_t rows) const {
        Sums sums;
        for (std::size_t n = 0; n < 2 * elements.size() + problem_.sink.size(); ++n)
            sums.push_back({Real(bits_), Real(64)});
        JudgedRow row(problem_, bits_, row_);
        for (std::size_t number = part; number < rows && !cancelled(); number += parts) {
            const std::size_t h = number % problem_.q.size();
            const auto i = static_cast<std::ptrdiff_t>(number / problem_.q.size());
            const bool seen = !problem_.sink.empty() ||
                              std::any_of(elements.begin(), elements.end(),
                                          [&](const Element& e) { return detail::visible(problem_, h, i, e.j); });
            if (!seen) continue;
            row.compute(problem_, h, i);
            for (std::size_t n = 0; n < elements.size(); ++n) {
                const Element& e = elements[n];
                const auto j = static_cast<std::size_t>(e.j);
                Sum& dk = sums[2 * n];
                Sum& dv = sums[2 * n + 1];
                detail::add_term(row.dz[j], row.dz_size[j], problem_.q[h](i, e.c_k), dk.value, dk.size);
                detail::add_term(row.pd[j], row.pd[j], problem_.dout[h](i, e.c_v), dv.value, dv.size);
            }
            if (problem_.sink.empty()) continue;
            Sum& dsink = sums[2 * elements.size() + h];
            detail::add_term(row.ds.back(), row.ds_size.back(), 1, dsink.value, dsink.size);
        }
        return sums;
    }

    /// Computes row `number` of all heads' rows and checks what it has one of.
    void begin_row(std::size_t number) {
        h_ = number % problem_.q.size();
        i_ = static_cast<std::ptrdiff_t>(number / problem_.q.size());
        name_ = "head " + std::to_string(h_) + " ";
        row_.compute(problem_, h_, i_);
        if (!row_.empty) check(row_.lse, row_.lse_size, truth_.heads[h_].lse, i_, 0, name_ + "lse");
        check(row_.delta, row_.delta_size, truth_.heads[h_].delta, i_, 0, name_ + "delta");
    }
    void check_output(std::ptrdiff_t c) {
        row_.output(problem_, c, x_, size_);
        check(x_, size_, truth_.heads[h_].o, i_, c, name_ + "o");
    }
    void check_query_gradient(std::ptrdiff_t c) {
        row_.query_gradient(problem_, c, x_, size_);
        check(x_, size_, truth_.heads[h_].dq, i_, c, name_ + "dq");
    }

    const TruthProblem& problem_;
    const GroupTruth& truth_;
    const std::function<bool()>& cancelled_;
    JudgedRow row_;
    Real x_, size_;
    int bits_;
    int threads_;
    std::size_t h_ = 0;  // the row in hand
    std::ptrdiff_t i_ = 0;
    std::string name_;
    TruthVerification result_;
};

}  // namespace

TruthVerification verify_truth(const TruthProblem& problem, const GroupTruth& truth, std::size_t sample_count,
                               std::uint64_t seed, int bits, const std::function<bool()>& cancelled, int threads) {
    detail::check_problem(problem);
    const detail::ExponentRange range;
    std::mt19937_64 random(seed);  // its sequence is fixed by the C++ standard
    Verifier verifier(problem, truth, bits, threads, cancelled);
    verifier.check_rows(sample_count, random);
    verifier.check_columns(sample_count, random);
    return verifier.result();
}

}  // namespace faultline
