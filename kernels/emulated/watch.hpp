// SPDX-License-Identifier: Apache-2.0
// What stands at the sites of a run in the device's form: changes of tiles (kernels/cpu/alteration.hpp), and a tape of the
// tiles that are observed, which the host plays to the instrument when the teams have ended (tape.hpp).
#pragma once

#include <faultline/cpu/alteration_law.hpp>
#include <faultline/emulated/machine.hpp>
#include <faultline/emulated/place.hpp>
#include <faultline/emulated/rounding.hpp>

namespace faultline::emulated {

/// How often a sweep's tiles are shown.
enum class Shown : unsigned char {
    yes,     ///< kept and changed
    twice,   ///< changed: the same tile is kept by another sweep
    unseen,  ///< changed where the change stands at repetitions too (Instrument::alters)
};

/// In front of each tile on the tape, one double each; behind it its values and the exact ones.
enum class TapeField : unsigned char { site, head, query0, key0, q_tile, k_tile, part, visible0, biased, rows, cols };
inline constexpr std::ptrdiff_t tape_fields = static_cast<std::ptrdiff_t>(TapeField::cols) + 1;

/// By default nothing stands anywhere.
struct Watch {
    std::uint64_t taped = 0, altered = 0, repeated = 0;  ///< bit index(site)
    std::uint64_t score_tiles = 0;                       ///< the sites whose tiles the mask cuts
    const Alteration* alterations = nullptr;
    const int* first = nullptr;  ///< [heads + 1] where those of a head of the call begin
    int first_head = 0;
    double* tape = nullptr;       ///< of all teams; of a team so many doubles, the first says how many are used
    std::ptrdiff_t capacity = 0;  ///< of a team
    double* own = nullptr;        ///< of this team

    [[nodiscard]] FAULTLINE_HD Watch of_team(std::ptrdiff_t team) const {
        Watch w = *this;
        if (tape != nullptr) w.own = tape + team * capacity;
        return w;
    }
    [[nodiscard]] FAULTLINE_HD bool sees(Site site, Shown shown) const {
        const std::uint64_t sites = shown == Shown::yes ? taped | altered : shown == Shown::twice ? altered : repeated;
        return (sites >> static_cast<int>(site) & 1) != 0;
    }

    /// `scratch` is one double of the team's memory.
    template <class Team>
    FAULTLINE_HD_CALLED void show(const Team& team, Site site, const Place& where, const View<double>& value,
                                  const View<double>& exact, Shown shown, double* scratch) const {
        if (shown == Shown::yes && own != nullptr && (taped >> static_cast<int>(site) & 1) != 0)
            keep(team, site, where, value, exact);
        if (((shown == Shown::unseen ? repeated : altered) >> static_cast<int>(site) & 1) == 0) return;
        const int h = where.head - first_head;
        for (int a = first[h]; a < first[h + 1]; ++a) {
            const Alteration& change = alterations[a];
            if ((change.sites >> static_cast<int>(site) & 1) == 0) continue;
            if (shown == Shown::unseen && !change.at_repetitions) continue;
            if (change.kind == Alteration::Kind::flip)
                flip(team, change, site, where, value, exact);
            else
                inject(team, change, (score_tiles >> static_cast<int>(site) & 1) != 0, where, value, scratch);
        }
    }

  private:
    template <class Team>
    FAULTLINE_HD void keep(const Team& team, Site site, const Place& where, const View<double>& value,
                           const View<double>& exact) const {
        const auto used = static_cast<std::ptrdiff_t>(own[0]);
        team.sync();  // everybody has read it
        const std::ptrdiff_t count = value.rows * value.cols, at = used == 0 ? 1 : used;
        const std::ptrdiff_t end = at + tape_fields + 2 * count;
        double* to = own + at;
        if (end <= capacity) {
            if (team.rank() == 0) {
                const double fields[tape_fields] = {
                    static_cast<double>(site),         static_cast<double>(where.head),
                    static_cast<double>(where.query0), static_cast<double>(where.key0),
                    static_cast<double>(where.q_tile), static_cast<double>(where.k_tile),
                    static_cast<double>(where.part),   static_cast<double>(where.visible0),
                    where.biased ? 1.0 : 0.0,          static_cast<double>(value.rows),
                    static_cast<double>(value.cols)};
                for (std::ptrdiff_t i = 0; i < tape_fields; ++i) to[i] = fields[i];
            }
            to += tape_fields;
            each(team, value.rows, value.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                to[i * value.cols + j] = value(i, j);
                to[count + i * value.cols + j] = exact(i, j);
            });
        }
        if (team.rank() == 0) own[0] = static_cast<double>(end);  // beyond its capacity, the host says so
        team.sync();
    }

    /// SignFlip of experiments/verdict.
    template <class Team>
    FAULTLINE_HD static void flip(const Team& team, const Alteration& change, Site site, const Place& where,
                                  const View<double>& value, const View<double>& exact) {
        const auto place = static_cast<std::uint64_t>(site), head = static_cast<std::uint64_t>(where.head),
                   tile = (static_cast<std::uint64_t>(where.q_tile) << 32) | static_cast<std::uint64_t>(where.k_tile),
                   part = static_cast<std::uint64_t>(where.part);
        const RandomStream stream = part == 0 ? RandomStream(change.seed, change.number, place, head, tile)
                                              : RandomStream(change.seed, change.number, place, head, tile, part);
        each(team, value.rows, value.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const auto element = static_cast<std::uint64_t>(i * value.cols + j);
            if ((stream.bits(element / 64) >> element % 64 & 1) == 0) return;
            const double error = value(i, j) - exact(i, j);
            if (error != 0 && fabs(error) < infinity()) value(i, j) = exact(i, j) - error;
        });
    }

    /// apply_fault of injectors/apply.cpp.
    template <class Team>
    FAULTLINE_HD static void inject(const Team& team, const Alteration& a, bool masked, const Place& where,
                                    const View<double>& value, double* scratch) {
        if (a.magnitude == 0) return;
        const std::ptrdiff_t visible0 = masked ? where.visible0 : PTRDIFF_MAX / 2;
        const bool skip_zeros = masked && where.biased;
        const auto seen = [&](std::ptrdiff_t i) {
            if (visible0 >= value.cols) return value.cols;
            const std::ptrdiff_t n = visible0 + i;
            return n < 0 ? std::ptrdiff_t{0} : (n < value.cols ? n : value.cols);
        };
        const auto touched = [&](double x) { return fabs(x) < infinity() && !(skip_zeros && x == 0); };
        if (team.rank() == 0) {
            double squared = 0, count = 0;
            sum_squares(
                value.rows, seen,
                [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                    const double x = value(i, j);
                    return touched(x) ? x * x : -1.0;
                },
                squared, count);
            *scratch = count == 0 ? 0.0 : a.magnitude * ::sqrt(squared / count);
        }
        team.sync();
        const double amplitude = *scratch;
        const std::uint64_t tile =
            (static_cast<std::uint64_t>(where.query0) << 32) | static_cast<std::uint64_t>(where.key0);
        const RandomStream elements = tile_stream(a, fault_stream::element_signs, tile, where.part);
        const RandomStream rounds = tile_stream(a, fault_stream::roundings, tile, where.part);
        const RandomStream columns = column_stream(a);
        const bool stochastic = a.hold == Alteration::Hold::stochastic;
        each(team, value.rows, value.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const double x = value(i, j);
            if (j >= seen(i) || !touched(x)) return;
            const auto element = static_cast<std::uint64_t>(i * value.cols + j);
            const double asked = asked_change(
                a, x, amplitude, [&] { return drawn_sign(columns, static_cast<std::uint64_t>(j)); },
                [&] { return drawn_sign(elements, element); });
            value(i, j) = held_change(a, x + asked, stochastic ? stochastic_bits(rounds, element) : 0);
        });
    }
};

}  // namespace faultline::emulated
