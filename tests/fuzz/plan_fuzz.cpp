// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/plan_toml.hpp>

#include "fuzz.hpp"

using namespace faultline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    fuzz::accepts([&] {
        const RoundingPlan plan = parse_plan(text, fuzz::file_name);
        const std::string written = to_toml(plan);
        fuzz::require(to_toml(parse_plan(written, fuzz::file_name)) == written,
                      "a plan survives being written and read");
    });
    return 0;
}
