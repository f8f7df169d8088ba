// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/sweep_settings.hpp>

#include <algorithm>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/sweep/slurm.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

[[noreturn]] void refuse(const Settings& settings, const char* key, const std::string& value, const char* expected) {
    throw RequestError(fmt::format("{}: {}: expected {}", settings.where(key), in_quotes(value), expected));
}

/// As CUDA_VISIBLE_DEVICES has it: a number, or the beginning of a UUID (CUDA C Programming Guide, environment variables).
bool names_a_card(std::string_view text) {
    if (text.starts_with("GPU-") || text.starts_with("MIG-")) return true;
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// A line of a script of bash.
bool is_one_line(std::string_view text) {
    return std::ranges::none_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

}  // namespace

void SweepSettings::declare(Settings& settings) {
    settings.positionals("what", words, "[run|status|merge] FILE.toml, or the sweep's folder (docs/sweeps.md)");
    settings.config_too("what", {"matrix", "vary", "recipe", "cell"});
    settings.integer("jobs", jobs, 0, "N",
                     "Runs at a time; 0: one per hardware thread, or per card; under Slurm no limit", 1 << 16);
    settings.list("devices", devices, "0,1", "Cards, as CUDA_VISIBLE_DEVICES has them: each run sees one");
    settings.may_repeat("devices");  // has a sentence of its own
    settings.flag("mps", mps, "Runs on a card beside each other, by NVIDIA's multi-process service, and not in turns");
    settings.flag("every", every, "status: a line for each run");
    settings.flag("slurm", slurm, "Submit the runs as a Slurm job array");
    settings.choice("submit", submit, "Slurm: submit (default), or (--no-submit) write the scripts alone");
    settings.text("partition", partition, "NAME", "Slurm: partition");
    settings.text("gres", gres, "gpu:1", "Slurm: generic resources of a run");
    settings.text("time", time, "HH:MM:SS", "Slurm: time limit of a run");
    settings.items("sbatch", lines, "OPTION", "Slurm: a further option, as --sbatch=--account=x; again for more");
    settings.holds_options("sbatch");
}

void check_options(const SweepSettings& own, const Settings& settings, std::string_view verb) {
    if (verb == "status" || verb == "merge")
        settings.refuse_unread({"jobs", "devices", "mps", "slurm", "submit", "partition", "gres", "time", "sbatch"},
                               fmt::format("for {}, which runs nothing", verb));
    if (verb != "status") settings.refuse_unread({"every"}, fmt::format("for {}, which prints no runs", verb));
    if (settings.given("force"))
        throw RequestError(fmt::format("{}: {}", settings.where("force"),
                                       "means nothing for a sweep: a run is made anew where its record is removed"));
    for (const char* key : {"submit", "partition", "gres", "time", "sbatch"})
        if (!own.slurm && settings.given(key))
            throw RequestError(fmt::format("{}: is Slurm's: expected --slurm with it", settings.where(key)));
    if (own.slurm && settings.given("devices"))
        throw RequestError(
            fmt::format("{}: Slurm gives cards to its tasks: expected --gres with --slurm", settings.where("devices")));
    if (own.slurm && settings.given("mps"))
        throw RequestError(fmt::format("{}: Slurm starts the runs: expected it in the jobs' own lines, or no --slurm",
                                       settings.where("mps")));
    std::set<std::string> seen;
    for (const std::string& card : own.devices) {
        if (!names_a_card(card)) refuse(settings, "devices", card, "numbers or UUIDs of cards, separated by commas");
        if (!seen.insert(card).second)
            refuse(settings, "devices", card, "each card once (--jobs puts several runs on a card)");
    }
    if (!own.time.empty() && !sweep::is_time_limit(own.time))
        refuse(settings, "time", own.time,
               "a time as sbatch has it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS");
    for (const auto& [key, text] : {std::pair("partition", own.partition), {"gres", own.gres}})
        if (!is_one_line(text)) refuse(settings, key, text, "one line");
    for (const std::string& line : own.lines)
        if (!line.starts_with('-') || !is_one_line(line))
            refuse(settings, "sbatch", line, "an option of sbatch, as --account=x");
}

void check_launch(const SweepSettings& own, const Settings& settings, const SweepFile& file) {
    const bool any_device =
        std::ranges::any_of(file.recipes, [](const SweepRecipe& r) { return r.config.trainers != nullptr; });
    if (!own.devices.empty() && !own.slurm && !any_device)
        throw RequestError(fmt::format(
            "{}: no run of this sweep is on a card: expected device = \"cuda\" in its [train], or no devices",
            settings.where("devices")));
    if (own.mps && !own.slurm && !any_device)
        throw RequestError(
            fmt::format("{}: no run of this sweep is on a card: expected device = \"cuda\" in its [train], or no mps",
                        settings.where("mps")));
    const bool scripts_alone = own.slurm && !own.submit.value_or(true);
    if (any_device && !scripts_alone && !gpt::device_trainer_is_built())
        throw RequestError(
            "device cuda: this build has no device code: expected the preset cuda, device = \"cpu\", or --slurm "
            "--no-submit, which writes the scripts alone");
}

}  // namespace faultline::cli
