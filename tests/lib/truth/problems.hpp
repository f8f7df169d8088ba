// SPDX-License-Identifier: Apache-2.0
// Attention problems for the tests of truth, in the formats that kernels meet.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <random>
#include <utility>

#include <faultline/tensor/matrix.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::test {

/// `bits`-bit significand, to nearest even; the exponent is left alone.
inline double keep_bits(double x, int bits) {
    if (x == 0) return 0;
    int e = 0;
    const double m = std::frexp(x, &e);
    return std::ldexp(std::nearbyint(std::ldexp(m, bits)), e - bits);
}

inline constexpr int bf16_bits = 8;
inline constexpr int fp16_bits = 11;
inline constexpr int fp32_bits = 24;
inline constexpr int double_bits = 53;

/// A problem that owns its inputs.
struct OwnedProblem {
    std::deque<Matrix> storage;  // a deque: views into elements stay valid
    TruthProblem problem;

    MatrixView<const double> keep(Matrix m) {
        storage.push_back(std::move(m));
        return std::as_const(storage.back()).view();
    }
};

class Generator {
  public:
    explicit Generator(std::uint64_t seed) : random_(seed) {}

    double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
    double normal() {  // Box-Muller, written out so that the problems are the same with every standard library
        const double radius = std::sqrt(-2 * std::log(1 - uniform()));
        return radius * std::cos(6.283185307179586 * uniform());
    }
    std::uint64_t bits() { return random_(); }
    Matrix matrix(std::ptrdiff_t rows, std::ptrdiff_t cols, double size, int significand) {
        Matrix m(rows, cols);
        for (double& x : m.values) x = keep_bits(size * normal(), significand);
        return m;
    }
    /// Exponents uniform in [low, high], random sign.
    Matrix wide_matrix(std::ptrdiff_t rows, std::ptrdiff_t cols, int low, int high, int significand) {
        Matrix m(rows, cols);
        for (double& x : m.values) {
            const int e = low + static_cast<int>(uniform() * (high - low + 1));
            x = keep_bits(std::ldexp((1 + uniform()) * (uniform() < 0.5 ? -1 : 1), e), significand);
        }
        return m;
    }

  private:
    std::mt19937_64 random_;
};

struct Shape {
    std::ptrdiff_t n_q = 16, n_k = 16, d = 8, d_v = 8;
    std::size_t heads = 1;
    bool causal = true;
    int significand = bf16_bits;
    double q_size = 1, k_size = 1;
};

/// Independent normal inputs.
inline OwnedProblem random_problem(const Shape& shape, std::uint64_t seed) {
    Generator g(seed);
    OwnedProblem owned;
    for (std::size_t h = 0; h < shape.heads; ++h) {
        owned.problem.q.push_back(owned.keep(g.matrix(shape.n_q, shape.d, shape.q_size, shape.significand)));
        owned.problem.dout.push_back(owned.keep(g.matrix(shape.n_q, shape.d_v, 1e-3, shape.significand)));
    }
    owned.problem.k = owned.keep(g.matrix(shape.n_k, shape.d, shape.k_size, shape.significand));
    owned.problem.v = owned.keep(g.matrix(shape.n_k, shape.d_v, 1, shape.significand));
    owned.problem.causal = shape.causal;
    return owned;
}

}  // namespace faultline::test
