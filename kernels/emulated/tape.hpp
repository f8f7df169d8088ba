// SPDX-License-Identifier: Apache-2.0
// The watch of a call, made of its instrument; and the tape, played to it. at() sees every observed tile as it was before
// anything was changed, with its exact result, and does there what it does in a run of kernels/cpu: so what a recorder holds
// at the end is the same, bit for bit, and no instrument but a changing one has a second form.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <vector>

#include <faultline/cpu/instrument.hpp>
#include <faultline/cpu/stage.hpp>
#include <faultline/emulated/watch.hpp>

namespace faultline::emulated {

/// What stands at the sites of a call whose heads are [first_head, first_head + heads).
class CallWatch {
  public:
    CallWatch(const Instrument* instrument, int layer, int first_head, std::size_t heads) {
        if (instrument == nullptr) return;
        watch_.first_head = first_head;
        first_.push_back(0);
        for (std::size_t h = 0; h < heads; ++h) {
            instrument->alterations(layer, first_head + static_cast<int>(h), alterations_);
            first_.push_back(static_cast<int>(alterations_.size()));
        }
        for (const Alteration& a : alterations_) {
            watch_.altered |= a.sites;
            if (a.at_repetitions) watch_.repeated |= a.sites;
        }
        for (std::size_t s = 0; s < site_count; ++s) {
            const auto site = static_cast<Site>(s);
            if (instrument->observes(site)) watch_.taped |= std::uint64_t{1} << s;
            if (info(site).shape == SiteShape::score_tile) watch_.score_tiles |= std::uint64_t{1} << s;
        }
    }
    [[nodiscard]] bool active() const { return (watch_.taped | watch_.altered) != 0; }
    [[nodiscard]] std::uint64_t taped() const { return watch_.taped; }
    [[nodiscard]] std::size_t alterations() const { return alterations_.size(); }
    [[nodiscard]] std::size_t firsts() const { return first_.size(); }
    /// On the side that computes, without a tape.
    template <class Backend>
    [[nodiscard]] Watch sent(Backend& backend) const {
        Watch w = watch_;
        if (!active()) return w;
        w.alterations = backend.upload_values(alterations_.data(), alterations_.size());
        w.first = backend.upload_values(first_.data(), first_.size());
        return w;
    }

  private:
    Watch watch_;
    std::vector<Alteration> alterations_;
    std::vector<int> first_;
};

/// Doubles that a team's tape needs for `steps` tiles of the other dimension at most: every taped site of the pass at each,
/// twice (its second maximum, its split's), and `ends` times at the end.
inline std::ptrdiff_t tape_capacity(std::uint64_t taped, Pass pass, std::ptrdiff_t steps, std::ptrdiff_t ends,
                                    std::ptrdiff_t rows, std::ptrdiff_t cols, std::ptrdiff_t width) {
    std::ptrdiff_t doubles = 1;
    for (std::size_t s = 0; s < site_count; ++s) {
        const SiteInfo& site = info(static_cast<Site>(s));
        if ((taped >> s & 1) == 0 || site.pass != pass) continue;
        const bool scores = site.shape == SiteShape::score_tile;
        const std::ptrdiff_t size = scores                                ? rows * cols
                                    : site.shape == SiteShape::row        ? rows
                                    : site.shape == SiteShape::query_tile ? rows * width
                                                                          : cols * width;
        doubles += (scores ? steps : 2 * steps + ends) * (tape_fields + 2 * size);
    }
    return doubles;
}

/// How many of `teams` teams, each with so many doubles of memory, work at once where `most` doubles may be taken; one has what
/// it needs.
inline std::ptrdiff_t at_once(std::ptrdiff_t teams, std::ptrdiff_t doubles, std::size_t most) {
    return std::min(teams,
                    static_cast<std::ptrdiff_t>(std::max<std::size_t>(1, most / static_cast<std::size_t>(doubles))));
}

/// A tile that stands on a tape.
struct TapedTile {
    Site site;
    TileAt where;
    MatrixView<double> value;
    MatrixView<const double> exact;
};

inline void show(Instrument& instrument, const TapedTile& t) {
    if (instrument.watches(t.site)) instrument.at(t.site, t.where, t.value, t.exact);
}
inline void show(cpu::NoInstrument&, const TapedTile&) {}

/// The tiles of one team's tape, in their order. std::logic_error where it was too short.
inline std::vector<TapedTile> tiles_of(std::vector<double>& tape, int layer) {
    std::vector<TapedTile> tiles;
    if (tape.empty() || tape[0] == 0) return tiles;
    if (tape[0] > static_cast<double>(tape.size())) throw std::logic_error("emulated: a tape is too short");
    const auto end = static_cast<std::ptrdiff_t>(tape[0]);
    for (std::ptrdiff_t at = 1; at < end;) {
        const double* fields = tape.data() + at;
        const auto field = [&](TapeField f) { return fields[static_cast<std::size_t>(f)]; };
        const auto whole = [&](TapeField f) { return static_cast<std::ptrdiff_t>(field(f)); };
        TapedTile tile;
        tile.site = static_cast<Site>(static_cast<int>(field(TapeField::site)));
        tile.where = {layer,
                      static_cast<int>(field(TapeField::head)),
                      whole(TapeField::query0),
                      whole(TapeField::key0),
                      static_cast<int>(field(TapeField::q_tile)),
                      static_cast<int>(field(TapeField::k_tile)),
                      static_cast<int>(field(TapeField::part)),
                      whole(TapeField::visible0),
                      field(TapeField::biased) != 0};
        const std::ptrdiff_t rows = whole(TapeField::rows), cols = whole(TapeField::cols);
        double* values = tape.data() + at + tape_fields;
        tile.value = MatrixView<double>(values, rows, cols);
        tile.exact = MatrixView<const double>(values + rows * cols, rows, cols);
        tiles.push_back(tile);
        at += tape_fields + 2 * rows * cols;
    }
    return tiles;
}

/// Runs teams [0, teams) of the job, as many at once as the back end has tape for, and calls play(team, its tiles) for each
/// in order.
template <class Backend, class Job, class Play>
void run_taped(Backend& backend, Job job, std::ptrdiff_t teams, std::ptrdiff_t doubles, std::ptrdiff_t capacity,
               Play&& play) {
    const std::ptrdiff_t wave = at_once(teams, capacity, backend.tape_doubles());
    job.watch.capacity = capacity;
    job.watch.tape = backend.tape(static_cast<std::size_t>(wave * capacity));
    for (std::ptrdiff_t first = 0; first < teams; first += wave) {
        const std::ptrdiff_t count = std::min(wave, teams - first);
        const double nothing = 0;
        for (std::ptrdiff_t t = 0; t < count; ++t) backend.write(job.watch.tape + t * capacity, &nothing, 1);
        job.first_team = first;
        backend.run(job, count, doubles);
        for (std::ptrdiff_t t = 0; t < count; ++t) {
            double used = 0;
            backend.download(job.watch.tape + t * capacity, 1, &used);
            std::vector<double> tape(static_cast<std::size_t>(std::min(used, static_cast<double>(capacity))));
            backend.download(job.watch.tape + t * capacity, tape.size(), tape.data());
            if (used > static_cast<double>(capacity)) throw std::logic_error("emulated: a tape is too short");
            play(first + t, tape);
        }
    }
}

}  // namespace faultline::emulated
