// SPDX-License-Identifier: Apache-2.0
// faultline sweep: many runs from one file, each a process of its own, here or under Slurm; resumed, watched, merged.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <faultline/base/counted.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/sweep_file.hpp>
#include <faultline/cli/sweep_settings.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/dissociation/run_memory.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/sweep/cell_state.hpp>
#include <faultline/sweep/launch.hpp>
#include <faultline/sweep/merge.hpp>
#include <faultline/sweep/slurm.hpp>
#include <faultline/sweep/status.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

namespace fs = std::filesystem;

/// What is to be done, and with which sweep.
struct Request {
    std::string verb = "run", file, folder;
    std::string from;  ///< the folder that files are named from; "": the file's own
};

std::string shown(const std::string& path) { return escaped(path, path.size()); }

/// In a sweep's folder: the folder that the file stood in which sweep.toml there is a copy of.
constexpr const char* origin = "sweep.from";

/// That folder; "" where it is gone, as after a move to another machine: then the files are to be beside the copy.
std::string origin_of(const fs::path& folder) {
    std::ifstream in(folder / origin);
    std::string from;
    std::error_code error;
    return std::getline(in, from) && fs::is_directory(from, error) ? from : "";
}

Request request_of(const SweepSettings& own, const Invocation& call) {
    constexpr std::array<std::string_view, 4> verbs{"run", "status", "merge", "one"};
    std::vector<std::string> words = own.words;
    Request request;
    if (words.size() > 1 && std::ranges::find(verbs, words.front()) != verbs.end()) {
        request.verb = words.front();
        words.erase(words.begin());
    }
    if (words.size() != 1)
        throw RequestError(
            fmt::format("sweep: {}: expected FILE.toml, or run, status or merge and FILE.toml or the sweep's "
                        "folder",
                        words.empty() ? "no file" : in_quotes(words.front())));
    const std::string& output = call.common.output;
    request.file = words.front();
    if (fs::is_directory(request.file)) {
        if (!output.empty())
            throw RequestError(fmt::format("{}: {}: is beside the folder {}: expected one of them",
                                           call.settings.where("output"), in_quotes(output), shown(request.file)));
        request.folder = request.file;
        request.file = (fs::path(request.folder) / "sweep.toml").string();
        request.from = origin_of(request.folder);
        return request;
    }
    request.folder = output.empty() ? fs::path(request.file).stem().string() + ".sweep" : output;
    return request;
}

/// One's own program, by a path that holds on a cluster's nodes too.
std::string program() { return fs::read_symlink("/proc/self/exe").string(); }

/// The one that a process of ours would take, as CUDA_VISIBLE_DEVICES names it.
std::string first_visible_card() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    const std::string all = visible == nullptr ? "" : visible;
    return all.empty() ? "0" : all.substr(0, all.find(','));
}

std::string threads_of(const Invocation& call) {
    return std::to_string(call.common.threads > 0 ? call.common.threads : 1);
}

/// Whole under its name, but not forced to the disk: it can be written again, and a sweep has thousands.
void write_text(const std::string& path, const std::string& text) {
    PartialName name(path);
    std::ofstream out(name.partial(), std::ios::binary);
    out << text;
    out.close();
    if (!out)
        throw WorkError(fmt::format("{}: cannot be written: expected room for {} bytes", name.given(), text.size()));
    name.commit(false);
}

/// The folder with the sweep, its list of runs and what each run's process reads. Two launchers do it one after the other, and
/// both write the same.
void prepare(const Request& request, const SweepFile& file, const std::vector<sweep::Cell>& cells) {
    const fs::path folder(request.folder);
    std::error_code error;
    fs::path whole = fs::absolute(folder).lexically_normal();
    if (!whole.has_filename()) whole = whole.parent_path();  // "sweeps/new/"
    if (const fs::path parent = whole.parent_path(); !fs::is_directory(parent, error))
        throw RequestError(fmt::format("{}: folder {} does not exist: expected an existing folder",
                                       shown(request.folder), in_quotes(parent.string())));
    if (fs::exists(folder) && !fs::is_empty(folder, error) && !fs::exists(folder / "sweep.lock"))
        throw RequestError(
            fmt::format("{}: is there and is no sweep's folder: expected a new name", shown(request.folder)));
    fs::create_directories(folder / "runs", error);
    if (error)
        throw WorkError(
            fmt::format("{}: cannot be made ({}): expected a writable folder", shown(request.folder), error.message()));
    const sweep::FileLock lock = sweep::FileLock::wait((folder / "sweep.lock").string());
    const fs::path own = folder / "sweep.toml";
    if (!fs::exists(own) || !fs::equivalent(own, request.file)) {
        fs::copy_file(request.file, folder / "sweep.toml.partial", fs::copy_options::overwrite_existing);
        fs::rename(folder / "sweep.toml.partial", own);
        write_text((folder / origin).string(),
                   fs::absolute(request.file).lexically_normal().parent_path().string() + "\n");
    }
    sweep::write_cells(request.folder, cells);
    std::size_t at = 0;
    for (const SweepRecipe& recipe : file.recipes)
        for (std::size_t i = runs_of(recipe.config).size(); i > 0; --i, ++at)
            write_text(sweep::files_of(request.folder, cells[at].name).settings, cell_toml(file, recipe, cells[at]));
}

std::vector<sweep::Merged> merged(const std::string& folder, const SweepFile& file,
                                  const std::vector<sweep::Cell>& cells) {
    std::vector<sweep::Merged> all;
    auto at = cells.begin();
    for (const SweepRecipe& recipe : file.recipes) {
        const auto end = at + static_cast<std::ptrdiff_t>(runs_of(recipe.config).size());
        all.push_back(sweep::collect(folder, recipe.name, recipe.config, {at, end}));
        at = end;
    }
    return all;
}

/// FOLDER/sweep.h5 and the table. The file is made anew each time, from the records.
void merge(const Request& request, const SweepFile& file, const std::vector<sweep::Cell>& cells,
           const Invocation& call) {
    const sweep::FileLock lock = sweep::FileLock::wait((fs::path(request.folder) / "sweep.lock").string());
    const std::vector<sweep::Merged> all = merged(request.folder, file, cells);
    Manifest manifest = call.manifest("dissociation", file.recipes.front().config.seeds.front());
    manifest.inputs = file.recipes.front().data->inputs;
    manifest.inputs.push_back({request.file, hash_file(request.file)});
    RecordFile out = RecordFile::create((fs::path(request.folder) / "sweep.h5").string(), manifest);
    sweep::write(all, out, request.folder);
    out.commit();
    print(call.common.json ? sweep::to_json(all) : sweep::table(all));
}

/// Failures by name and reason: on standard error.
void say_failures(const sweep::Status& status) {
    for (std::size_t i = 0; i < status.cells.size(); ++i)
        if (status.states[i].state == sweep::State::failed)
            remark(fmt::format("faultline sweep: {}: {} (runs/{}.log)", status.cells[i].name,
                               sweep::sentence(status.states[i].what), status.cells[i].name));
}

/// The same, and what is left.
void say_what_is_left(const sweep::Status& status, const std::string& folder) {
    say_failures(status);
    remark(fmt::format("faultline sweep: {}; the same command goes on from what is in {}", sweep::summary(status),
                       shown(folder)));
}

std::uint64_t bytes_of(const gpt::TokenData& data) {
    return (data.training.size() + data.validation.size()) * sizeof(std::int32_t);
}

/// Of the largest run on the CPU as a process, its data with it; empty where cards make them all.
gpt::HostMemory largest_process(const SweepFile& file, int threads) {
    gpt::HostMemory largest;
    for (const SweepRecipe& recipe : file.recipes) {
        if (recipe.config.trainers != nullptr) continue;
        gpt::HostMemory one = largest_run(recipe.config, runs_of(recipe.config), threads, true);
        one.parts.push_back({"data", bytes_of(*recipe.data)});
        if (one.bytes() > largest.bytes()) largest = std::move(one);
    }
    return largest;
}

/// Processes at a time. WorkError where there is no memory for so many.
int jobs_of(const SweepSettings& own, const SweepFile& file, const std::vector<sweep::Cell>& cells,
            const Invocation& call) {
    const bool any_device =
        std::ranges::any_of(file.recipes, [](const SweepRecipe& r) { return r.config.trainers != nullptr; });
    const int threads = static_cast<int>(std::max<std::int64_t>(call.common.threads, 1));
    const int by_default = !own.devices.empty() ? static_cast<int>(own.devices.size())
                           : any_device         ? 1
                                                : std::max(hardware_threads() / threads, 1);
    const int jobs = own.jobs > 0 ? static_cast<int>(own.jobs) : by_default;
    return gpt::runs_with_room("a run needs", largest_process(file, threads),
                               std::min(jobs, static_cast<int>(cells.size())), own.jobs > 0, gpt::memory_room());
}

Status run_locally(const SweepSettings& own, const Request& request, const SweepFile& file,
                   const std::vector<sweep::Cell>& cells, int jobs, const Invocation& call) {
    sweep::Local local;
    local.program = {program(), "sweep", "one", "--quiet", "--threads", threads_of(call)};
    local.devices = own.devices;
    local.mps = own.mps;
    if (own.mps && own.devices.empty()) local.devices = {first_visible_card()};
    local.jobs = jobs;
    Progress line(call.talks());
    const sweep::Launched launched = sweep::launch(
        request.folder, cells, local,
        [&](const sweep::Progress& p) {
            line.update(static_cast<std::size_t>(p.steps), static_cast<std::size_t>(p.of),
                        fmt::format("{} at work, {} to do{}", p.at_work, p.left,
                                    p.failed > 0 ? fmt::format(", {} failed", p.failed) : ""));
        },
        interrupted);
    line.clear();
    if (launched.interrupted) {
        say_what_is_left(sweep::status_of(request.folder, cells), request.folder);
        return Status::failed;
    }
    merge(request, file, cells, call);
    const sweep::Status status = sweep::status_of(request.folder, cells);
    if (status.all_done()) return Status::done;
    say_what_is_left(status, request.folder);
    return Status::failed;
}

Status run_under_slurm(const SweepSettings& own, const Request& request, const std::vector<sweep::Cell>& cells,
                       const Invocation& call) {
    std::vector<sweep::Cell> missing;
    for (const sweep::Cell& cell : cells) {
        const sweep::State state = sweep::state_of(request.folder, cell).state;
        if (!sweep::is_done(state) && state != sweep::State::at_work) missing.push_back(cell);
    }
    const sweep::Status status = sweep::status_of(request.folder, cells);
    const std::string summary = sweep::summary(status);
    if (missing.empty()) {
        say_failures(status);
        print(call.common.json
                  ? nlohmann::json{{"schema", "faultline.sweep-jobs/1"}, {"jobs", nlohmann::json::array()}}.dump(1) +
                        "\n"
                  : fmt::format("nothing to submit: {}\n", summary));
        return status.all_done() ? Status::done : Status::failed;
    }
    sweep::Slurm slurm;
    const std::string folder = fs::absolute(request.folder).lexically_normal().string();
    slurm.program = {program(), "sweep", "one", "--quiet", "--threads", threads_of(call)};
    slurm.name = sweep::job_name(folder);
    slurm.partition = own.partition;
    slurm.gres = own.gres;
    slurm.time = own.time;
    slurm.lines = own.lines;
    slurm.cpus = static_cast<int>(std::max<std::int64_t>(call.common.threads, 1));
    slurm.at_once = static_cast<int>(own.jobs);
    const auto scripts = sweep::write_scripts(folder, missing, slurm, {program(), "sweep", "merge", folder});
    std::vector<std::string> jobs, paths;
    if (own.submit.value_or(true)) jobs = sweep::submit(folder, scripts);
    for (const sweep::SlurmScript& script : scripts) paths.push_back(script.path);
    if (call.common.json) {
        print(nlohmann::json{{"schema", "faultline.sweep-jobs/1"}, {"jobs", jobs}, {"scripts", paths}}.dump(1) + "\n");
        return Status::done;
    }
    std::string text = fmt::format("{} in {}; {}\n", counted(static_cast<std::int64_t>(missing.size()), "run", "runs"),
                                   counted(static_cast<std::int64_t>(scripts.size()), "array", "arrays"), summary);
    for (std::size_t i = 0; i < scripts.size(); ++i)
        text += jobs.empty()
                    ? fmt::format("  {}\n", sweep::shell({"sbatch", "--array=" + scripts[i].array, scripts[i].path}))
                    : fmt::format("  job {}: {}\n", jobs[i], shown(scripts[i].path));
    if (jobs.empty())
        text += fmt::format("  and when they have ended\n  {}\n", sweep::shell({"sbatch", folder + "/slurm/merge.sh"}));
    if (!jobs.empty()) {
        text += fmt::format("  job {} merges them into {}/sweep.h5 when they have ended\n", jobs.back(), shown(folder));
        text += fmt::format("to watch: {}\n          squeue -j {}\n",
                            sweep::shell({"faultline", "sweep", "status", request.folder}), fmt::join(jobs, ","));
    }
    print(text);
    return Status::done;
}

/// The process of one run: holds its lock, says how far it is, leaves how it ended.
Status run_one(const std::string& path, const Invocation& call) {
    const fs::path settings(path);
    const std::string name = settings.stem().string();
    const sweep::CellFiles files = sweep::files_of(settings.parent_path().parent_path().string(), name);
    if (settings.parent_path().filename() != "runs" || !fs::exists(settings))
        throw RequestError(fmt::format("{}: expected FOLDER/runs/NAME.toml of a sweep", shown(path)));
    const std::optional<sweep::FileLock> lock = sweep::FileLock::take(files.lock);
    const auto say = [&](const std::string& text) { remark(fmt::format("faultline sweep: {}: {}", name, text)); };
    if (!lock) {
        say("another process is at work");
        return Status::done;
    }
    // state_of would open the lock's file, and its closing would end the lock: what ended before is asked of the result alone.
    if (sweep::has_result(files)) return Status::done;
    sweep::forget_failure(files);
    lock->say(0);
    using Clock = std::chrono::steady_clock;
    Clock::time_point said = Clock::now();
    try {
        const SweepCell read = read_cell(path);
        end_if_interrupted();
        const int threads = static_cast<int>(std::max<std::int64_t>(call.common.threads, 1));
        if (read.recipe.config.trainers == nullptr)
            gpt::expect_room("the run needs", run_memory(read.recipe.config, read.plan, threads, true), 1,
                             gpt::memory_room());
        SingleRun run;
        run.plan = read.plan;
        run.record = files.record;
        run.command_line = call.command_line;
        run.checkpoint_every = read.checkpoint_every;
        run.threads = threads;
        run.cancelled = interrupted;
        run.stepped = [&](std::int64_t steps) {
            constexpr auto often = std::chrono::milliseconds(200);
            if (steps < read.recipe.config.train.steps && Clock::now() - said < often) return;
            said = Clock::now();
            lock->say(steps);
        };
        const SingleOutcome outcome = make_single_run(read.recipe.config, *read.recipe.data, run);
        lock->say(outcome.steps);
        if (outcome.first_step > 0) say(fmt::format("taken up at step {}", outcome.first_step));
        if (!outcome.finished) {
            say(fmt::format("interrupted after {} steps, the state is saved", outcome.steps));
            return Status::failed;
        }
        sweep::write_done(files, outcome.steps, outcome.not_finite_where);
    } catch (const std::exception& error) {
        // Also of what is no fault of the request: whoever watches has this reason alone.
        if (!interrupted()) sweep::write_failed(files, error.what());
        throw;
    }
    return Status::done;
}

Status run(const SweepSettings& own, const Invocation& call) {
    watch_for_interrupts();
    const Request request = request_of(own, call);
    check_options(own, call.settings, request.verb);
    if (request.verb == "one") return run_one(own.words.back(), call);
    if (request.verb == "status") {
        const sweep::Status status = sweep::status_of(request.folder, sweep::read_cells(request.folder));
        print(call.common.json ? sweep::to_json(status) : sweep::table(status, own.every));
        return Status::done;
    }
    const SweepFile file = read_sweep(request.file, request.from);
    const std::vector<sweep::Cell> cells = cells_of(file, request.file);
    end_if_interrupted();
    if (request.verb == "merge") {
        if (sweep::read_cells(request.folder) != cells)  // data or defaults have changed, or the file
            throw RequestError(
                fmt::format("{}: has other runs in {}: expected those that were started, or run in place of "
                            "merge",
                            shown(request.file), shown(request.folder)));
        merge(request, file, cells, call);
        const sweep::Status status = sweep::status_of(request.folder, cells);
        if (status.all_done() && !status.any_unreadable()) return Status::done;
        say_failures(status);
        if (!status.all_done())
            remark(fmt::format("faultline sweep: {}: what is done is merged", sweep::summary(status)));
        return Status::failed;
    }
    check_launch(own, call.settings, file);
    const int jobs = own.slurm ? 0 : jobs_of(own, file, cells, call);
    prepare(request, file, cells);
    return own.slurm ? run_under_slurm(own, request, cells, call) : run_locally(own, request, file, cells, jobs, call);
}

}  // namespace

Command sweep_command() {
    Command command{
        "sweep", "Train many small GPTs from one file, as local processes or under Slurm, and merge them",
        "  faultline sweep experiments/configs/sweep-quick.toml -o quick       runs what is missing, and merges\n"
        "  faultline sweep status quick\n"
        "  faultline sweep big.toml --slurm --partition gpu --gres gpu:1 --time 01:00:00",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<SweepSettings>();
            own->declare(settings);
            return [own](const Invocation& call) { return run(*own, call); };
        }};
    command.output = "FOLDER";
    command.output_help = "The sweep's folder; default: FILE.sweep here";
    command.output_is_folder = true;
    command.threads_help = "Worker threads of each run; 0: one. Results do not depend on it";
    return command;
}

}  // namespace faultline::cli
