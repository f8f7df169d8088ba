// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/settle.hpp>

#include <faultline/base/clones.hpp>
#include <faultline/truth/settle_element.hpp>

namespace faultline::detail {
namespace {

FAULTLINE_CLONES
std::ptrdiff_t settle_loop(const double* __restrict high, const double* __restrict low, const double* __restrict error,
                           double factor, std::ptrdiff_t cols, double* __restrict value, double* __restrict bound) {
    // An element that needs the scalar path, for its range or its rounding, gets the bound -1.
    std::ptrdiff_t open = 0;
    for (std::ptrdiff_t c = 0; c < cols; ++c) {
        const Settled x = settled_plainly(high[c], low[c], error[c], factor);
        value[c] = x.value;
        bound[c] = x.decided ? x.bound : -1;
        open += x.decided ? 0 : 1;
    }
    return open;
}

}  // namespace

bool settle(const WideSum& x, CertifiedMatrix& out, std::size_t at) {
    const Settled element = settled(x);
    out.value[at] = element.value;
    out.bound[at] = element.bound;
    out.exponent[at] = element.exponent;
    return element.decided;
}

void settle_row(const double* high, const double* low, const double* error, double exponent, CertifiedMatrix& out,
                std::ptrdiff_t row, std::vector<std::ptrdiff_t>& left) {
    double* value = out.value.data() + row * out.cols;
    double* bound = out.bound.data() + row * out.cols;
    const bool near = std::fabs(exponent) <= settle_near_scale;
    if (near && settle_loop(high, low, error, power_of_two(exponent), out.cols, value, bound) == 0) return;
    for (std::ptrdiff_t c = 0; c < out.cols; ++c) {
        if (near && bound[c] >= 0) continue;
        if (!settle({{high[c], low[c]}, exponent, error[c]}, out, out.index(row, c))) left.push_back(c);
    }
}

}  // namespace faultline::detail
