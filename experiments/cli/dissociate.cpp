// SPDX-License-Identifier: Apache-2.0
// faultline dissociate: does training fail through the same channel wherever the error comes from, and does it survive if
// only the channel is closed?
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <memory>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/device_trainers.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/cli/train_settings.hpp>
#include <faultline/cli/written_file.hpp>
#include <faultline/dissociation/matrix_run.hpp>
#include <faultline/dissociation/matrix_words.hpp>
#include <faultline/dissociation/report.hpp>
#include <faultline/dissociation/run_memory.hpp>
#include <faultline/gpt/run.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/ranks/launched.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

namespace fs = std::filesystem;

struct DissociateSettings {
    TrainSettings train;
    // The quick matrix: experiments/configs/dissociate-quick.toml says the same.
    std::vector<std::string> sources{"delta:multiplicative:0.2", "ds:fixed:0.01", "row_sum:multiplicative:-0.2",
                                     "ffn_activation_gradient:per_column:0.1"};
    std::vector<std::string> interventions{"none", "project", "project:removal=elsewhere", "qk_norm", "guard"};
    std::vector<std::string> controls;  // empty: see default_controls
    std::vector<int> seeds;
    std::optional<double> sigma_ratio = JudgingRule{}.sigma_ratio, loss_ratio = JudgingRule{}.loss_ratio;
    std::int64_t checkpoint_every = MatrixFiles{}.checkpoint_every;
};

template <class Check>
void check_words(const std::string& where, Check&& check) {
    try {
        check();
    } catch (const RequestError& error) {
        throw RequestError(fmt::format("{}: {}", where, error.what()));
    }
}

MatrixConfig matrix_config(const DissociateSettings& own, const Settings& settings, const TrainData& data) {
    MatrixConfig config;
    config.train = train_config(own.train, settings, data, 1);
    config.sources = own.sources;
    config.interventions = own.interventions;
    config.controls = own.controls;
    for (const int seed : own.seeds) config.seeds.push_back(static_cast<std::uint64_t>(seed));
    if (own.seeds.empty()) config.seeds.push_back(config.train.seed);
    if (own.sigma_ratio) config.rule.sigma_ratio = *own.sigma_ratio;
    if (own.loss_ratio) config.rule.loss_ratio = *own.loss_ratio;
    const int head_dim = config.train.model.head_dim();
    if (!own.seeds.empty()) settings.refuse_unread({"seed"}, "with --seeds");
    check_words(settings.where("source"), [&] {
        expect_different_sources(own.sources, config.train);
        expect_magnitudes_met(own.sources, config.train);
    });
    check_words(settings.where("intervention"), [&] { expect_different_interventions(own.interventions); });
    check_words(settings.where("control"), [&] {
        expect_different_interventions(own.controls);
        expect_controls_met(own.controls);
    });
    if (own.controls.empty()) config.controls = default_controls(own.interventions);
    // A file's, or the default's, beside sources from elsewhere are for other sources too.
    if (settings.given("intervention") || (settings.in_file("intervention") && settings.in_file("source")))
        check_words(settings.where("intervention"),
                    [&] { expect_interventions_met(own.sources, own.interventions, config.controls, head_dim); });
    if (!own.train.replay.empty())
        throw RequestError(
            fmt::format("{}: every seed has windows of its own: expected none", settings.where("replay")));
    if (own.train.monitor_every == 0)
        throw RequestError(fmt::format("{}: 0: the verdict needs sigma_max(W_Q): expected 1 or more",
                                       settings.where("monitor-every")));
    return config;
}

/// How many runs stand beside each other on a card. More than four gain nothing: their launches wait for each other. The tensor
/// cores' kernels draw their tiles from counters that all launches share, so their runs go one after another.
int runs_on_a_card(const MatrixConfig& config, std::int64_t threads) {
    const auto has_plan = [](const std::string& source) { return source.find("plan:") != std::string::npos; };
    if (!config.train.model.attention.empty() || std::ranges::any_of(config.sources, has_plan)) return 1;
    constexpr int most = 4;
    return threads == 0 ? most : static_cast<int>(threads);
}

/// How many runs go at once on the CPU, `threads` of them or where that is 0 as many as there are processors and there is memory
/// for. WorkError where there is less; before anything is written.
int runs_on_host(const MatrixConfig& config, std::int64_t threads, bool recorded) {
    const std::vector<RunPlan> plans = runs_of(config);
    const int most =
        std::min(static_cast<int>(plans.size()), threads > 0 ? static_cast<int>(threads) : hardware_threads());
    gpt::MemoryRoom room = gpt::memory_room();
    room.bytes -= std::min(room.bytes, kept_for_guards(config, plans));
    return gpt::runs_with_room("a run needs", largest_run(config, plans, 1, recorded), most, threads > 0, room);
}

/// FILE.runs beside FILE.h5.
std::string runs_folder(const std::string& output) {
    return (fs::path(output).parent_path() / fs::path(output).stem()).string() + ".runs";
}

bool is_hdf5(const fs::path& path) {
    std::array<char, 8> begin{};
    std::ifstream file(path, std::ios::binary);
    return file.read(begin.data(), begin.size()) && std::string_view(begin.data(), 8) == "\x89HDF\r\n\x1a\n";
}

/// RequestError where the folder of the runs is that of another file, or a run would replace what the command reads.
void expect_own_runs(const MatrixConfig& config, const Invocation& call) {
    const std::string& output = call.common.output;
    if (output.empty()) return;
    const MatrixFiles files{.folder = runs_folder(output), .command_line = ""};
    std::error_code error;
    if (!fs::exists(files.folder, error)) return;
    const fs::path folder = fs::path(output).parent_path();
    for (const fs::directory_entry& entry : fs::directory_iterator(folder.empty() ? "." : folder, error))
        if (entry.path().stem() == fs::path(output).stem() && entry.path().filename() != fs::path(output).filename() &&
            entry.is_regular_file(error) && is_hdf5(entry.path()))
            throw RequestError(fmt::format("{}: {}: {} has the runs of {}: expected a name that differs before the dot",
                                           call.settings.where("output"), escaped(output, output.size()),
                                           in_quotes(files.folder), in_quotes(entry.path().string())));
    for (const RunPlan& plan : runs_of(config)) {
        const std::string record = record_path(files, plan);
        for (const std::string& path : {record, gpt::checkpoint_path(record)})
            expect_writable(call.settings, "output", path, true);
    }
}

Status run(const DissociateSettings& own, const Invocation& call) {
    watch_for_interrupts();
    if (const std::optional<Launch> launch = launch_of_environment()) {
        if (launch->rank > 0) return Status::refused;  // the first says it
        throw RequestError(
            fmt::format("{}: says {} ranks, and each would make all runs: expected one process, which makes "
                        "several at a time, or faultline sweep",
                        launch->variable, launch->size));
    }
    const TrainData data = read_data(own.train, call.settings);
    end_if_interrupted();
    MatrixConfig config = matrix_config(own, call.settings, data);
    expect_own_runs(config, call);
    const DeviceTrainers on_device;
    const bool device = call.common.device == "cuda";
    expect_device(call);
    if (device && !gpt::device_trainer_is_built())
        throw WorkError("device cuda: this build has no device back end: expected one configured with the preset cuda");
    if (device) config.trainers = &on_device;
    const std::string& output = call.common.output;
    const int at_once = device ? runs_on_a_card(config, call.common.threads)
                               : runs_on_host(config, call.common.threads, !output.empty());
    MatrixFiles files;
    files.command_line = call.command_line;
    files.replace = call.common.force;
    files.checkpoint_every = own.checkpoint_every;
    std::optional<RecordFile> file;
    if (!output.empty()) {
        Manifest manifest = call.manifest("dissociation", config.seeds.front());
        manifest.inputs = data.inputs();
        file = RecordFile::create(output, manifest);  // now, so that a disk that refuses is known before the work
        files.folder = runs_folder(output);
    }
    if (call.talks() && !data.tokens.remark.empty()) remark("faultline dissociate: " + data.tokens.remark);
    Progress line(call.talks());
    const RunMatrix matrix = run_matrix(
        config, data.tokens, files, at_once,
        [&](std::int64_t done, std::int64_t total, const std::string& what) {
            line.update(static_cast<std::size_t>(done), static_cast<std::size_t>(total), what);
        },
        interrupted);
    line.clear();
    print(call.common.json ? to_json(matrix) : table(matrix));
    if (matrix.complete()) {
        if (file) {
            write(matrix, *file, fs::path(files.folder).filename().string());
            file->commit();
        }
        return Status::done;
    }
    remark(fmt::format("faultline dissociate: interrupted; {}",
                       output.empty() ? std::string("nothing was written (-o FILE.h5 keeps the runs)")
                                      : fmt::format("the same command goes on from what is in {}",
                                                    escaped(files.folder, files.folder.size()))));
    return Status::failed;
}

}  // namespace

Command dissociate_command() {
    Command command{
        "dissociate", "Train small GPTs with an error at each source under each intervention, and say which fail",
        "  faultline dissociate                                  the quick matrix, minutes\n"
        "  faultline dissociate --config experiments/configs/dissociate-full.toml -o full.h5\n"
        "  faultline dissociate --source delta:multiplicative:0.2 --intervention guard:threshold=30 --seeds 0,1,2",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<DissociateSettings>();
            own->train.validate_every = 0;  // here: at the end alone
            settings.items(
                "source", own->sources, "SOURCE",
                "A fault SITE:LAW:MAGNITUDE or plan:NAME, joined by +; again for more (docs/dissociation.md)");
            settings.items("intervention", own->interventions, "WHAT",
                           "none, project, qk_norm, guard, qk_clip, repair with their options; again for more");
            settings.items(
                "control", own->controls, "WHAT",
                "Interventions that are also run without a fault; default: project and qk_norm, where asked for");
            settings.list("seeds", own->seeds, "0,1,2", "Seeds of weights, windows and faults; default: --seed");
            settings.positive_number("sigma-ratio", own->sigma_ratio, "X",
                                     "Runaway: sigma_max(W_Q) above X times the control's");
            settings.positive_number("loss-ratio", own->loss_ratio, "X",
                                     "Loss: final train loss above X times the control's");
            settings.integer("checkpoint-every", own->checkpoint_every, 1, "N",
                             "Steps between the checkpoints of a run, with -o: what a run that is killed loses at most",
                             1 << 30);
            own->train.declare(settings);
            return [own](const Invocation& call) { return run(*own, call); };
        }};
    command.threads_help =
        "Runs at a time, a thread each; 0: one per hardware thread that has the memory, or four on a card";
    return command;
}

}  // namespace faultline::cli
