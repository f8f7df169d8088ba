// SPDX-License-Identifier: Apache-2.0
// faultline corrections: the named changes of a plan that attribute compares.
#include <fmt/format.h>

#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/corrections/correction.hpp>

namespace faultline::cli {
namespace {

/// As it is written after the name.
std::string arguments_of(const CorrectionInfo& correction) {
    std::string text;
    switch (correction.arguments) {
        case Arguments::none:
            return text;
        case Arguments::sites:
            return ":SITE,…";
        case Arguments::layers:
            return "[:LAYER,…]";
        case Arguments::numbers:
            break;
    }
    for (const Parameter& parameter : correction.parameters)
        text += fmt::format("{}{}={:g}", text.empty() ? "[:" : ",", parameter.name, parameter.standard);
    return text + "]";
}

Status run(const Invocation& call) {
    Listing listing{"corrections",
                    {{"name", "correction", {}},
                     {"arguments", "arguments", {}},
                     {"function", "function", {}},
                     {"description", "what it does", {}, true}}};
    for (const CorrectionInfo& c : corrections()) {
        const std::vector<std::string> row{std::string(c.name), arguments_of(c),
                                           c.changes_function ? "another" : "the same",
                                           fmt::format("{} ({})", c.description, c.source)};
        for (std::size_t i = 0; i < row.size(); ++i) listing.columns[i].values.push_back(row[i]);
    }
    present(listing, call);
    return Status::done;
}

}  // namespace

Command corrections_command() {
    return {"corrections", "List the corrections that attribute compares", "  faultline corrections",
            [](Settings&) -> Run { return run; }};
}

}  // namespace faultline::cli
