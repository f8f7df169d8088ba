// SPDX-License-Identifier: Apache-2.0
// Formats and rounding modes by name, for plans, command lines and records. Host only.
#pragma once

#include <faultline/format/format.hpp>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace faultline {

struct NamedFormat {
    std::string_view name;
    Format format;
    std::string_view source;  ///< the standard that defines it
};

/// Every named format, widest first: exact binary64 fp32 tf32 bf16 fp16 e5m2 e4m3 e3m2 e2m3 e2m1.
[[nodiscard]] std::span<const NamedFormat> all_formats();

/// "bf16"; with the overflow policy that is not the default, "e4m3-nosat" or "fp16-sat". A format built by hand is
/// described by its fields, e.g. "p7[-30,31]" (not a name that find_format reads).
[[nodiscard]] std::string name(Format f);

/// The format of that name, the suffixes -sat and -nosat included; nothing if there is none.
[[nodiscard]] std::optional<Format> find_format(std::string_view name);

/// "nearest_even", ...: the enumerator's own name.
[[nodiscard]] std::string_view name(Rounding mode);

/// The mode of that name, or of its short form RNE, RNA, RZ, RU, RD, RTO, SR; nothing if there is none.
[[nodiscard]] std::optional<Rounding> find_rounding(std::string_view name);

/// All modes, in the order of the enumeration.
[[nodiscard]] std::span<const Rounding> all_roundings();

/// What is wrong with a format built by hand, in one sentence that names the field and what was expected; empty if it is
/// a format that every function here takes.
[[nodiscard]] std::string validate(Format f);

}  // namespace faultline
