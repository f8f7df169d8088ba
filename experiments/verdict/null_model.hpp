// SPDX-License-Identifier: Apache-2.0
// What a plan's errors would be if its roundings were independent: the plan run again and again with every low-precision
// rounding error given a sign of its own at random. The size of every single error stays what the plan makes of these
// very inputs (none where a value is exact, as p = 1 is), and so does everything that couples elements: delta and row sum
// in a row, the sums over rows in dk and dv, fp32 arithmetic. What goes is what the signs know of the values, and a bias is
// nothing else. Rejected: stochastic rounding, whose errors are sqrt(2) larger and not 0 next to a representable value; a
// variance from the formats alone, which knows nothing of how a row's error reaches dq.
#pragma once

#include <cstdint>
#include <vector>

#include <faultline/attribution/group_run.hpp>
#include <faultline/cpu/instrument.hpp>

namespace faultline::verdict {

/// Gives the error of each element at each watched site a random sign: value <- exact +- (value - exact). Infinite and NaN
/// elements stay.
class SignFlip final : public Instrument {
  public:
    /// `sites`: those to flip. Two runs of different `number` are independent; the same arguments give the same signs.
    SignFlip(const std::vector<Site>& sites, std::uint64_t seed, std::uint64_t number);
    [[nodiscard]] bool watches(Site site) const override { return flipped_[index(site)]; }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override;
    void alterations(int layer, int head, std::vector<Alteration>& to) const override;
    [[nodiscard]] bool observes(Site) const override { return false; }

  private:
    std::array<bool, site_count> flipped_{};
    std::uint64_t seed_, number_;
};

/// The sites whose rounding is the plan's low precision: formats of fewer bits than fp32's 24, or where a plan has none,
/// every rounding site. Sites of one constant are left out: one sign is no noise.
[[nodiscard]] std::vector<Site> low_precision_sites(const RoundingPlan& plan);

}  // namespace faultline::verdict
