// SPDX-License-Identifier: Apache-2.0
#include <faultline/injectors/apply.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include <fmt/format.h>

#include <faultline/base/clones.hpp>
#include <faultline/base/error.hpp>
#include <faultline/cpu/alteration_law.hpp>
#include <faultline/format/bulk.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

using namespace fault_stream;

std::uint64_t site_number(const Fault& fault) {
    if (const Site* site = std::get_if<Site>(&fault.site)) return index(*site);
    return 1000 + static_cast<std::uint64_t>(std::get<ModelSite>(fault.site));
}

RandomStream tile_stream(const Fault& fault, const FaultPlace& place, std::uint64_t purpose) {
    return RandomStream(fault.seed, purpose, site_number(fault), place.step, place.layer, place.batch, place.head,
                        place.tile, place.part);
}

double step_sign(const Fault& fault, const FaultPlace& place, std::ptrdiff_t head) {
    const RandomStream steps(fault.seed, step_signs, site_number(fault), place.layer);
    return sign_of_bit(steps.child(static_cast<std::uint64_t>(place.step)).bits(static_cast<std::uint64_t>(head)), 0);
}
double flip_sign(const Fault& fault, const FaultPlace& place) {
    return (place.step / fault.period) % 2 == 0 ? 1.0 : -1.0;
}

/// One sign of a pair of heads from (seed, layer, pair); the other head of the pair has the opposite one, so that any even
/// number of heads is balanced. Independent signs would make the law the same as `fixed` for every second pair of heads.
double head_sign(const Fault& fault, int layer, int head) {
    const RandomStream stream(fault.seed, head_signs, site_number(fault), layer);
    const double sign = sign_of_bit(stream.bits(static_cast<std::uint64_t>(head / 2)), 0);
    return head % 2 == 0 ? sign : -sign;
}

/// The sign of the law at an element, laws `operand` and `multiplicative` excepted: a row of signs for each row of the
/// tile, asked for in the order of the rows.
class Signs {
  public:
    Signs(const Fault& fault, const FaultPlace& place, std::ptrdiff_t cols)
        : law_(fault.law), stream_(tile_stream(fault, place, element_signs)), row_(static_cast<std::size_t>(cols)) {
        switch (law_) {
            case Law::per_head:
                for (std::ptrdiff_t j = 0; j < cols; ++j) {
                    const int head = place.heads > 1 ? static_cast<int>(j * place.heads / cols) : place.head;
                    row_[static_cast<std::size_t>(j)] = head_sign(fault, place.layer, head);
                }
                return;
            case Law::per_column: {
                const RandomStream columns(fault.seed, column_signs, site_number(fault), place.layer, place.head);
                for (std::size_t j = 0; j < row_.size(); ++j) row_[j] = sign_of_bit(columns.bits(j / 64), j % 64);
                return;
            }
            case Law::random_step: {
                for (std::ptrdiff_t j = 0; j < cols; ++j)
                    row_[static_cast<std::size_t>(j)] =
                        step_sign(fault, place, place.heads > 1 ? j * place.heads / cols : place.head);
                return;
            }
            case Law::flip:
                std::fill(row_.begin(), row_.end(), flip_sign(fault, place));
                return;
            default:
                std::fill(row_.begin(), row_.end(), 1.0);
        }
    }
    const std::vector<double>& row(std::ptrdiff_t i) {
        if (law_ != Law::random) return row_;
        std::uint64_t bits = 0;
        for (std::size_t j = 0; j < row_.size(); ++j) {
            const std::uint64_t element = static_cast<std::uint64_t>(i) * row_.size() + j;
            if (j == 0 || element % 64 == 0) bits = stream_.bits(element / 64);
            row_[j] = sign_of_bit(bits, element % 64);
        }
        return row_;
    }

  private:
    Law law_;
    RandomStream stream_;
    std::vector<double> row_;
};

/// Which columns the fault's heads own: all, unless the columns are blocks of heads and the fault names some.
std::vector<char> wanted_columns(const Fault& fault, const FaultPlace& place, std::ptrdiff_t cols) {
    std::vector<char> wanted(static_cast<std::size_t>(cols), 1);
    if (place.heads > 1 && !fault.heads.empty())
        for (std::ptrdiff_t j = 0; j < cols; ++j)
            wanted[static_cast<std::size_t>(j)] = fault.touches_head(static_cast<int>(j * place.heads / cols)) ? 1 : 0;
    return wanted;
}

// Loops over a row: no call and no branch, so that they run in vectors; a fault at the score gradient
// passes most of a million elements a step.

constexpr std::size_t lanes = 8;

template <class T>
[[gnu::always_inline]] inline bool widen(const T* from, double* to, std::size_t n) {
    double sum = 0;
    for (std::size_t j = 0; j < n; ++j) to[j] = static_cast<double>(from[j]);
    for (std::size_t first = 0; first < n; first += lanes) {
        double beyond[lanes] = {};
        for (std::size_t l = 0; l < std::min(lanes, n - first); ++l) beyond[l] = to[first + l] - to[first + l];
        for (const double x : beyond) sum += x;
    }
    return sum == 0;  // x - x is 0 where x is finite, else no number
}
/// Whether all of a row are finite; to <- from.
FAULTLINE_CLONES bool take_row(const float* from, double* to, std::size_t n) { return widen(from, to, n); }
FAULTLINE_CLONES bool take_row(const double* from, double* to, std::size_t n) { return widen(from, to, n); }

FAULTLINE_CLONES void sum_of(const double* x, const double* asked, double* changed, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) changed[j] = x[j] + asked[j];
}

FAULTLINE_CLONES void sum_squares_of(const double* x, std::size_t n, double (&lane)[square_lanes]) {
    std::size_t j = 0;
    for (; j + square_lanes <= n; j += square_lanes)
        for (std::size_t l = 0; l < square_lanes; ++l) lane[l] += x[j + l] * x[j + l];
    for (std::size_t l = 0; j + l < n; ++l) lane[l] += x[j + l] * x[j + l];
}

template <class T>
[[gnu::always_inline]] inline void narrow(const double* changed, double* x, T* row, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) {
        const T held = static_cast<T>(changed[j]);
        row[j] = held;
        x[j] = static_cast<double>(held) - x[j];
    }
}
/// row <- changed; x <- the change.
FAULTLINE_CLONES void give_row(const double* changed, double* x, float* row, std::size_t n) {
    narrow(changed, x, row, n);
}
FAULTLINE_CLONES void give_row(const double* changed, double* x, double* row, std::size_t n) {
    narrow(changed, x, row, n);
}

/// What is recorded of a row, in lanes that are joined at its end: the order is fixed, and no value of the tile depends on
/// it.
FAULTLINE_CLONES void record_row(const double* e, const double* asked, std::size_t n, Realised& found) {
    double sum[lanes] = {}, squared[lanes] = {}, absolute[lanes] = {}, wanted[lanes] = {}, wanted_squared[lanes] = {};
    std::size_t j = 0;
    const auto add = [&](std::size_t l) __attribute__((always_inline)) {
        sum[l] += e[j + l];
        squared[l] += e[j + l] * e[j + l];
        absolute[l] += std::fabs(e[j + l]);
        wanted[l] += asked[j + l];
        wanted_squared[l] += asked[j + l] * asked[j + l];
    };
    for (; j + lanes <= n; j += lanes)
        for (std::size_t l = 0; l < lanes; ++l) add(l);
    for (std::size_t l = 0; j + l < n; ++l) add(l);
    for (std::size_t l = 0; l < lanes; ++l) {
        found.sum += sum[l];
        found.sum_squared += squared[l];
        found.sum_abs += absolute[l];
        found.asked_sum += wanted[l];
        found.asked_squared += wanted_squared[l];
    }
}

/// The tile's rows, one at a time.
class Rows {
  public:
    Rows(const Fault& fault, const FaultPlace& place, Format format, std::ptrdiff_t cols)
        : fault_(fault),
          place_(place),
          format_(format),
          roundings_(tile_stream(fault, place, roundings)),
          cols_(cols),
          wanted_(wanted_columns(fault, place, cols)),
          some_columns_(std::ranges::find(wanted_, 0) != wanted_.end()),
          x_(static_cast<std::size_t>(cols)),
          asked_(x_.size()),
          changed_(x_.size()) {}

    /// Takes row i: its values as far as they are seen, and whether the fault touches all of these.
    template <class T>
    void take(const T* row, std::ptrdiff_t i) {
        row_ = i;
        // Written so that a visible0 near the largest number does not overflow.
        seen_ = static_cast<std::size_t>(
            place_.visible0 >= cols_ ? cols_ : std::clamp<std::ptrdiff_t>(place_.visible0 + i, 0, cols_));
        const bool finite = take_row(row, x_.data(), seen_);
        whole_ = finite && !some_columns_ && !place_.skip_zeros;
    }
    /// Count of the touched elements, and the row's squares as alteration_law.hpp adds them.
    double squares(Realised& found) const {
        double lane[square_lanes] = {};
        if (whole_) {
            sum_squares_of(x_.data(), seen_, lane);
            found.count += static_cast<double>(seen_);
        } else {
            for (std::size_t j = 0; j < seen_; ++j) {
                if (!touched(j)) continue;
                lane[j % square_lanes] += x_[j] * x_[j];
                found.count += 1;
            }
        }
        return joined_lanes(lane);
    }
    /// What the law asks for, held in the format; into the row where it is touched.
    template <class T>
    void change(double amplitude, Signs& signs, T* row, Realised& found) {
        ask(amplitude, signs);
        sum_of(x_.data(), asked_.data(), changed_.data(), seen_);
        hold(std::span(changed_).first(seen_));
        if (whole_) {
            give_row(changed_.data(), x_.data(), row, seen_);
        } else {
            for (std::size_t j = 0; j < seen_; ++j) {
                if (touched(j)) {
                    row[j] = static_cast<T>(changed_[j]);
                    x_[j] = static_cast<double>(row[j]) - x_[j];
                } else {
                    x_[j] = asked_[j] = 0;
                }
            }
        }
        record_row(x_.data(), asked_.data(), seen_, found);
    }

  private:
    [[nodiscard]] bool touched(std::size_t j) const {
        return std::isfinite(x_[j]) && !(place_.skip_zeros && x_[j] == 0) && wanted_[j] != 0;
    }

    /// Rounds where the fault says so. Float storage rounds to nearest by itself.
    void hold(std::span<double> seen) const {
        if (fault_.hold == Hold::exact || is_exact(format_)) return;
        if (fault_.hold == Hold::nearest) return round_bulk(seen, format_);
        round_bulk(seen, format_, Rounding::stochastic, roundings_, static_cast<std::uint64_t>(row_ * cols_));
    }

    void ask(double amplitude, Signs& signs) {
        const std::vector<double>& sign = signs.row(row_);
        const bool in_ulps = fault_.unit == Fault::Unit::ulps;
        if (fault_.law == Law::multiplicative) {
            const double factor = fault_.magnitude * (in_ulps ? ulp(1.0, format_) : 1.0);
            for (std::size_t j = 0; j < seen_; ++j) asked_[j] = factor * x_[j];
            return;
        }
        if (in_ulps) {
            for (std::size_t j = 0; j < seen_; ++j)
                asked_[j] = std::isfinite(x_[j]) ? fault_.magnitude * ulp(x_[j], format_) : 0.0;
        } else if (fault_.by_value) {
            for (std::size_t j = 0; j < seen_; ++j) asked_[j] = fault_.magnitude * x_[j];
        } else {
            std::fill_n(asked_.begin(), seen_, amplitude);
        }
        if (fault_.law == Law::operand) {
            for (std::size_t j = 0; j < seen_; ++j) asked_[j] *= static_cast<double>((x_[j] > 0) - (x_[j] < 0));
        } else {
            for (std::size_t j = 0; j < seen_; ++j) asked_[j] *= sign[j];
        }
    }

    const Fault& fault_;
    const FaultPlace& place_;
    Format format_;
    RandomStream roundings_;
    std::ptrdiff_t cols_, row_ = 0;
    std::size_t seen_ = 0;
    std::vector<char> wanted_;
    bool some_columns_, whole_ = false;
    std::vector<double> x_, asked_, changed_;
};

}  // namespace

template <class T>
Realised apply_fault(const Fault& fault, const FaultPlace& place, Format format, MatrixView<T> values) {
    if (fault.format) format = *fault.format;
    if (fault.unit == Fault::Unit::ulps && is_exact(format))
        throw RequestError(fmt::format(
            "fault \"{}\": is in ulps, and site {} is exact: expected a magnitude relative to the rms, or format=NAME",
            to_string(fault), site_name(fault)));
    // A column of row quantities is as good as one row, and takes its random numbers by the group.
    if (values.cols == 1 && values.stride == 1 && place.visible0 >= values.rows && place.heads <= 1 &&
        fault.law != Law::per_column)
        values = MatrixView<T>(values.data, 1, values.rows);
    Rows rows(fault, place, format, values.cols);
    Realised found;
    double of_rows[square_lanes] = {};
    for (std::ptrdiff_t i = 0; i < values.rows; ++i) {
        rows.take(values.row(i), i);
        of_rows[i % square_lanes] += rows.squares(found);
    }
    found.value_squared = joined_lanes(of_rows);
    if (fault.magnitude == 0 || found.count == 0) return found;
    const double amplitude = fault.magnitude * std::sqrt(found.value_squared / found.count);
    Signs signs(fault, place, values.cols);
    for (std::ptrdiff_t i = 0; i < values.rows; ++i) {
        rows.take(values.row(i), i);
        rows.change(amplitude, signs, values.row(i), found);
    }
    return found;
}

Alteration alteration_of(const Fault& fault, const FaultPlace& place, Format format) {
    if (fault.format) format = *fault.format;
    const bool in_ulps = fault.unit == Fault::Unit::ulps;
    Alteration a;
    a.format = format;
    a.magnitude = fault.magnitude;
    a.seed = fault.seed;
    a.site_number = site_number(fault);
    a.step = place.step;
    a.layer = place.layer;
    a.batch = place.batch;
    a.head = place.head;
    if (fault.hold != Hold::exact && !is_exact(format))
        a.hold = fault.hold == Hold::nearest ? Alteration::Hold::nearest : Alteration::Hold::stochastic;
    if (in_ulps)
        a.size = Alteration::Size::of_ulp;
    else if (fault.by_value)
        a.size = Alteration::Size::of_value;
    switch (fault.law) {
        case Law::fixed:
            break;
        case Law::per_head:
            a.sign = head_sign(fault, place.layer, place.head);
            break;
        case Law::per_column:
            a.sign_of = Alteration::Sign::of_column;
            break;
        case Law::random:
            a.sign_of = Alteration::Sign::of_element;
            break;
        case Law::random_step:
            a.sign = step_sign(fault, place, place.head);
            break;
        case Law::flip:
            a.sign = flip_sign(fault, place);
            break;
        case Law::operand:
            a.sign_of = Alteration::Sign::of_operand;
            break;
        case Law::multiplicative:
            a.size = Alteration::Size::of_value;
            a.magnitude = fault.magnitude * (in_ulps ? ulp(1.0, format) : 1.0);
            break;
    }
    return a;
}

template Realised apply_fault(const Fault&, const FaultPlace&, Format, MatrixView<double>);
template Realised apply_fault(const Fault&, const FaultPlace&, Format, MatrixView<float>);

}  // namespace faultline
