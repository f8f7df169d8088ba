// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/null_model.hpp>

#include <cmath>

#include <faultline/random/random_stream.hpp>

namespace faultline::verdict {
namespace {

constexpr double fp32_unit = 0x1p-24;  // half an ulp of 1

}  // namespace

SignFlip::SignFlip(const std::vector<Site>& sites, std::uint64_t seed, std::uint64_t number)
    : seed_(seed), number_(number) {
    for (const Site site : sites) flipped_[index(site)] = true;
}

void SignFlip::at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) {
    const auto place = static_cast<std::uint64_t>(index(site)), head = static_cast<std::uint64_t>(where.head),
               tile = (static_cast<std::uint64_t>(where.q_tile) << 32) | static_cast<std::uint64_t>(where.k_tile),
               part = static_cast<std::uint64_t>(where.part);
    // Tiles of one place have signs of their own: the query heads of a group whose dk are cast, dk and dv of its sums.
    const RandomStream stream = part == 0 ? RandomStream(seed_, number_, place, head, tile)
                                          : RandomStream(seed_, number_, place, head, tile, part);
    std::uint64_t counter = 0, bits = 0;
    int left = 0;
    for (std::ptrdiff_t i = 0; i < value.rows; ++i)
        for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
            if (left == 0) {
                bits = stream.bits(counter++);
                left = 64;
            }
            const bool flip = (bits & 1) != 0;
            bits >>= 1;
            --left;
            if (!flip) continue;
            const double error = value(i, j) - exact(i, j);
            if (error != 0 && std::isfinite(error)) value(i, j) = exact(i, j) - error;
        }
}

void SignFlip::alterations(int, int, std::vector<Alteration>& to) const {
    Alteration flip;
    flip.kind = Alteration::Kind::flip;
    for (std::size_t site = 0; site < site_count; ++site)
        if (flipped_[site]) flip.sites |= std::uint64_t{1} << site;
    flip.seed = seed_;
    flip.number = number_;
    to.push_back(flip);
}

OtherSumOrder::OtherSumOrder(const RoundingPlan& plan, std::uint64_t seed, std::uint64_t number)
    : active_(!plan[Site::delta].is_exact()),
      site_(needs_dp(plan.schedule.delta_from) ? Site::delta : Site::delta_product),
      seed_(seed),
      number_(number) {}

void OtherSumOrder::at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) {
    // SignFlip's stream has five numbers in its name, and six for a part, which delta has not; this one has six.
    const RandomStream stream(seed_, number_, static_cast<std::uint64_t>(index(site)),
                              static_cast<std::uint64_t>(where.head), std::uint64_t{0}, std::uint64_t{1});
    const double products = static_cast<double>(value.cols);
    const double size = site == Site::delta_product ? fp32_unit * std::sqrt(products / 3) : fp32_unit;
    for (std::ptrdiff_t i = 0; i < value.rows; ++i)
        for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
            const auto element = static_cast<std::uint64_t>(i * value.cols + j);
            const bool up = (stream.bits(element / 64) >> element % 64 & 1) != 0;
            value(i, j) += (up ? size : -size) * value(i, j);
        }
}

std::vector<Site> low_precision_sites(const RoundingPlan& plan) {
    std::vector<Site> low, all;
    for (const Site site : plan.rounding_sites()) {
        if (info(site).shape == SiteShape::constant) continue;
        all.push_back(site);
        const Format& format = plan[site].format;
        if (!is_exact(format) && format.precision < fp32.precision) low.push_back(site);
    }
    return low.empty() ? all : low;
}

}  // namespace faultline::verdict
