// SPDX-License-Identifier: Apache-2.0
// The sentence that refuses a plan file.
#pragma once

#include <string>

#include <faultline/base/error.hpp>
#include <faultline/plan/plan_toml.hpp>

namespace faultline {

/// Of a file f.toml with this text; "no error" where it is taken.
inline std::string error_of(const std::string& toml) {
    try {
        (void)parse_plan(toml, "f.toml");
    } catch (const RequestError& error) {
        return error.what();
    }
    return "no error";
}

}  // namespace faultline
