// SPDX-License-Identifier: Apache-2.0
// A sweep of runs that take a tenth of a second: two layers of width 16 on a text of 200 KB.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/record/record_reader.hpp>

#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {

/// Its file, sweep.toml in the folder; `matrix`, `train` and `more` are added to its tables.
inline std::string small_sweep(const Folder& folder, int steps, const std::string& matrix = "",
                               const std::string& train = "", const std::string& more = "") {
    folder.write("text", text_of_letters());
    folder.write("sweep.toml",
                 fmt::format("[matrix]\nsource = [\"delta:multiplicative:0.2\"]\ncheckpoint-every = 50\n{}\n[train]\n"
                             "data = \"{}\"\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 16\nbatch = 2\nsteps = {}\n"
                             "validation-batches = 1\n{}\n{}\n",
                             matrix, folder / "text", steps, train, more));
    return folder / "sweep.toml";
}

inline nlohmann::json status_of(const std::string& folder) {
    const Outcome run = run_program({"sweep", "status", folder, "--json"});
    EXPECT_EQ(run.status, 0) << run.err;
    return nlohmann::json::parse(run.out, nullptr, false);
}

/// Files of a kind among the runs, by name, sorted.
inline std::vector<std::string> run_files(const std::string& folder, const std::string& extension) {
    std::vector<std::string> found;
    if (!std::filesystem::exists(folder + "/runs")) return found;
    for (const auto& entry : std::filesystem::directory_iterator(folder + "/runs"))
        if (entry.path().string().ends_with(extension)) found.push_back(entry.path().string());
    std::sort(found.begin(), found.end());
    return found;
}

/// All series of all records by file and name.
inline std::map<std::string, std::vector<std::byte>> series_of(const std::string& folder) {
    std::map<std::string, std::vector<std::byte>> all;
    for (const std::string& path : run_files(folder, ".h5")) {
        const RecordReader reader(path);
        for (const std::string& name : reader.datasets())
            all[std::filesystem::path(path).filename().string() + "/" + name] = reader.read(name).bytes;
    }
    return all;
}

}  // namespace faultline::test
