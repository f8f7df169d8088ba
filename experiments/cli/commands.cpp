// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/command.hpp>

#include <algorithm>
#include <array>

namespace faultline::cli {

std::vector<Command> commands() {
    std::vector<Command> all{attribute_command(), identify_command(),    bisect_command(),     check_command(),
                             generate_command(),  train_command(),       dissociate_command(), sweep_command(),
                             probe_command(),     inspect_command(),     plans_command(),      sites_command(),
                             formats_command(),   corrections_command(), selftest_command()};
    constexpr std::array<std::string_view, 8> where_asked{"attribute", "identify", "bisect", "check",
                                                          "probe",     "selftest", "train",  "dissociate"};
    for (Command& command : all) command.with_ranks = command.name == "train";
    for (Command& command : all) command.on_device = std::ranges::find(where_asked, command.name) != where_asked.end();
    return all;
}

}  // namespace faultline::cli
