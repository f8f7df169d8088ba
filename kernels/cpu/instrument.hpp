// SPDX-License-Identifier: Apache-2.0
// What watches or changes a tile at a site. The kernels are compiled twice, for no instrument and for this interface:
// a kernel without one costs nothing, and there are not as many kernels as instruments.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include <faultline/cpu/alteration.hpp>
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
    /// Score tiles: row i of the tile sees its columns j < visible0 + i; the others are behind the causal mask.
    std::ptrdiff_t visible0 = std::numeric_limits<std::ptrdiff_t>::max() / 2;
    bool biased = false;  ///< a bias is added to the scores, and may mask elements that the causal mask does not
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

    /// Whether at() changes values of this site. Such a site is shown again, by at_again(), wherever the kernel computes a
    /// tile once more that was or will be shown: a cast that the backward repeats, a sweep that prepares delta or a
    /// projection. The change must be the same both times, or the kernel would subtract a delta of another fault.
    [[nodiscard]] virtual bool alters(Site) const { return false; }
    virtual void at_again(Site, const TileAt&, MatrixView<double>, MatrixView<const double>) {}

    /// What at() does to the tiles of a query head (of the layer, over the batch: TileAt::head), as data, in its order. A back
    /// end that holds its tiles elsewhere does that to them, and shows at() copies of the tiles that it observes, as they were
    /// before. An instrument that changes values and leaves this empty is one for the CPU alone.
    virtual void alterations(int /*layer*/, int /*head*/, std::vector<Alteration>& /*to*/) const {}
    /// Whether at() is to see this site's tiles, for what it records.
    [[nodiscard]] virtual bool observes(Site site) const { return watches(site); }
};

/// An instrument as a sweep sees it that repeats what is shown elsewhere: it changes what it changes, and records nothing.
class Repeated final : public Instrument {
  public:
    explicit Repeated(Instrument* inner) : inner_(inner) {}
    [[nodiscard]] bool watches(Site site) const override { return inner_->alters(site); }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        inner_->at_again(site, where, value, exact);
    }

  private:
    Instrument* inner_;
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
    [[nodiscard]] bool alters(Site site) const override {
        for (const Instrument* part : parts_)
            if (part->alters(site)) return true;
        return false;
    }
    void at_again(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        for (Instrument* part : parts_)
            if (part->alters(site)) part->at_again(site, where, value, exact);
    }
    void alterations(int layer, int head, std::vector<Alteration>& to) const override {
        for (const Instrument* part : parts_) part->alterations(layer, head, to);
    }
    /// What is observed after a change has to be changed here too.
    [[nodiscard]] bool observes(Site site) const override {
        for (const Instrument* part : parts_)
            if (part->observes(site)) return true;
        return false;
    }

  private:
    std::vector<Instrument*> parts_;
};

}  // namespace faultline
