// SPDX-License-Identifier: Apache-2.0
// What watches or changes a tile at a site. The kernels are compiled twice, for no instrument and for this interface:
// a kernel without one costs nothing, and there are not as many kernels as instruments.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/plan/site.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// Where a tile stands. Row sites have key0 = 0, k_tile = 0; key-tile sites have query0 = 0, q_tile = 0, unless the sum
/// that they belong to runs over query tiles.
struct TileAt {
    int layer = 0;
    int head = 0;               ///< query head of the layer
    std::ptrdiff_t query0 = 0;  ///< first row
    std::ptrdiff_t key0 = 0;    ///< first key
    int q_tile = 0;
    int k_tile = 0;
    int part =
        0;  ///< among tiles of one site at one place: the split of the keys, the query head of a group whose dk or
            ///< dv is cast, dk (0) and dv (1) of kv_group_reduce
};

class Instrument {
  public:
    virtual ~Instrument() = default;
    /// Whether at() is to be called for this site. Asked once a tile, so it should be cheap.
    [[nodiscard]] virtual bool watches(Site site) const = 0;
    /// `value`: the tile after the site, may be changed. `exact`: the exact result (to binary64) of the site's operation
    /// on the operands it really got, the same shape. value - exact is the site's local error. Masked scores are -inf in
    /// both; masked probabilities are 0 in both.
    virtual void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) = 0;
};

/// Several instruments, called in order: an injector before a recorder is recorded.
class Instruments final : public Instrument {
  public:
    explicit Instruments(std::vector<Instrument*> parts) : parts_(std::move(parts)) {}
    [[nodiscard]] bool watches(Site site) const override {
        for (const Instrument* part : parts_)
            if (part->watches(site)) return true;
        return false;
    }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        for (Instrument* part : parts_)
            if (part->watches(site)) part->at(site, where, value, exact);
    }

  private:
    std::vector<Instrument*> parts_;
};

}  // namespace faultline
