// SPDX-License-Identifier: Apache-2.0
// A fault: site x law x magnitude, as data. It can be written as one word, compared, printed and read back:
//
//   delta:multiplicative:0.1            delta times 1.1, in every layer and head
//   o_cast:operand:1ulp:layers=1        one ulp of o's format away from zero, in layer 1
//   ffn_output:flip@8:2%:from=500          2% of the tile's rms, sign reversed every 8 steps, from step 500 on
//
// The laws are those that tell a coherent fault from an incoherent one of the same size; they follow the abstract of
// arXiv 2608.02091, whose own definitions are not known.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <faultline/format/format.hpp>
#include <faultline/injectors/model_hook.hpp>
#include <faultline/plan/site.hpp>

namespace faultline {

/// How the sign and size of the error of an element are chosen. a is the fault's magnitude (with its sign) in the site's
/// unit, see Fault. Temporal coherence, the persistence of a head's sign over steps, is 1 for fixed, per_head, per_column,
/// multiplicative and, where values keep their sign, operand; 0 to 1 for flip; that of chance for the two random laws.
enum class Law : unsigned char {
    fixed,           ///< a everywhere, in every step
    per_head,        ///< s_h a; s_h from (seed, layer, head), and heads 2j and 2j+1 get opposite signs
    per_column,      ///< s_c a; s_c from (seed, layer, site, column): a persistent direction that is no constant
    random,          ///< +-a, a sign for each element and step
    random_step,     ///< +-a, one sign for each layer, head and step: incoherent in time alone
    flip,            ///< a, sign reversed every `period` steps
    operand,         ///< a sign(x): away from zero for a > 0, toward it for a < 0
    multiplicative,  ///< x (1 + magnitude)
};

struct LawInfo {
    Law law;
    std::string_view name;
    std::string_view description;
};
[[nodiscard]] std::span<const LawInfo> laws();
[[nodiscard]] std::string_view name(Law law);
[[nodiscard]] std::optional<Law> find_law(std::string_view name);

/// How a changed value is held where the site has a format: a kernel holds no others.
enum class Hold : unsigned char {
    stochastic,  ///< rounded so that the mean change is the one asked for, also where it is less than an ulp
    nearest,     ///< rounded to nearest: changes of less than half an ulp vanish
    exact,       ///< not rounded
};

struct Fault {
    enum class Unit : unsigned char {
        relative,  ///< of the rms of the tile's values (multiplicative: of the value itself)
        ulps,      ///< of the site's format at the value (multiplicative: at 1)
    };

    std::variant<Site, ModelSite> site = Site::delta;
    Law law = Law::fixed;
    int period = 1;        ///< steps, for `flip`
    double magnitude = 0;  ///< its sign is the sign of the error
    bool by_value =
        false;  ///< sizes are proportional to the value, |error| = magnitude |x|: the laws of the sign at the
                ///< pattern of `multiplicative`, whose control in time is then random_step or flip
    Unit unit = Unit::relative;
    Hold hold = Hold::stochastic;
    bool sampled =
        false;  ///< what it did may be recorded of the first sequence of each micro-batch alone, where that is cheaper
    std::optional<Format> format{};  ///< in place of the format of the plan's rule at the site
    std::vector<int> layers{};       ///< empty: all
    std::vector<int> heads{};        ///< empty: all; model sites know heads only as blocks of columns
    int column = -1;        ///< model sites: this column alone (layer_norm_statistics: 0 mean, 1 deviation); -1: all
    std::int64_t from = 0;  ///< first step
    std::int64_t until = std::numeric_limits<std::int64_t>::max();  ///< first step without it again
    std::uint64_t seed = 0;

    [[nodiscard]] bool active(std::int64_t step, int layer) const;
    [[nodiscard]] bool touches_head(int head) const;
    friend bool operator==(const Fault&, const Fault&) = default;
};

/// SITE:LAW:MAGNITUDE[:KEY=VALUE...]. LAW as listed by laws(), with - or _; `flip@8`. MAGNITUDE: 0.1, 10%, -2ulp. Keys:
/// shape=value layers=0,2 heads=1 column=N from=N until=N seed=N hold=stochastic|nearest|exact format=bf16
/// record=all|sample. RequestError says what was expected.
[[nodiscard]] Fault parse_fault(std::string_view text);
/// The word that parse_fault reads back to the same value.
[[nodiscard]] std::string to_string(const Fault& fault);
/// Name of the site alone.
[[nodiscard]] std::string_view site_name(const Fault& fault);

}  // namespace faultline
