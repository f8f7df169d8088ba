// SPDX-License-Identifier: Apache-2.0
#include <faultline/injectors/apply.hpp>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/format/bulk.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

// What a stream is for: keeps persistent signs, element signs and roundings of one place apart.
constexpr std::uint64_t head_signs = 1, column_signs = 2, step_signs = 3, element_signs = 4, roundings = 5;

std::uint64_t site_number(const Fault& fault) {
    if (const Site* site = std::get_if<Site>(&fault.site)) return index(*site);
    return 1000 + static_cast<std::uint64_t>(std::get<ModelSite>(fault.site));
}

double sign_of_bit(std::uint64_t bits, std::uint64_t bit) { return (bits >> bit & 1) != 0 ? -1.0 : 1.0; }

RandomStream tile_stream(const Fault& fault, const FaultPlace& place, std::uint64_t purpose) {
    return RandomStream(fault.seed, purpose, site_number(fault), place.step, place.layer, place.batch, place.head,
                        place.tile, place.part);
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
                const RandomStream steps(fault.seed, step_signs, site_number(fault), place.layer);
                for (std::ptrdiff_t j = 0; j < cols; ++j) {
                    const auto head = place.heads > 1 ? j * place.heads / cols : place.head;
                    row_[static_cast<std::size_t>(j)] = sign_of_bit(
                        steps.child(static_cast<std::uint64_t>(place.step)).bits(static_cast<std::uint64_t>(head)), 0);
                }
                return;
            }
            case Law::flip:
                std::fill(row_.begin(), row_.end(), (place.step / fault.period) % 2 == 0 ? 1.0 : -1.0);
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

/// Rounds where the fault says so. Float storage rounds to nearest by itself.
void hold(const Fault& fault, const FaultPlace& place, Format format, std::vector<double>& row, std::ptrdiff_t i) {
    if (fault.hold == Hold::exact || is_exact(format)) return;
    if (fault.hold == Hold::nearest) return round_bulk(std::span(row), format);
    round_bulk(std::span(row), format, Rounding::stochastic, tile_stream(fault, place, roundings),
               static_cast<std::uint64_t>(i) * row.size());
}

}  // namespace

template <class T>
Realised apply_fault(const Fault& fault, const FaultPlace& place, Format format, MatrixView<T> values) {
    if (fault.format) format = *fault.format;
    const bool in_ulps = fault.unit == Fault::Unit::ulps;
    if (in_ulps && is_exact(format))
        throw RequestError(fmt::format(
            "fault \"{}\": is in ulps, and site {} is exact: expected a magnitude relative to the rms, or format=NAME",
            to_string(fault), site_name(fault)));
    const std::vector<char> wanted = wanted_columns(fault, place, values.cols);
    const auto touched = [&](double x, std::ptrdiff_t i, std::size_t j) {
        return std::isfinite(x) && !(place.skip_zeros && x == 0) && wanted[j] != 0 &&
               static_cast<std::ptrdiff_t>(j) < place.visible0 + i;
    };
    Realised found;
    for (std::ptrdiff_t i = 0; i < values.rows; ++i)
        for (std::ptrdiff_t j = 0; j < values.cols; ++j) {
            const auto x = static_cast<double>(values(i, j));
            if (!touched(x, i, static_cast<std::size_t>(j))) continue;
            found.count += 1;
            found.value_squared += x * x;
        }
    if (fault.magnitude == 0 || found.count == 0) return found;
    const double amplitude = fault.magnitude * std::sqrt(found.value_squared / found.count);
    Signs signs(fault, place, values.cols);
    std::vector<double> changed(static_cast<std::size_t>(values.cols));
    std::vector<double> asked(changed.size());
    for (std::ptrdiff_t i = 0; i < values.rows; ++i) {
        T* row = values.row(i);
        const std::vector<double>& sign = signs.row(i);
        for (std::size_t j = 0; j < changed.size(); ++j) {
            const auto x = static_cast<double>(row[j]);
            changed[j] = x;
            asked[j] = 0;
            if (!touched(x, i, j)) continue;
            if (fault.law == Law::multiplicative) {
                asked[j] = fault.magnitude * (in_ulps ? ulp(1.0, format) : 1.0) * x;
            } else {
                const double relative = fault.by_value ? fault.magnitude * x : amplitude;
                const double size = in_ulps ? fault.magnitude * ulp(x, format) : relative;
                const double s = fault.law == Law::operand ? static_cast<double>((x > 0) - (x < 0)) : sign[j];
                asked[j] = s * size;
            }
            changed[j] = x + asked[j];
        }
        hold(fault, place, format, changed, i);
        for (std::size_t j = 0; j < changed.size(); ++j) {
            const auto x = static_cast<double>(row[j]);
            if (!touched(x, i, j)) continue;
            row[j] = static_cast<T>(changed[j]);
            const double e = static_cast<double>(row[j]) - x;
            found.sum += e;
            found.sum_squared += e * e;
            found.sum_abs += std::abs(e);
            found.asked_sum += asked[j];
            found.asked_squared += asked[j] * asked[j];
        }
    }
    return found;
}

template Realised apply_fault(const Fault&, const FaultPlace&, Format, MatrixView<double>);
template Realised apply_fault(const Fault&, const FaultPlace&, Format, MatrixView<float>);

}  // namespace faultline
