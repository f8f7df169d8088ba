// SPDX-License-Identifier: Apache-2.0
// One run of a sweep: what it is, by which key and name it is known, and its files in the sweep's folder.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace faultline::sweep {

struct Cell {
    std::string recipe;  ///< its name in the sweep; empty: the only one
    std::string source, intervention;
    std::uint64_t seed = 0;
    std::int64_t steps = 0;
    std::string key;   ///< 12 hexadecimal digits of the hash (XXH3-128) of all that the run is made of
    std::string name;  ///< RECIPE__SOURCE__INTERVENTION__seedN__KEY
    friend bool operator==(const Cell&, const Cell&) = default;
};

/// `identity`: all that decides the run, as text.
[[nodiscard]] std::string key_of(std::string_view identity);
/// For people, as a file's name: at most 200 characters, letters, digits, '.', '_' and '-'. The key tells apart what this
/// does not.
[[nodiscard]] std::string name_of(const Cell& cell);

/// FOLDER/runs/NAME…
struct CellFiles {
    std::string settings;  ///< .toml: what the run's process reads
    std::string record;    ///< .h5
    std::string log;       ///< .log: what the process said
    std::string lock;      ///< .lock: held by the process at work
    std::string result;    ///< .json: how it ended
};
[[nodiscard]] CellFiles files_of(const std::string& folder, const std::string& name);

/// FOLDER/cells.json: the runs of the sweep, in order. WorkError where it cannot be written; RequestError where there is none,
/// or it is none.
void write_cells(const std::string& folder, const std::vector<Cell>& cells);
[[nodiscard]] std::vector<Cell> read_cells(const std::string& folder);

}  // namespace faultline::sweep
