// SPDX-License-Identifier: Apache-2.0
// Which sites a run of a kernel passes. A fault elsewhere would be planted nowhere. It depends on the plan and the problem in
// many ways (a merge without splits, a sum over one query head, a maximum that is never rescaled because one tile has all
// keys), and on no value: one run of one head says it.
#pragma once

#include <array>

#include <faultline/cpu/instrument.hpp>

namespace faultline {

/// Watches a run, and changes nothing.
class PassedSites final : public Instrument {
  public:
    [[nodiscard]] bool watches(Site site) const override { return !seen_[index(site)]; }
    void at(Site site, const TileAt&, MatrixView<double>, MatrixView<const double>) override {
        seen_[index(site)] = true;
    }
    [[nodiscard]] bool operator[](Site site) const { return seen_[index(site)]; }

  private:
    std::array<bool, site_count> seen_{};
};

}  // namespace faultline
