// SPDX-License-Identifier: Apache-2.0
// The sampled verification of a truth against the judge's MPFR loops (the command line's --verify-truth).
#include <algorithm>
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
    Verifier(const TruthProblem& problem, const GroupTruth& truth, int bits)
        : problem_(problem), truth_(truth), row_(problem, bits), x_(bits), size_(64), bits_(bits) {}

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
        for (std::size_t done = 0; done < count; done += per_row) {
            const std::size_t pick = random() % rows;
            const std::size_t h = pick % problem_.q.size();
            const auto i = static_cast<std::ptrdiff_t>(pick / problem_.q.size());
            const HeadTruth& head = truth_.heads[h];
            const std::string name = "head " + std::to_string(h) + " ";
            row_.compute(problem_, h, i);
            if (!row_.empty) check(row_.lse, row_.lse_size, head.lse, i, 0, name + "lse");
            check(row_.delta, row_.delta_size, head.delta, i, 0, name + "delta");
            for (std::size_t n = 0; n < std::min(per_row, count - done); ++n) {
                auto c = static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.v.cols));
                row_.output(problem_, c, x_, size_);
                check(x_, size_, head.o, i, c, name + "o");
                c = static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.k.cols));
                row_.query_gradient(problem_, c, x_, size_);
                check(x_, size_, head.dq, i, c, name + "dq");
            }
        }
    }

    /// `count` elements of dk and dv each.
    void check_columns(std::size_t count, std::mt19937_64& random) {
        const auto n_k = static_cast<std::size_t>(problem_.k.rows);
        if (n_k == 0 || count == 0) return;
        struct Element {
            std::ptrdiff_t j, c_k, c_v;
            Real dk, dv, dk_size, dv_size;
        };
        std::vector<Element> elements;
        for (std::size_t n = 0; n < count; ++n)
            elements.push_back({static_cast<std::ptrdiff_t>(random() % n_k),
                                static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.k.cols)),
                                static_cast<std::ptrdiff_t>(random() % static_cast<std::size_t>(problem_.v.cols)),
                                Real(bits_), Real(bits_), Real(64), Real(64)});
        for (std::size_t h = 0; h < problem_.q.size(); ++h)
            for (std::ptrdiff_t i = 0; i < detail::query_rows(problem_); ++i) {
                row_.compute(problem_, h, i);
                for (Element& e : elements) {
                    const auto j = static_cast<std::size_t>(e.j);
                    detail::add_term(row_.ds[j], row_.ds_size[j], problem_.q[h](i, e.c_k), e.dk, e.dk_size);
                    detail::add_term(row_.p[j], row_.p[j], problem_.dout[h](i, e.c_v), e.dv, e.dv_size);
                }
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
    const TruthProblem& problem_;
    const GroupTruth& truth_;
    JudgedRow row_;
    Real x_, size_;
    int bits_;
    TruthVerification result_;
};

}  // namespace

TruthVerification verify_truth(const TruthProblem& problem, const GroupTruth& truth, std::size_t sample_count,
                               std::uint64_t seed, int bits) {
    detail::check_problem(problem);
    const detail::ExponentRange range;
    std::mt19937_64 random(seed);  // its sequence is fixed by the C++ standard
    Verifier verifier(problem, truth, bits);
    verifier.check_rows(sample_count, random);
    verifier.check_columns(sample_count, random);
    return verifier.result();
}

}  // namespace faultline
