// SPDX-License-Identifier: Apache-2.0
// faultline: finds where a low-precision attention kernel goes wrong. One command a file; here is what they share: options,
// errors, exit statuses.
#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <new>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <faultline/base/error.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/cli/written_file.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/refusals.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/ranks/errors.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

constexpr std::int64_t most_threads = 4096;  // far beyond any machine this runs on; each has a stack

/// Files of a command beside that of -o, which --force replaces too.
std::string also_written(const Settings& settings) {
    for (const char* key : {"report", "junit"})
        if (settings.has(key)) return fmt::format(", and of --{}", key);
    return {};
}

bool writes_a_file(const Settings& settings) {
    const auto named = [&](const char* key) { return settings.has_value(key); };
    return named("output") || named("report") || named("junit");
}

/// One command, its options declared.
struct Prepared {
    Command command;
    Settings settings;
    Common common;
    Run run;
    CLI::App* app = nullptr;

    Prepared(const Command& c, CLI::App& program) : command(c), settings(std::string(c.name)) {
        run = command.declare(settings);
        settings.text("output", common.output, std::string(command.output), std::string(command.output_help));
        settings.short_name("output", 'o');
        settings.flag("force", common.force, "Replace files that are there: of -o" + also_written(settings));
        settings.flag("json", common.json, "Print one JSON object in place of a table");
        settings.flag("quiet", common.quiet, "No progress and no remarks on standard error");
        settings.integer("threads", common.threads, 0, "N", std::string(command.threads_help), most_threads);
        settings.text("device", common.device, "cpu|cuda", "Where kernels run");
        if (command.with_ranks)
            settings.flag("share-card", common.share_card,
                          "All ranks on the first card that they see, in turns: to try what is meant for more cards");
        app = program.add_subcommand(std::string(command.name), std::string(command.summary));
        settings.add_to(*app);
        app->footer(fmt::format("Example:\n{}", command.example));
    }
};

void check_device(const Prepared& prepared, const RankGroup& group) {
    const std::string& device = prepared.common.device;
    const std::string where = prepared.settings.where("device");
    constexpr std::array<std::string_view, 2> devices{"cpu", "cuda"};
    if (device != "cpu" && device != "cuda")  // "gpu", which is near to the one by its letters, means the other
        throw RequestError(fmt::format("{}: {}: {}", where, in_quotes(device),
                                       device == "gpu" || device == "GPU"
                                           ? "expected one of cpu, cuda (did you mean \"cuda\"?)"
                                           : expected_one_of(device, devices)));
    if (device == "cuda" && prepared.command.name == "sweep")
        throw RequestError(
            fmt::format("{}: a sweep's runs say it themselves: expected device = \"cuda\" in its [train]", where));
    if (device == "cuda" && !prepared.command.on_device)
        throw RequestError(fmt::format("{}: {} runs on the CPU alone: expected cpu", where, prepared.command.name));
    if (device != "cuda") return;
    (void)faultline::device::memory_limit();
    const Ranks* const ranks = group.ranks();
    if (ranks == nullptr) return;  // the command asks for the card, behind what may be wrong with the request
    const bool chosen = !prepared.common.share_card && choose_card(*ranks);
    // Before anything is read, so that nobody waits to hear of it.
    try {
        (void)faultline::device::info();
    } catch (const WorkError& error) {
        if (!chosen) throw;
        throw WorkError(fmt::format("{}, a card for each of the {} ranks on this machine, or --share-card",
                                    error.what(), ranks->local_size()));
    }
}

/// HDF5 under the name of another type would be met by whoever opens it.
void expect_name_of_h5(const Prepared& prepared) {
    if (!prepared.command.output.ends_with(".h5")) return;
    for (const std::string_view suffix : {".toml", ".safetensors", ".json", ".txt", ".html", ".xml"})
        if (prepared.common.output.ends_with(suffix))
            throw RequestError(fmt::format("{}: {}: expected a name for an HDF5 file, as {}{}",
                                           prepared.settings.where("output"), in_quotes(prepared.common.output),
                                           "results.h5", suffix == ".json" ? " (--json prints JSON)" : ""));
}

/// A run that is resumed writes the file that it reads; its recorded configuration names it as the output that it was.
bool is_what_goes_on(const Prepared& prepared) {
    std::error_code none;
    return prepared.settings.has("resume") &&
           prepared.settings.setting_that_names(prepared.common.output, "output") ==
               prepared.settings.where("resume") &&
           std::filesystem::exists(prepared.common.output, none);
}

Status run_command(Prepared& prepared, const std::vector<std::string_view>& names, std::string command_line,
                   RankGroup& group) {
    prepared.settings.read(names);
    if (prepared.settings.print_requested()) {
        if (group.speaks()) print(prepared.settings.print());
        return Status::done;
    }
    check_device(prepared, group);
    if (!prepared.command.output_is_folder && !is_what_goes_on(prepared))
        expect_writable(prepared.settings, "output", prepared.common.output, prepared.common.force);
    expect_name_of_h5(prepared);
    if (!writes_a_file(prepared.settings)) prepared.settings.refuse_unread({"force"}, "without a file to write");
    return prepared.run(Invocation{prepared.settings, prepared.common, std::move(command_line), group});
}

std::vector<std::string> options_of(const CLI::App& command) {
    std::vector<std::string> names;
    for (const CLI::Option* option : command.get_options())
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    return names;
}

/// The one command that has an option "--name" or "--name=value"; "" where none or several have it.
std::string only_command_with(std::string_view option, const CLI::App& program) {
    const std::string_view name = option.substr(0, option.find('='));
    std::string found;
    for (const CLI::App* command : program.get_subcommands([](const CLI::App*) { return true; })) {
        const std::vector<std::string> names = options_of(*command);
        if (std::ranges::find(names, name) == names.end()) continue;
        if (!found.empty()) return "";
        found = command->get_name();
    }
    return found;
}

/// What is wrong with a command line that CLI11 could not take, in our words.
std::string parse_problem(const CLI::ParseError& error, const CLI::App& program, const CLI::App* command, int argc,
                          char** argv) {
    if (command == nullptr) {
        std::vector<std::string> owned;
        for (const CLI::App* sub : program.get_subcommands([](const CLI::App*) { return true; }))
            owned.push_back(sub->get_name());
        const std::vector<std::string_view> names(owned.begin(), owned.end());
        if (argc < 2) return fmt::format("no command: {}", expected_one_of("", names));
        return fmt::format("{}: {}", in_quotes(argv[1]), expected_one_of(argv[1], names));
    }
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
        const std::vector<std::string> rest = command->remaining();
        const std::string extra = rest.empty() ? "" : rest.front();
        if (!extra.starts_with('-'))
            return fmt::format("{}: one argument too many: expected options only (see --help)", in_quotes(extra));
        if (const std::string other = only_command_with(extra, program); !other.empty())
            return fmt::format("{}: unknown option: expected one that --help lists, or faultline {}, which has it",
                               in_quotes(extra), other);
        const std::vector<std::string> owned = options_of(*command);
        const std::string_view near = nearest_name(extra, std::vector<std::string_view>(owned.begin(), owned.end()));
        return fmt::format("{}: unknown option: expected one that --help lists{}", in_quotes(extra),
                           near.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", near));
    }
    const std::string text = error.what();
    if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {  // "--alpha: 1 required P missing"
        const std::size_t colon = text.find(": "), type = text.find(" required "), end = text.rfind(" missing");
        if (colon < type && type < end && end != std::string::npos) {
            const std::size_t first = type + std::string_view(" required ").size();
            return escaped(text.substr(0, colon) + ": has no value: expected " + text.substr(first, end - first));
        }
    }
    return escaped(text);
}

/// CLI11 writes what a negated flag stands for; the names say it. The column behind it stays where it is.
std::string help_of(CLI::App& command, const Settings& settings) {
    settings.mark_needed(command);
    std::string text = command.help("faultline");
    const std::string_view mark = "{false}";
    for (std::size_t at = text.find(mark); at != std::string::npos; at = text.find(mark))
        text.replace(at, mark.size(), mark.size(), ' ');
    return text;
}

int finish(std::string_view command, std::string_view message, Status status) {
    remark(fmt::format("faultline{}{}: {}", command.empty() ? "" : " ", command, message));
    return static_cast<int>(status);
}

int run_program(int argc, char** argv) {
    CLI::App program{"Finds where a low-precision attention kernel goes wrong, and proves it against exact arithmetic.",
                     "faultline"};
    program.set_version_flag("--version", "faultline " FAULTLINE_VERSION);
    program.require_subcommand(1);
    program.footer(
        "Each command has --help with an example. Exit status: 0 done, 1 the work failed or was interrupted,\n"
        "2 the request was wrong.");
    program.get_formatter()->column_width(34);
    std::vector<std::unique_ptr<Prepared>> all;
    std::vector<std::string_view> names;
    for (const Command& command : commands()) {
        names.push_back(command.name);
        all.push_back(std::make_unique<Prepared>(command, program));
    }
    Prepared* chosen = nullptr;
    for (const auto& prepared : all)
        if (argc > 1 && prepared->command.name == argv[1]) chosen = prepared.get();
    const std::string_view name = chosen == nullptr ? "" : chosen->command.name;
    RankGroup group;
    const auto work = [&] {
        try {
            program.parse(argc, argv);
        } catch (const CLI::CallForHelp&) {
            if (group.speaks()) print(chosen == nullptr ? program.help() : help_of(*chosen->app, chosen->settings));
            return Status::done;
        } catch (const CLI::CallForVersion&) {
            print("faultline " FAULTLINE_VERSION "\n");
            return Status::done;
        } catch (const CLI::ParseError& error) {
            throw RequestError(parse_problem(error, program, chosen == nullptr ? nullptr : chosen->app, argc, argv));
        }
        return run_command(*chosen, names, shell_line(argc, argv), group);
    };
    const auto end = [&](std::string_view message, Status status) {
        if (group.take_word()) finish(name, message, status);
        group.leave();
        return static_cast<int>(status);
    };
    try {
        if (chosen != nullptr && chosen->command.with_ranks) group.join();
        try {
            return static_cast<int>(work());
        } catch (...) {
            group.fail(std::current_exception());
            throw;
        }
    } catch (const SharedFailure& failure) {
        const Status status = failure.refused() ? Status::refused : Status::failed;
        return failure.silent() ? static_cast<int>(status) : finish(name, failure.what(), status);
    } catch (const RequestError& error) {
        return end(error.what(), Status::refused);
    } catch (const WorkError& error) {
        return end(error.what(), Status::failed);
    } catch (const std::bad_alloc&) {
        return end(
            "not enough memory: expected room for what the command holds; fewer --threads, --heads or --layers need less",
            Status::failed);
    } catch (const std::exception& error) {
        return end(fmt::format("internal error: {}: expected none; please report it", error.what()), Status::failed);
    }
}

}  // namespace
}  // namespace faultline::cli

int main(int argc, char** argv) {
    faultline::cli::errors_in_place_of_signals();
    return faultline::cli::run_program(argc, argv);
}
