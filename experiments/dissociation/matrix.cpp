// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/matrix.hpp>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/dissociation/channel.hpp>
#include <faultline/dissociation/collect.hpp>
#include <faultline/dissociation/source.hpp>
#include <faultline/gpt/fingerprint.hpp>
#include <faultline/gpt/run.hpp>
#include <faultline/gpt/run_record.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

namespace fs = std::filesystem;

/// HDF5 keeps state that all files share, and the library as packaged does not lock it.
std::mutex& hdf5() {
    static std::mutex mutex;
    return mutex;
}

/// A source or intervention as part of a file's name.
std::string slug(const std::string& text) {
    std::string out;
    for (const char c : text) {
        const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_';
        out += plain ? c : '-';
    }
    return out;
}

/// Everything that one run is made of. Not copied: the hooks refer to it.
class Run {
  public:
    Run(const MatrixConfig& matrix, const RunPlan& plan, const gpt::TokenData& data)
        : plan_(plan),
          config_(matrix.train),
          intervention_(parse_intervention(plan.intervention)),
          source_(parse_source(plan.source, config_.model.head_dim())),
          windows_(plan.seed),
          data_(data) {
        config_.seed = plan.seed;
        config_.threads = 1;
        if (config_.validate_every == 0)
            config_.validate_every = static_cast<int>(config_.steps);  // a result has a validation loss
        for (const gpt::AttentionChoice& choice : source_.attention) config_.model.attention.push_back(choice);
        if (intervention_.kind == Intervention::Kind::qk_norm) config_.model.qk_norm = gpt::QkNorm::parameter_free;
        for (Fault& fault : source_.faults) fault.seed += plan.seed;  // seeds of a matrix draw other signs
        fast_ = gpt::fast_plan(config_.model.bf16);
        faults_ = std::make_unique<FaultHooks>(source_.faults, config_.model.layers, config_.model.heads,
                                               [this](int layer, int head) {
                                                   const RoundingPlan* chosen = config_.model.plan(layer, head);
                                                   return chosen != nullptr ? chosen : &fast_;
                                               });
        channel_ = std::make_unique<Channel>(intervention_, config_.model.layers, config_.model.heads, plan.seed,
                                             faults_.get());
    }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    gpt::Trainer& trainer() {
        if (!trainer_) {
            gpt::Hooks hooks;
            if (faults_->any_attention()) hooks.attention = faults_.get();
            if (faults_->any_model()) hooks.model = faults_.get();
            hooks.update = channel_.get();
            hooks.step = channel_.get();
            trainer_ = std::make_unique<gpt::Trainer>(config_, data_, windows_, hooks);
        }
        return *trainer_;
    }

    /// What a record must have been made with to be this run's: all settings, the source, the intervention and the data.
    [[nodiscard]] std::string identity() const {
        std::string text;
        for (const auto& [key, value] : gpt::fingerprint(config_)) text += fmt::format("{} = {}\n", key, value);
        text += fmt::format("steps = {}\nsource = {}\nintervention = {}\n", config_.steps, source_.text,
                            to_string(intervention_));
        for (const InputHash& input : data_.inputs) text += fmt::format("data = {}\n", input.hash);
        return text;
    }

  private:
    RunPlan plan_;
    gpt::TrainConfig config_;
    Intervention intervention_;
    Source source_;
    gpt::WindowOrder windows_;
    const gpt::TokenData& data_;
    RoundingPlan fast_;
    std::unique_ptr<FaultHooks> faults_;
    std::unique_ptr<Channel> channel_;
    std::unique_ptr<gpt::Trainer> trainer_;
};

std::string record_path(const MatrixFiles& files, const RunPlan& plan) {
    if (files.folder.empty()) return "";
    return (fs::path(files.folder) /
            fmt::format("{}__{}__seed{}.h5", slug(plan.source), slug(plan.intervention), plan.seed))
        .string();
}

/// What stands in the folder of a run.
enum class Found { nothing, part, whole };

Found find_record(const std::string& path, const std::string& identity, const MatrixFiles& files, std::int64_t steps,
                  std::vector<StepSample>& samples) {
    if (path.empty() || !fs::exists(path)) return Found::nothing;
    const std::lock_guard lock(hdf5());
    if (RecordReader(path).manifest().config_toml != identity) {
        if (files.replace) return Found::nothing;
        throw RequestError(fmt::format("{}: is the run of another configuration: expected that of this one, or --force",
                                       escaped(path, path.size())));
    }
    samples = samples_of(path);
    if (!samples.empty() && samples.back().step + 1 == steps) return Found::whole;
    samples.clear();
    return fs::exists(gpt::checkpoint_path(path)) ? Found::part : Found::nothing;
}

/// Told of every step of every run.
class Counter {
  public:
    Counter(std::int64_t total, const std::function<void(std::int64_t, std::int64_t, const std::string&)>& progress)
        : total_(total), progress_(progress) {}
    void add(std::int64_t steps, const std::string& what) {
        const std::lock_guard lock(mutex_);
        done_ += steps;
        if (progress_) progress_(done_, total_, what);
    }

  private:
    std::int64_t total_, done_ = 0;
    const std::function<void(std::int64_t, std::int64_t, const std::string&)>& progress_;
    std::mutex mutex_;
};

/// Steps to the end, an interruption, or a value that is no number; gpt::run for several at a time.
void train(Run& run, const std::string& path, Found found, const MatrixFiles& files, std::int64_t checkpoint_every,
           RunResult& result, std::vector<StepSample>& samples, const std::function<bool()>& cancelled,
           const std::function<void(std::int64_t)>& stepped) {
    gpt::Trainer& trainer = run.trainer();
    std::optional<gpt::RunRecord> record;
    if (!path.empty()) {
        const std::lock_guard lock(hdf5());
        if (found == Found::part) {
            trainer.restore(gpt::checkpoint_path(path));
            record = gpt::RunRecord::resume(path, trainer.next_step() - 1);
        } else {
            std::error_code ignored;
            fs::remove(gpt::checkpoint_path(path), ignored);  // it would be of another run
            Manifest manifest = make_manifest("run", files.command_line, run.identity(), result.seed);
            record = gpt::RunRecord::create(path, manifest);
        }
    }
    stepped(trainer.next_step());
    const auto save = [&] {
        if (record) trainer.save(gpt::checkpoint_path(path));
    };
    bool stopped = false;
    while (!trainer.finished() && !stopped) {
        const gpt::StepReport& report = trainer.step();
        if (trainer.failure()) break;
        if (record) {
            const std::lock_guard lock(hdf5());
            record->write(report);
        }
        samples.push_back(sample_of(report));
        stepped(1);
        if (trainer.next_step() % checkpoint_every == 0 && !trainer.finished()) save();
        stopped = !trainer.finished() && cancelled();
    }
    save();
    if (record) {
        const std::lock_guard lock(hdf5());
        record->close();
        samples = samples_of(path);  // a resumed run has more steps than those made here
    }
    result.finished = !stopped;
    if (trainer.failure()) {
        result.not_finite = true;
        result.not_finite_where = fmt::format("step {}, {}", trainer.failure()->step, trainer.failure()->site);
    }
}

}  // namespace

bool RunMatrix::complete() const {
    return std::all_of(runs.begin(), runs.end(), [](const RunResult& run) { return run.finished; });
}

std::vector<RunPlan> runs_of(const MatrixConfig& config) {
    const auto plain = [](const std::string& text) { return to_string(parse_intervention(text)); };
    std::vector<std::string> controls{"none"};
    const auto add_once = [](std::vector<std::string>& list, const std::string& item) {
        if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
    };
    for (const std::string& control : config.controls) add_once(controls, plain(control));
    std::vector<std::string> interventions, sources;
    for (const std::string& text : config.interventions) add_once(interventions, plain(text));
    for (const std::string& text : config.sources)
        if (!parse_source(text, config.train.model.head_dim()).is_none()) add_once(sources, text);
    std::vector<RunPlan> runs;
    for (const std::uint64_t seed : config.seeds) {
        for (const std::string& control : controls) runs.push_back({"none", control, seed});
        for (const std::string& source : sources)
            for (const std::string& intervention : interventions) runs.push_back({source, intervention, seed});
    }
    return runs;
}

RunMatrix run_matrix(const MatrixConfig& config, const gpt::TokenData& data, const MatrixFiles& files, int threads,
                     const std::function<void(std::int64_t, std::int64_t, const std::string&)>& progress,
                     const std::function<bool()>& cancelled) {
    constexpr std::int64_t checkpoint_every = 100;
    const std::vector<RunPlan> plans = runs_of(config);
    RunMatrix matrix{config, std::vector<RunResult>(plans.size())};
    for (const RunPlan& plan : plans) (void)Run(config, plan, data);  // refuses before the first step what is no run
    if (!files.folder.empty()) {
        std::error_code error;
        fs::create_directories(files.folder, error);
        if (error)
            throw WorkError(fmt::format("{}: cannot be made ({}): expected a writable folder",
                                        escaped(files.folder, files.folder.size()), error.message()));
    }
    Counter counter(static_cast<std::int64_t>(plans.size()) * config.train.steps, progress);
    std::atomic<bool> failed{false};
    parallel_for(plans.size(), threads, [&](std::size_t i) {
        const RunPlan& plan = plans[i];
        RunResult& result = matrix.runs[i];
        result.source = plan.source;
        result.intervention = plan.intervention;
        result.seed = plan.seed;
        const std::string what = fmt::format("{}, {}, seed {}", plan.source, plan.intervention, plan.seed);
        try {
            const auto begin = std::chrono::steady_clock::now();
            Run run(config, plan, data);
            const std::string path = record_path(files, plan);
            result.file = path.empty() ? "" : fs::path(path).filename().string();
            std::vector<StepSample> samples;
            const Found found = find_record(path, run.identity(), files, config.train.steps, samples);
            const auto stop = [&] { return failed || (cancelled && cancelled()); };
            if (found == Found::whole) {
                result.finished = true;
                counter.add(config.train.steps, what);
            } else if (!stop()) {
                train(run, path, found, files, checkpoint_every, result, samples, stop,
                      [&](std::int64_t steps) { counter.add(steps, what); });
            }
            collect(samples, result);
            result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        } catch (...) {
            failed = true;  // the others save their state and end
            throw;
        }
    });
    return matrix;
}

}  // namespace faultline
