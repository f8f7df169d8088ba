// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/matrix.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/dissociation/matrix_run.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

namespace fs = std::filesystem;

/// Told of every step of every run.
class Counter {
  public:
    Counter(std::int64_t total, const std::function<void(std::int64_t, std::int64_t, const std::string&)>& progress)
        : total_(total), progress_(progress) {}
    /// Steps that need not be made: not counted at all, or the remaining time would be wrong.
    void skip(std::int64_t steps) {
        const std::lock_guard lock(mutex_);
        total_ -= steps;
    }
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

/// What each guard's run takes over from the run without intervention of its source and seed; null where it is no guard's,
/// or where there is no such run.
class CommonSteps {
  public:
    CommonSteps(const MatrixConfig& config, const std::vector<RunPlan>& plans)
        : from_(plans.size(), plans.size()), common_(plans.size()) {
        const gpt::ModelConfig& model = config.train.model;
        if (gpt::ParameterLayout(model).size() > parameters_for_guards) return;
        const std::string nothing = to_string(Intervention{});
        for (std::size_t i = 0; i < plans.size(); ++i) {
            const Intervention intervention = parse_intervention(plans[i].intervention);
            if (intervention.kind != Intervention::Kind::guard) continue;
            for (std::size_t j = 0; j < plans.size(); ++j)
                if (plans[j].source == plans[i].source && plans[j].seed == plans[i].seed &&
                    to_string(parse_intervention(plans[j].intervention)) == nothing)
                    from_[i] = j;
            if (from_[i] < plans.size())
                common_[i] =
                    std::make_unique<Dormant>(Channel(intervention, model.layers, model.heads, plans[i].seed, nullptr));
        }
    }
    [[nodiscard]] bool takes_over(std::size_t run) const { return common_[run] != nullptr; }
    /// Null unless the other run has ended: waiting for it would leave a processor idle.
    [[nodiscard]] Dormant* of(std::size_t run) {
        const std::lock_guard lock(mutex_);
        return common_[run] && ended_.contains(from_[run]) ? common_[run].get() : nullptr;
    }
    /// A run begins: those for which it leaves something.
    [[nodiscard]] std::vector<Dormant*> begin(std::size_t run) {
        const std::lock_guard lock(mutex_);
        begun_.insert(run);
        std::vector<Dormant*> guards;
        for (std::size_t i = 0; i < from_.size(); ++i)
            if (common_[i] && from_[i] == run && !begun_.contains(i)) guards.push_back(common_[i].get());
        return guards;
    }
    void end(std::size_t run) {
        const std::lock_guard lock(mutex_);
        ended_.insert(run);
    }

  private:
    std::vector<std::size_t> from_;
    std::vector<std::unique_ptr<Dormant>> common_;
    std::set<std::size_t> begun_, ended_;
    std::mutex mutex_;
};

/// Runs seed by seed, within a seed those last that take steps over from others.
std::vector<std::size_t> order_of(const std::vector<RunPlan>& plans, const CommonSteps& common) {
    std::vector<std::size_t> order(plans.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (auto first = order.begin(); first != order.end();) {
        const auto last = std::find_if(first, order.end(), [&](auto i) { return plans[i].seed != plans[*first].seed; });
        std::stable_partition(first, last, [&](std::size_t i) { return !common.takes_over(i); });
        first = last;
    }
    return order;
}

}  // namespace

bool RunMatrix::complete() const {
    return std::all_of(runs.begin(), runs.end(), [](const RunResult& run) { return run.finished; });
}

std::vector<std::string> default_controls(const std::vector<std::string>& interventions) {
    std::vector<std::string> controls;
    for (const std::string& text : interventions) {
        const Intervention::Kind kind = parse_intervention(text).kind;
        const bool by_itself = kind == Intervention::Kind::qk_norm || to_string(parse_intervention(text)) == "project";
        if (by_itself) controls.push_back(text);
    }
    return controls;
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
        if (!parse_source(text, config.train.model.head_dim(), config.folder).is_none()) add_once(sources, text);
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
    const std::vector<RunPlan> plans = runs_of(config);
    RunMatrix matrix{config, std::vector<RunResult>(plans.size())};
    for (const RunPlan& plan : plans)
        (void)MatrixRun(config, plan, data);  // refuses before the first step what is no run
    if (!files.folder.empty()) {
        std::error_code error;
        fs::create_directories(files.folder, error);
        if (error)
            throw WorkError(fmt::format("{}: cannot be made ({}): expected a writable folder",
                                        escaped(files.folder, files.folder.size()), error.message()));
    }
    Counter counter(static_cast<std::int64_t>(plans.size()) * config.train.steps, progress);
    std::atomic<bool> failed{false};
    CommonSteps common(config, plans);
    const std::vector<std::size_t> order = order_of(plans, common);
    parallel_for(plans.size(), threads, [&](std::size_t turn) {
        const std::size_t i = order[turn];
        const RunPlan& plan = plans[i];
        RunResult& result = matrix.runs[i];
        result.source = plan.source;
        result.intervention = plan.intervention;
        result.seed = plan.seed;
        const std::string what = fmt::format("{}, {}, seed {}", plan.source, plan.intervention, plan.seed);
        try {
            const auto begin = std::chrono::steady_clock::now();
            MatrixRun run(config, plan, data);
            Making how;
            how.path = record_path(files, plan);
            how.command_line = files.command_line;
            how.checkpoint_every = files.checkpoint_every;
            how.cancelled = [&] { return failed || (cancelled && cancelled()); };
            how.skipped = [&](std::int64_t steps) { counter.skip(steps); };
            how.stepped = [&] { counter.add(1, what); };
            result.file = how.path.empty() ? "" : fs::path(how.path).filename().string();
            std::vector<StepSample> samples;
            how.found = find_record(how.path, run.identity(), files, config.train.steps, samples);
            if (how.found == Found::whole) {
                result.finished = true;
                counter.skip(config.train.steps);
            } else if (!how.cancelled()) {
                how.taken_over = common.of(i);
                how.guards = common.begin(i);
                train(run, how, result, samples);
                common.end(i);
            }
            if (!fs::exists(how.path)) result.file.clear();  // it ended in its first step
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
