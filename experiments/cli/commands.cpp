// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/command.hpp>

namespace faultline::cli {

std::vector<Command> commands() {
    return {attribute_command(), identify_command(),   bisect_command(),      check_command(),   generate_command(),
            train_command(),     dissociate_command(), probe_command(),       inspect_command(), plans_command(),
            sites_command(),     formats_command(),    corrections_command(), selftest_command()};
}

}  // namespace faultline::cli
