// SPDX-License-Identifier: Apache-2.0
// Runs a Python script as an independent reader. FAULTLINE_PYTHON names an interpreter (a virtual environment's) in place
// of python3.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <string>

#include "support.hpp"

namespace faultline::test {

inline std::string interpreter() {
    const char* given = std::getenv("FAULTLINE_PYTHON");
    return given != nullptr ? given : "python3";
}

/// Runs the script with one argument; "" on success, else what it printed.
inline std::string python(const std::string& script, const std::string& argument) {
    const Folder folder;
    write_file(folder / "script.py", script);
    std::string command;
    for (const std::string& word : {interpreter(), folder / "script.py", argument})
        command.append(" '").append(word).append("'");
    command.append(" > '").append(folder / "said").append("' 2>&1");
    if (std::system(command.c_str()) == 0) return "";
    return "python failed: " + read_file(folder / "said");
}

inline bool python_has(std::initializer_list<const char*> modules) {
    std::string script;
    for (const char* module : modules) script += std::string("import ") + module + "\n";
    return python(script, "").empty();
}

}  // namespace faultline::test
