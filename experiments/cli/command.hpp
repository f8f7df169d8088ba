// SPDX-License-Identifier: Apache-2.0
// A command of the program: one file each, listed in commands(). To add one, write its file and its line there.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/cli/rank_group.hpp>
#include <faultline/cli/settings.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/record/manifest.hpp>

namespace faultline::cli {

/// What every command has.
struct Common {
    std::string output;        ///< -o: an HDF5 file; empty: none
    bool force = false;        ///< replace the file
    bool json = false;         ///< one JSON object on standard output in place of a text
    bool quiet = false;        ///< no progress, no remarks
    std::int64_t threads = 0;  ///< 0: one per hardware thread
    std::string device = "cpu";
    bool share_card = false;  ///< of commands with ranks: these may have one card
};

/// One call of the program, its settings read.
struct Invocation {
    const Settings& settings;
    const Common& common;
    std::string command_line;
    RankGroup& group;

    /// Whether progress and remarks are to go to standard error.
    [[nodiscard]] bool talks() const { return !common.quiet && group.speaks(); }
    /// Manifest of a file that this call writes.
    [[nodiscard]] Manifest manifest(std::string kind, std::uint64_t seed = 0) const {
        return make_manifest(std::move(kind), command_line, settings.print(), seed);
    }
};

/// The exit statuses: 0 done, 1 the work failed or was interrupted, 2 the request was wrong.
enum class Status : int { done = 0, failed = 1, refused = 2 };

using Run = std::function<Status(const Invocation&)>;

struct Command {
    std::string_view name;
    std::string_view summary;  ///< one line for `faultline --help`
    std::string_view example;  ///< at the foot of its own --help
    /// Declares the command's own settings and returns what runs it; what they are bound to lives in the returned function.
    Run (*declare)(Settings&);
    std::string_view output = "FILE.h5";  ///< what -o names, and what the help says of it
    std::string_view output_help = "Write the results as HDF5";
    std::string_view threads_help = "Worker threads; 0: one per hardware thread. Results do not depend on it";
    bool on_device = false;         ///< --device cuda is taken
    bool with_ranks = false;        ///< several processes may work on one call
    bool output_is_folder = false;  ///< one that may be there
};

Command attribute_command();
Command bisect_command();
Command check_command();
Command generate_command();
Command identify_command();
Command train_command();
Command probe_command();
Command dissociate_command();
Command sweep_command();
Command inspect_command();
Command plans_command();
Command sites_command();
Command formats_command();
Command corrections_command();
Command selftest_command();

/// All of them, in the order of --help.
[[nodiscard]] std::vector<Command> commands();

/// Where --device says that plans run. WorkError where the device is not there. Says on standard error which device it is
/// and what it may use of its memory, unless the call is to be quiet.
[[nodiscard]] const AttentionBackend& backend_of(const Invocation& call);

/// WorkError where --device names one that is not there. Commands call this or backend_of() when what they can refuse of the request
/// is refused and before they read or compute, so that a wrong request is exit 2 everywhere and nobody waits to hear of a card.
void expect_device(const Invocation& call);

}  // namespace faultline::cli
