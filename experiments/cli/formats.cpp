// SPDX-License-Identifier: Apache-2.0
// faultline formats: the number formats that a rule may round to.
#include <fmt/format.h>

#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/format/block.hpp>
#include <faultline/format/names.hpp>

namespace faultline::cli {
namespace {

std::string specials(Format f) {
    std::string text = f.infinities ? "inf, " : "";
    switch (f.nans) {
        case NanKind::none:
            text += "no NaN";
            break;
        case NanKind::single_code:
            text += "one NaN";
            break;
        case NanKind::ieee:
            text += "NaN";
            break;
    }
    return f.saturates ? text + "; saturates" : text;
}

void add(Listing& listing, std::vector<std::string> row) {
    for (std::size_t c = 0; c < row.size(); ++c) listing.columns[c].values.push_back(std::move(row[c]));
}

Status run(const Invocation& call) {
    Listing listing{"formats",
                    {{"name", "format", {}},
                     {"bits", "bits", {}},
                     {"precision", "precision", {}},
                     {"exponents", "exponents", {}},
                     {"max", "largest", {}},
                     {"min_normal", "least normal", {}},
                     {"specials", "specials", {}},
                     {"source", "source", {}, true}}};
    for (const NamedFormat& named : all_formats()) {
        const Format f = named.format;
        if (is_exact(f)) {
            add(listing,
                {std::string(named.name), "64", "53", "", "", "", "nothing is rounded", std::string(named.source)});
            continue;
        }
        add(listing, {std::string(named.name), fmt::format("{}", code_bits(f)), fmt::format("{}", f.precision),
                      fmt::format("{}..{}", f.emin, f.emax), fmt::format("{:.5g}", max_finite(f)),
                      fmt::format("{:.5g}", min_normal(f)), specials(f), std::string(named.source)});
    }
    for (const NamedBlockFormat& named : all_block_formats()) {
        const Format f = named.format.element;
        add(listing,
            {std::string(named.name), fmt::format("{}", code_bits(f)), fmt::format("{}", f.precision),
             fmt::format("{}..{}", f.emin, f.emax), fmt::format("{:.5g}", max_finite(f)),
             fmt::format("{:.5g}", min_normal(f)), fmt::format("a scale for {} values", named.format.block_size),
             std::string(named.format.scale == ScaleKind::e8m0 ? "OCP Microscaling Formats 1.0" : "NVIDIA Blackwell")});
    }
    present(listing, call);
    return Status::done;
}

}  // namespace

Command formats_command() {
    return {"formats", "List the number formats", "  faultline formats", [](Settings&) -> Run { return run; }};
}

}  // namespace faultline::cli
