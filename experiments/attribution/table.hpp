// SPDX-License-Identifier: Apache-2.0
// An attribution as a person reads it: the errors of plan and kernels side by side, then for each output that is wrong the
// sites that did it, with their sign, and the corrections, best first.
#pragma once

#include <string>

#include <faultline/attribution/attribution.hpp>

namespace faultline {

struct TableOptions {
    bool full = false;   ///< every site, of every output
    bool color = false;  ///< ANSI colours
};

/// Lines of at most 110 columns, each ended. Numbers that no double holds are in scientific notation.
[[nodiscard]] std::string table(const Attribution& attribution, const TableOptions& options = {});

/// "154%", "0.190%", "1.2e-07", "3.2e+4998x": an error relative to the truth.
[[nodiscard]] std::string error_text(const WideReal& relative);

}  // namespace faultline
