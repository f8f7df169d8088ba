// SPDX-License-Identifier: Apache-2.0
// An instrument that keeps every tile, and one that puts kept tiles in the place of a site's own.
#pragma once

#include <vector>

#include <faultline/cpu/instrument.hpp>

namespace faultline::testing {

struct Event {
    Site site;
    TileAt where;
    std::vector<double> value, exact;
};

inline std::vector<double> elements(MatrixView<const double> tile) {
    std::vector<double> all;
    for (std::ptrdiff_t i = 0; i < tile.rows; ++i) all.insert(all.end(), tile.row(i), tile.row(i) + tile.cols);
    return all;
}

/// Every tile at every site, in the order in which the kernel passes them.
class Log : public Instrument {
  public:
    [[nodiscard]] bool watches(Site) const override { return true; }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        events.push_back({site, where, elements(value), elements(exact)});
    }
    std::vector<Event> events;
};

/// The tiles of one site replaced by those of another run, in order, then logged.
class Replay final : public Log {
  public:
    Replay(const Log& other, Site site) : site_(site) {
        for (const Event& e : other.events)
            if (e.site == site) tiles_.push_back(&e.value);
    }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        if (site == site_ && next_ < tiles_.size()) {
            const double* from = tiles_[next_++]->data();
            for (std::ptrdiff_t i = 0; i < value.rows; ++i)
                for (std::ptrdiff_t j = 0; j < value.cols; ++j) value(i, j) = *from++;
        }
        Log::at(site, where, value, exact);
    }

  private:
    Site site_;
    std::vector<const std::vector<double>*> tiles_;
    std::size_t next_ = 0;
};

}  // namespace faultline::testing
