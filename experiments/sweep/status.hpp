// SPDX-License-Identifier: Apache-2.0
// How far a sweep is, as text and as JSON (schema faultline.sweep-status/1).
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/sweep/cell_state.hpp>

namespace faultline::sweep {

struct Status {
    std::vector<Cell> cells;
    std::vector<CellState> states;  ///< parallel
    [[nodiscard]] std::size_t count(State state) const;
    std::vector<bool> unreadable;  ///< parallel: the run was done, and its record cannot be read; its state is failed
    [[nodiscard]] bool all_done() const;
    [[nodiscard]] bool any_unreadable() const;
};
/// As the locks, the results and the records of the folder say it.
[[nodiscard]] Status status_of(const std::string& folder, const std::vector<Cell>& cells);

/// The text with what is not printable escaped, as by escaped(), but for quotes and backslashes: of a sentence that was printed
/// once.
[[nodiscard]] std::string sentence(std::string_view text);
/// One line with the counts; then one for each run that is at work, stopped or failed, and for each that ended at a value that
/// is no number. `every`: for each run.
[[nodiscard]] std::string table(const Status& status, bool every);
/// "12 of 18 runs are done, 2 at work, 1 failed, 3 to do".
[[nodiscard]] std::string summary(const Status& status);
[[nodiscard]] std::string to_json(const Status& status);

}  // namespace faultline::sweep
