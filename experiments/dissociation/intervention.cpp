// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/intervention.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using Kind = Intervention::Kind;

constexpr std::array<std::string_view, 6> kinds{"none", "project", "qk_norm", "guard", "qk_clip", "repair"};
constexpr std::array<std::string_view, 7> actions{"qk_norm",      "qk_clip",         "repair",  "lower_rate",
                                                  "tighter_clip", "reset_optimizer", "fp32_ffn"};
constexpr std::array<std::string_view, 4> monitors{"max_logit", "sigma_q", "grad_norm", "saturated"};
constexpr std::array<std::string_view, 4> sides_names{"both", "either", "left", "right"};
constexpr std::array<std::string_view, 4> removals{"leading", "elsewhere", "shrink", "overshoot"};
constexpr std::array<std::string_view, 2> scales{"continuous", "unit"};
constexpr std::int64_t widest = 1 << 20;  // faultline train's largest width

/// Keys that a kind takes.
std::span<const std::string_view> keys_of(Kind kind) {
    static constexpr std::array<std::string_view, 3> project{"sides", "removal", "k"};
    static constexpr std::array<std::string_view, 6> guard{"action", "monitor", "threshold", "scale", "factor", "tau"};
    static constexpr std::array<std::string_view, 1> clip{"tau"}, repair{"from"};
    switch (kind) {
        case Kind::project:
            return project;
        case Kind::guard:
            return guard;
        case Kind::qk_clip:
            return clip;
        case Kind::repair:
            return repair;
        default:
            return {};
    }
}

class Parser {
  public:
    explicit Parser(std::string_view text) : text_(text) {}

    Intervention parse() {
        std::string_view rest = text_;
        const auto next = [&] {
            const std::size_t end = std::min(rest.find(':'), rest.size());
            const std::string_view part = rest.substr(0, end);
            rest.remove_prefix(std::min(end + 1, rest.size()));
            return part;
        };
        out_.kind = one_of<Kind>("", next(), kinds);
        while (!rest.empty()) option(next());
        expect_read();
        return out_;
    }

  private:
    [[noreturn]] void fail(const std::string& what) const {
        throw RequestError(fmt::format("intervention {}: {}", in_quotes(text_), what));
    }

    /// Options of a guard that its action does not read or that change nothing, and a threshold that its monitor never passes.
    void expect_read() const {
        if (out_.kind != Kind::guard) return;
        if (out_.factor == 1) fail("factor=1: changes nothing: expected another factor, as factor=0.1");
        if (out_.monitor == Monitor::saturated && out_.threshold >= 1)
            fail(fmt::format("threshold: {}: saturated is a fraction of the rows: expected below 1, as threshold=0.5",
                             out_.threshold));
        const GuardAction action = out_.action;
        const bool has_factor = action == GuardAction::lower_rate || action == GuardAction::tighter_clip;
        const std::array<std::tuple<std::string_view, bool, std::string_view>, 3> of{
            {{"scale", action == GuardAction::qk_norm, "action=qk_norm"},
             {"factor", has_factor, "action=lower_rate or action=tighter_clip"},
             {"tau", action == GuardAction::qk_clip, "action=qk_clip"}}};
        for (const auto& [key, read, with] : of)
            if (!read && std::find(given_.begin(), given_.end(), key) != given_.end())
                fail(fmt::format("{}: means nothing with action={}: expected {}", key, name(action), with));
    }

    template <class T>
    T one_of(std::string_view key, std::string_view value, std::span<const std::string_view> names) const {
        for (std::size_t i = 0; i < names.size(); ++i)
            if (names[i] == value) return static_cast<T>(i);
        fail(fmt::format("{}{}{}: {}", key, key.empty() ? "" : "=", in_quotes(value), expected_one_of(value, names)));
    }

    double number(std::string_view key, std::string_view value) const {
        double x = 0;
        const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
        if (value.empty() || error != std::errc{} || end != value.data() + value.size() || !std::isfinite(x) || x <= 0)
            fail(fmt::format("{}={}: expected a number above 0", key, value));
        using Fp32 = std::numeric_limits<float>;  // what is compared with them and multiplied by them
        if (x < Fp32::min() || x > Fp32::max())
            fail(fmt::format("{}={}: expected a number above 0 that fp32 has, 1.2e-38 to 3.4e38", key, value));
        return x;
    }

    std::int64_t count(std::string_view key, std::string_view value, std::int64_t least, std::int64_t most) const {
        std::int64_t n = 0;
        const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
        if (value.empty() || error != std::errc{} || end != value.data() + value.size() || n < least)
            fail(fmt::format("{}={}: expected an integer of {} or more", key, value, least));
        if (n > most) fail(fmt::format("{}={}: expected an integer from {} to {}", key, value, least, most));
        return n;
    }

    void option(std::string_view word) {
        const std::size_t equals = std::min(word.find('='), word.size());
        const std::string_view key = word.substr(0, equals), value = word.substr(std::min(equals + 1, word.size()));
        bool known = false;
        for (const std::string_view k : keys_of(out_.kind)) known = known || k == key;
        if (!known) {
            const auto keys = keys_of(out_.kind);
            fail(fmt::format("{}: {}", in_quotes(word),
                             keys.empty()
                                 ? fmt::format("{} takes no options", kinds[static_cast<std::size_t>(out_.kind)])
                                 : expected_one_of(key, keys)));
        }
        if (std::find(given_.begin(), given_.end(), key) != given_.end())
            fail(fmt::format("{}: is there twice: expected it once", key));
        given_.push_back(key);
        if (key == "sides") out_.sides = one_of<Sides>(key, value, sides_names);
        if (key == "removal") out_.removal = one_of<Removal>(key, value, removals);
        if (key == "k") out_.k = static_cast<int>(count(key, value, 1, widest));
        if (key == "action") out_.action = one_of<GuardAction>(key, value, actions);
        if (key == "monitor") out_.monitor = one_of<Monitor>(key, value, monitors);
        if (key == "threshold") out_.threshold = number(key, value);
        if (key == "scale") out_.continuous = one_of<int>(key, value, scales) == 0;
        if (key == "factor") out_.factor = number(key, value);
        if (key == "tau") out_.tau = number(key, value);
        if (key == "from") out_.from = count(key, value, 0, std::numeric_limits<std::int64_t>::max());
    }

    std::string_view text_;
    std::vector<std::string_view> given_;
    Intervention out_;
};

}  // namespace

std::string_view name(GuardAction action) { return actions[static_cast<std::size_t>(action)]; }
std::string_view name(Monitor monitor) { return monitors[static_cast<std::size_t>(monitor)]; }

Intervention parse_intervention(std::string_view text) { return Parser(text).parse(); }

std::string to_string(const Intervention& x) {
    const Intervention plain;
    std::string out(kinds[static_cast<std::size_t>(x.kind)]);
    if (x.sides != plain.sides) out += fmt::format(":sides={}", name(x.sides));
    if (x.removal != plain.removal) out += fmt::format(":removal={}", name(x.removal));
    if (x.k != plain.k) out += fmt::format(":k={}", x.k);
    if (x.action != plain.action) out += fmt::format(":action={}", name(x.action));
    if (x.monitor != plain.monitor) out += fmt::format(":monitor={}", name(x.monitor));
    if (x.threshold != plain.threshold) out += fmt::format(":threshold={}", x.threshold);
    if (x.continuous != plain.continuous) out += ":scale=unit";
    if (x.factor != plain.factor) out += fmt::format(":factor={}", x.factor);
    if (x.tau != plain.tau) out += fmt::format(":tau={}", x.tau);
    if (x.from != plain.from) out += fmt::format(":from={}", x.from);
    return out;
}

}  // namespace faultline
