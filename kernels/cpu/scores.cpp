// SPDX-License-Identifier: Apache-2.0
#include <faultline/cpu/scores.hpp>

#include <faultline/plan/polynomial_columns.hpp>
#include <faultline/special/binary64.hpp>
#include <faultline/special/ex2_approx.hpp>
#include <faultline/special/ex2_polynomial.hpp>
#include <faultline/special/lg2_approx.hpp>

namespace faultline::cpu {

namespace {

FAULTLINE_CLONES
bool all_floats(const double* row, std::ptrdiff_t count) {
    int wider = 0;
    for (std::ptrdiff_t j = 0; j < count; ++j) wider |= static_cast<double>(static_cast<float>(row[j])) != row[j];
    return wider == 0;
}

FAULTLINE_CLONES
void fused_row(double* row, std::ptrdiff_t count, float factor, float minus_shift) {
    for (std::ptrdiff_t j = 0; j < count; ++j) row[j] = std::fmaf(static_cast<float>(row[j]), factor, minus_shift);
}

FAULTLINE_CLONES
void tanh_of(double* x, std::ptrdiff_t count) {
    for (std::ptrdiff_t j = 0; j < count; ++j) x[j] = binary64_functions::tanh(x[j]);
}

}  // namespace

void fused_argument_fp32(MatrixView<double> tile, double c, const double* shift) {
    const auto factor = static_cast<float>(c);
    for (std::ptrdiff_t i = 0; i < tile.rows; ++i) {
        double* row = tile.row(i);
        const auto minus_shift = static_cast<float>(-shift[i]);
        if (!is_float(c) || !is_float(shift[i])) {
            for (std::ptrdiff_t j = 0; j < tile.cols; ++j) row[j] = std::fma(row[j], c, -shift[i]);
        } else if (all_floats(row, tile.cols)) {
            fused_row(row, tile.cols, factor, minus_shift);
        } else {
            for (std::ptrdiff_t j = 0; j < tile.cols; ++j)
                row[j] = is_float(row[j])
                             ? static_cast<double>(std::fmaf(static_cast<float>(row[j]), factor, minus_shift))
                             : std::fma(row[j], c, -shift[i]);
        }
    }
}

void hyperbolic_tangent(MatrixView<double> tile) {
    for (std::ptrdiff_t i = 0; i < tile.rows; ++i) tanh_of(tile.row(i), tile.cols);
}

namespace {

FAULTLINE_CLONES
void exp2_of(double* x, std::ptrdiff_t count) {
    for (std::ptrdiff_t j = 0; j < count; ++j) x[j] = binary64_functions::exp2(x[j]);
}
FAULTLINE_CLONES
void exp_of(double* x, std::ptrdiff_t count) {
    for (std::ptrdiff_t j = 0; j < count; ++j) x[j] = binary64_functions::exp(x[j]);
}

}  // namespace

void exponential(MatrixView<double> tile, ExpBase base) {
    for (std::ptrdiff_t i = 0; i < tile.rows; ++i) (base == ExpBase::two ? exp2_of : exp_of)(tile.row(i), tile.cols);
}

void exponential(MatrixView<double> tile, ExpBase base, Functions functions) {
    if (functions == Functions::correctly_rounded || base == ExpBase::e) return exponential(tile, base);
    for_each(tile, [](double x, auto, auto) { return static_cast<double>(exp2f_cuda(static_cast<float>(x))); });
}

void exponential_of_tile(MatrixView<double> tile, const Schedule& schedule) {
    if (schedule.exp_poly_every == 0) return exponential(tile, schedule.exp_base, schedule.functions);
    Matrix polynomial{MatrixView<const double>(tile)};
    for_each(polynomial.view(),
             [](double x, auto, auto) { return static_cast<double>(exp2_polynomial(static_cast<float>(x))); });
    exponential(tile, schedule.exp_base, schedule.functions);
    for_each(tile,
             [&](double x, auto i, auto j) { return takes_polynomial(schedule, j, tile.cols) ? polynomial(i, j) : x; });
}

double logarithm(double sum, Functions functions) {
    return functions == Functions::hopper ? static_cast<double>(logf_fast_cuda(static_cast<float>(sum)))
                                          : binary64_functions::log(sum);
}

double binary_logarithm(double sum, Functions functions) {
    return functions == Functions::hopper ? static_cast<double>(lg2_approx(static_cast<float>(sum)))
                                          : binary64_functions::log(sum) * std::numbers::log2e;
}

}  // namespace faultline::cpu
