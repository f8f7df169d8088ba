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

/// What another order of delta's sum does to it. A plan adds in one order and its runs in the same one, so that dp - delta
/// cancels to the last bit, 0 included, where one key has all the probability; a kernel that adds in another order leaves
/// an ulp of delta there, by right. Each delta gets an error of random sign, of a size that fp32 sums have:
///   from o     each product of the sum's n times 2^-24 sqrt(n/3): a sum that rounds as it goes errs by
///              2^-24 sqrt(n/6) of the root of its products' squares (partial sums grow as sqrt(k), an error is uniform
///              on half an ulp), and there are two, delta and dp
///   from p dp  delta times 2^-24, half an ulp and more: one product makes the sum where p is 1, and dp's own error is in it
/// Nothing where the plan's delta is exact.
class OtherSumOrder final : public Instrument {
  public:
    OtherSumOrder(const RoundingPlan& plan, std::uint64_t seed, std::uint64_t number);
    [[nodiscard]] bool watches(Site site) const override { return active_ && site == site_; }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override;
    /// Every back end computes delta on the host: there are no alterations, nor does anything record.
    [[nodiscard]] bool observes(Site) const override { return false; }

  private:
    bool active_;
    Site site_;
    std::uint64_t seed_, number_;
};

/// The sites whose rounding is the plan's low precision: formats of fewer bits than fp32's 24, or where a plan has none,
/// every rounding site. Sites of one constant are left out: one sign is no noise.
[[nodiscard]] std::vector<Site> low_precision_sites(const RoundingPlan& plan);

}  // namespace faultline::verdict
