// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/lse.hpp>

#include <cmath>

#include <faultline/attribution/lse_units.hpp>

namespace faultline::verdict {
namespace {

/// The root of the score's products' squares, scaled, root mean square over the keys by their probability.
double score_products(const HeadGroup& in, std::size_t head, std::ptrdiff_t row, double lse) {
    double mean = 0;
    for (std::ptrdiff_t j = 0; j < in.k.rows; ++j) {
        if (!is_visible(in, head, row, j)) continue;
        double sum = 0, squares = 0;
        for (std::ptrdiff_t c = 0; c < in.k.cols; ++c) {
            const double product = in.scale * in.q[head](row, c) * in.k(j, c);
            sum += product;
            squares += product * product;
        }
        if (in.softcap > 0) sum = in.softcap * std::tanh(sum / in.softcap);
        if (!in.bias.empty()) sum += in.bias[head](row, j);
        mean += std::exp(std::min(sum - lse, 0.0)) * squares;
    }
    return std::sqrt(mean);
}

}  // namespace

std::vector<double> lse_floor(const attribution::Group& group, std::size_t head, const CertifiedMatrix& truth,
                              bool plan_rounds, Dtype stored) {
    const HeadGroup& in = group.inputs;
    const double unit = plan_rounds ? 0x1p-24 : 0x1p-53;
    const double file = stored == Dtype::f64 ? 0x1p-53 : 0x1p-24;
    const auto n = static_cast<double>(in.k.rows), d = static_cast<double>(in.k.cols);
    std::vector<double> floor;
    for (std::ptrdiff_t i = 0; i < truth.rows; ++i) {
        const double lse = truth(i, 0);
        if (!std::isfinite(lse)) {
            floor.push_back(0);
            continue;
        }
        const double score = std::sqrt(d / 3) * score_products(in, head, i, lse);
        const double rest = 2 * (std::abs(lse) + std::log(std::max(n, 1.0)));
        floor.push_back(std::hypot(unit * std::hypot(score, rest, std::sqrt(n / 3 + 16)), file * lse));
    }
    return floor;
}

std::size_t settle_rows_without_keys(Matrix& truth, Matrix& observed, Matrix& plan) {
    std::size_t finite = 0;
    for (std::ptrdiff_t i = 0; i < truth.rows; ++i) {
        if (std::isfinite(truth(i, 0))) continue;
        finite += !std::isinf(observed(i, 0));
        truth(i, 0) = 0;
        observed(i, 0) = 0;
        plan(i, 0) = 0;
    }
    return finite;
}

bool reads_as_log2(const Matrix& observed, const Matrix& truth) {
    return attribution::reads_as_log2(observed.values, truth.values);
}

}  // namespace faultline::verdict
