// SPDX-License-Identifier: Apache-2.0
// mpfr_t with a lifetime. MPFR is called directly, not through Boost.Multiprecision: precision in bits, the rounding
// direction of each operation and the inexact flag are what the judge and the slow path are made of.
#pragma once

#include <utility>

#include <mpfr.h>

namespace faultline::detail {

/// MPFR caches constants (log 2, pi) for each thread and leaves it to the thread to free them: done at the end of every
/// thread that held a Real.
struct ThreadCache {
    ThreadCache() = default;
    ThreadCache(const ThreadCache&) = delete;
    ThreadCache& operator=(const ThreadCache&) = delete;
    ~ThreadCache() { mpfr_free_cache2(MPFR_FREE_LOCAL_CACHE); }
};

/// An mpfr_t of a fixed precision in bits; 0 at first.
class Real {
  public:
    explicit Real(mpfr_prec_t bits) {
        static thread_local ThreadCache freed_at_the_end;
        (void)freed_at_the_end;
        mpfr_init2(x_, bits);
        mpfr_set_zero(x_, 1);
    }
    Real(const Real& other) {
        mpfr_init2(x_, mpfr_get_prec(other.x_));
        mpfr_set(x_, other.x_, MPFR_RNDN);
    }
    Real(Real&& other) noexcept {
        mpfr_init2(x_, MPFR_PREC_MIN);
        mpfr_swap(x_, other.x_);
    }
    /// Takes the precision along.
    Real& operator=(Real other) noexcept {
        mpfr_swap(x_, other.x_);
        return *this;
    }
    ~Real() { mpfr_clear(x_); }

    operator mpfr_ptr() { return x_; }
    operator mpfr_srcptr() const { return x_; }

  private:
    mpfr_t x_;
};

/// While it lives, this thread's MPFR exponents have their full range (2^62): the default stops at 2^(-2^30), and a
/// probability of e^(-10^9) lies below.
class ExponentRange {
  public:
    ExponentRange() : emin_(mpfr_get_emin()), emax_(mpfr_get_emax()) {
        mpfr_set_emin(mpfr_get_emin_min());
        mpfr_set_emax(mpfr_get_emax_max());
    }
    ExponentRange(const ExponentRange&) = delete;
    ExponentRange& operator=(const ExponentRange&) = delete;
    ~ExponentRange() {
        mpfr_set_emin(emin_);
        mpfr_set_emax(emax_);
    }

  private:
    mpfr_exp_t emin_;
    mpfr_exp_t emax_;
};

}  // namespace faultline::detail
