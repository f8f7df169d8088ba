// SPDX-License-Identifier: Apache-2.0
// An attribution as one page to attach to an issue at a kernel's repository: tables, and maps of the local errors by tile as
// drawings inside the page. Nothing is loaded from anywhere, no script runs, and it prints in black on white.
#pragma once

#include <string>

#include <faultline/attribution/attribution.hpp>

namespace faultline {

/// What stands at the head of the page beside the attribution.
struct ReportContext {
    std::string title;         ///< empty: "Attribution of INPUT under PLAN"
    std::string command_line;  ///< as a shell takes it; empty: left out
};

/// The page, HTML 5, UTF-8. The same arguments give the same bytes.
[[nodiscard]] std::string html_report(const Attribution& attribution, const ReportContext& context = {});

}  // namespace faultline
