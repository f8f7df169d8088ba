// SPDX-License-Identifier: Apache-2.0
#include <faultline/gemm/gemm.hpp>

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>

#include "block.hpp"

namespace faultline {
namespace {

using gemm_detail::Problem;

/// Bits of every choice are the same; only speed differs.
template <class T>
using Multiply = void (*)(const Problem<T>&);

template <class T>
Multiply<T> best_for_this_machine() {
#if defined(FAULTLINE_GEMM_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return gemm_detail::multiply_v4;
    if (__builtin_cpu_supports("x86-64-v3")) return gemm_detail::multiply_v3;
#endif
    return gemm_detail::multiply_plain;
}

/// One packed block for each thread that multiplies, kept from call to call.
template <class T>
T* scratch() {
    struct Free {
        void operator()(T* x) const { ::operator delete[](x, std::align_val_t(64)); }
    };
    thread_local const std::unique_ptr<T, Free> block(
        static_cast<T*>(::operator new[](gemm_detail::packed_size * sizeof(T), std::align_val_t(64))));
    return block.get();
}

template <class T>
void run(Transpose a_transposed, MatrixView<const T> a, Transpose b_transposed, MatrixView<const T> b, MatrixView<T> c,
         bool accumulate) {
    static const Multiply<T> multiply = best_for_this_machine<T>();
    const bool a_t = a_transposed == Transpose::yes, b_t = b_transposed == Transpose::yes;
    const std::ptrdiff_t k = a_t ? a.rows : a.cols;
    if ((a_t ? a.cols : a.rows) != c.rows || (b_t ? b.cols : b.rows) != k || (b_t ? b.rows : b.cols) != c.cols)
        throw std::invalid_argument("gemm: expected [m, k] [k, n] [m, n] after transposition");
    if (k == 0) {
        if (!accumulate)
            for (std::ptrdiff_t i = 0; i < c.rows; ++i) std::fill_n(c.row(i), c.cols, T(0));
        return;
    }
    multiply(Problem<T>{c.rows, c.cols, k, a.data, a_t ? 1 : a.stride, a_t ? a.stride : 1, b.data, b_t ? 1 : b.stride,
                        b_t ? b.stride : 1, c.data, c.stride, accumulate, scratch<T>()});
}

}  // namespace

void gemm(Transpose a_transposed, MatrixView<const float> a, Transpose b_transposed, MatrixView<const float> b,
          MatrixView<float> c, bool accumulate) {
    run<float>(a_transposed, a, b_transposed, b, c, accumulate);
}
void gemm(Transpose a_transposed, MatrixView<const double> a, Transpose b_transposed, MatrixView<const double> b,
          MatrixView<double> c, bool accumulate) {
    run<double>(a_transposed, a, b_transposed, b, c, accumulate);
}

}  // namespace faultline
