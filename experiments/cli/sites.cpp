// SPDX-License-Identifier: Apache-2.0
// faultline sites: the named places in the schedule of an attention kernel where a value is rounded.
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/plan/site.hpp>

namespace faultline::cli {
namespace {

Status run(const Invocation& call) {
    Listing listing{"sites",
                    {{"name", "site", {}},
                     {"pass", "pass", {}},
                     {"shape", "shape", {}},
                     {"rounds", "rounds", {}},
                     {"unit", "unit", {}},
                     {"description", "value", {}, true}}};
    for (const SiteInfo& site : sites()) {
        const std::vector<std::string_view> row{site.name,        name(site.pass),
                                                name(site.shape), site.accumulates ? "sums" : "values",
                                                site.unit,        site.description};
        for (std::size_t c = 0; c < row.size(); ++c) listing.columns[c].values.emplace_back(row[c]);
    }
    present(listing, call);
    return Status::done;
}

}  // namespace

Command sites_command() {
    return {"sites", "List the sites: every place in a kernel where a value is rounded", "  faultline sites --json",
            [](Settings&) -> Run { return run; }};
}

}  // namespace faultline::cli
