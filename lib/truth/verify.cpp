// SPDX-License-Identifier: Apache-2.0
// The sampled verification of a truth against the judge's MPFR loops (the command line's --verify-truth).
#include <algorithm>
#include <functional>
#include <limits>
#include <random>

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
  public:
    Verifier(const TruthProblem& problem, const GroupTruth& truth, int bits, const std::function<bool()>& cancelled)
        : problem_(problem),
          truth_(truth),
          cancelled_(cancelled),
          row_(problem, bits),
          x_(bits),
          size_(64),
          bits_(bits) {}

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
        struct Element {
            std::ptrdiff_t j, c_k, c_v;
            Real dk, dv, dk_size, dv_size;
        };
        std::vector<Element> elements;
        const auto add = [&](std::ptrdiff_t j, std::ptrdiff_t c_k, std::ptrdiff_t c_v) {
            elements.push_back({j, c_k, c_v, Real(bits_), Real(bits_), Real(64), Real(64)});
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
        for (std::size_t h = 0; h < problem_.q.size(); ++h) {
            Real dsink(bits_), dsink_size(64);
            for (std::ptrdiff_t i = 0; i < detail::query_rows(problem_); ++i) {
                if (cancelled()) return;
                row_.compute(problem_, h, i);
                if (!problem_.sink.empty()) detail::add_term(row_.ds.back(), row_.ds_size.back(), 1, dsink, dsink_size);
                for (Element& e : elements) {
                    const auto j = static_cast<std::size_t>(e.j);
                    detail::add_term(row_.dz[j], row_.dz_size[j], problem_.q[h](i, e.c_k), e.dk, e.dk_size);
                    detail::add_term(row_.pd[j], row_.pd[j], problem_.dout[h](i, e.c_v), e.dv, e.dv_size);
                }
            }
            if (!problem_.sink.empty())
                check(dsink, dsink_size, truth_.heads[h].dsink, 0, 0, "head " + std::to_string(h) + " dsink");
        }
        for (Element& e : elements) {
            mpfr_mul(e.dk, e.dk, row_.scale, MPFR_RNDN);
            mpfr_mul(e.dk_size, e.dk_size, row_.scale, MPFR_RNDU);
            mpfr_abs(e.dk_size, e.dk_size, MPFR_RNDU);
            check(e.dk, e.dk_size, truth_.dk, e.j, e.c_k, "dk");
            check(e.dv, e.dv_size, truth_.dv, e.j, e.c_v, "dv");
        }
    }

    [[nodiscard]] TruthVerification result() const { return result_; }

  private:
    [[nodiscard]] bool cancelled() const { return cancelled_ && cancelled_(); }

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
    std::size_t h_ = 0;  // the row in hand
    std::ptrdiff_t i_ = 0;
    std::string name_;
    TruthVerification result_;
};

}  // namespace

TruthVerification verify_truth(const TruthProblem& problem, const GroupTruth& truth, std::size_t sample_count,
                               std::uint64_t seed, int bits, const std::function<bool()>& cancelled) {
    detail::check_problem(problem);
    const detail::ExponentRange range;
    std::mt19937_64 random(seed);  // its sequence is fixed by the C++ standard
    Verifier verifier(problem, truth, bits, cancelled);
    verifier.check_rows(sample_count, random);
    verifier.check_columns(sample_count, random);
    return verifier.result();
}

}  // namespace faultline
