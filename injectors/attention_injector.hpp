// SPDX-License-Identifier: Apache-2.0
// A fault at a site of an attention kernel: an instrument that changes the tiles. Where the kernel visits a tile twice (a
// sweep that prepares delta or a projection), it is changed alike both times, and recorded once.
#pragma once

#include <cstdint>
#include <vector>

#include <faultline/cpu/instrument.hpp>
#include <faultline/injectors/apply.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

class AttentionInjector final : public Instrument {
  public:
    /// `fault` must name a kernel site (RequestError). `heads`: heads of the layer; TileAt::head counts on over the batch,
    /// so that head % heads is the layer's. One injector for one thread; join the statistics of several in a fixed order.
    AttentionInjector(const Fault& fault, const RoundingPlan& plan, int heads, std::int64_t step = 0);

    [[nodiscard]] bool watches(Site site) const override { return site == site_; }
    [[nodiscard]] bool alters(Site site) const override { return site == site_; }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override;
    void at_again(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override;

    void alterations(int layer, int head, std::vector<Alteration>& to) const override;

    void set_step(std::int64_t step) { step_ = step; }
    /// Since the last reset, by head of the layer: [heads].
    [[nodiscard]] const std::vector<Realised>& realised() const { return realised_; }
    [[nodiscard]] Realised total() const;
    void reset();

  private:
    Realised change(const TileAt& where, MatrixView<double> value) const;

    Fault fault_;
    Site site_;
    Format format_;
    int heads_;
    std::int64_t step_;
    std::vector<Realised> realised_;
};

}  // namespace faultline
