// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/matrix_run.hpp>

#include <cctype>
#include <filesystem>
#include <mutex>
#include <optional>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/passed_faults.hpp>
#include <faultline/dissociation/without_effect.hpp>
#include <faultline/gpt/fingerprint.hpp>
#include <faultline/gpt/run.hpp>
#include <faultline/gpt/run_record.hpp>
#include <faultline/gpt/without_effect.hpp>
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

/// Shows a step of the run without intervention to the guards that wait; those that it triggers get the state after it.
void leave_to_guards(const std::vector<Dormant*>& guards, const gpt::Trainer& trainer, const gpt::StepReport& report,
                     bool recorded) {
    std::optional<TensorSet> state;
    for (Dormant* guard : guards) {
        if (guard->watching.triggered_at() >= 0) continue;
        if (recorded) guard->reports.push_back(report);
        guard->samples.push_back(sample_of(report));
        ++guard->steps;
        guard->watching.watch(report);
        if (guard->watching.triggered_at() < 0 && !trainer.finished()) continue;
        if (!state) state = trainer.state();
        guard->state = *state;
        guard->ready = true;
    }
}

/// The plans of a source, from the model's choice `first` on, do something each.
void expect_plans_met(const gpt::ModelConfig& model, std::size_t first) {
    const auto idle = gpt::choice_without_effect(model, first);
    if (!idle) return;
    const gpt::AttentionChoice& choice = model.attention[*idle];
    throw RequestError(fmt::format(
        "plan {} in {}: does nothing: every head would run the same plan without it: expected none, or another",
        in_quotes(choice.plan->name), choice.layer < 0 ? "every layer" : fmt::format("layer {}", choice.layer)));
}

}  // namespace

MatrixRun::MatrixRun(const MatrixConfig& matrix, const RunPlan& plan, const gpt::TokenData& data)
    : config_(matrix.train),
      intervention_(parse_intervention(plan.intervention)),
      source_(parse_source(plan.source, config_.model.head_dim(), matrix.folder)),
      windows_(plan.seed),
      data_(data),
      trainers_(matrix.trainers) {
    config_.seed = plan.seed;
    config_.threads = 1;
    if (config_.validate_every == 0)
        config_.validate_every = static_cast<int>(config_.steps);  // a result has a validation loss
    for (const gpt::AttentionChoice& choice : source_.attention) config_.model.attention.push_back(choice);
    expect_intervention_acts(intervention_, plan.intervention, config_, source_.faults);
    if (intervention_.kind == Intervention::Kind::qk_norm) config_.model.qk_norm = gpt::QkNorm::parameter_free;
    try {
        gpt::check(config_.model);  // now, and not when the run's turn comes
        expect_plans_met(config_.model, config_.model.attention.size() - source_.attention.size());
        expect_repairs_passed(source_, config_.model);
        expect_faults_in_run(source_.faults, config_.model, config_.steps);
        if (trainers_ != nullptr) trainers_->check(config_, source_.faults, intervention_);
        expect_faults_passed(source_.faults, config_.model);
    } catch (const RequestError& error) {
        throw RequestError(fmt::format("source {}, intervention {}: {}", in_quotes(plan.source),
                                       in_quotes(plan.intervention), error.what()));
    }
    if (intervention_.kind == Intervention::Kind::repair && intervention_.from >= config_.steps)
        throw RequestError(fmt::format("intervention {}: from: {}: expected a step of the run, 0 to {}",
                                       in_quotes(plan.intervention), intervention_.from, config_.steps - 1));
    if (intervention_.kind == Intervention::Kind::project && intervention_.k > config_.model.width)
        throw RequestError(fmt::format("intervention {}: k: {}: expected directions that W_Q and W_K have, 1 to {}",
                                       in_quotes(plan.intervention), intervention_.k, config_.model.width));
    for (Fault& fault : source_.faults) fault.seed += plan.seed;  // seeds of a matrix draw other signs
    fast_ = gpt::fast_plan(config_.model.bf16);
    faults_ = std::make_unique<FaultHooks>(source_.faults, config_.model.layers, config_.model.heads,
                                           [this](int layer, int head) {
                                               const RoundingPlan* chosen = config_.model.plan(layer, head);
                                               return chosen != nullptr ? chosen : &fast_;
                                           });
    channel_ =
        std::make_unique<Channel>(intervention_, config_.model.layers, config_.model.heads, plan.seed, faults_.get());
}

gpt::Training& MatrixRun::trainer() {
    if (!trainer_) {
        gpt::Hooks hooks;
        hooks.update = channel_.get();
        hooks.step = channel_.get();
        if (trainers_ != nullptr) {
            // There an update hook costs the copies of what it sees.
            const bool projects = intervention_.kind == Intervention::Kind::project,
                       by_itself =
                           projects &&
                           (intervention_.removal == Removal::leading || intervention_.removal == Removal::shrink) &&
                           trainers_->projects(channel_->projection(), config_.model.width);
            if (!projects || by_itself) hooks.update = nullptr;
            trainer_ = trainers_->make(config_, data_, windows_, *faults_, by_itself ? channel_.get() : nullptr, hooks);
            return *trainer_;
        }
        if (faults_->any_attention()) hooks.attention = faults_.get();
        if (faults_->any_model()) hooks.model = faults_.get();
        trainer_ = std::make_unique<gpt::Trainer>(config_, data_, windows_, hooks);
    }
    return *trainer_;
}

std::unique_ptr<gpt::Training> MatrixRun::trainer_without_hooks() {
    return trainers_->make(config_, data_, windows_, *faults_, nullptr, {});
}

std::string MatrixRun::identity() const {
    std::string text;
    for (const auto& [key, value] : gpt::fingerprint(config_)) text += fmt::format("{} = {}\n", key, value);
    text += fmt::format("steps = {}\nsource = {}\nintervention = {}\n", config_.steps, source_.text,
                        to_string(intervention_));
    for (const InputHash& input : data_.inputs) text += fmt::format("data = {}\n", input.hash);
    if (trainers_ != nullptr) text += "device = cuda\n";
    return text;
}

std::string record_path(const MatrixFiles& files, const RunPlan& plan) {
    if (files.folder.empty()) return "";
    return (fs::path(files.folder) /
            fmt::format("{}__{}__seed{}.h5", slug(plan.source), slug(plan.intervention), plan.seed))
        .string();
}

Found find_record(const std::string& path, const std::string& identity, const MatrixFiles& files, std::int64_t steps,
                  std::vector<StepSample>& samples) {
    if (path.empty() || !fs::exists(path)) return Found::nothing;
    const std::lock_guard lock(hdf5());
    const auto is_of_this_run = [&] {
        try {
            return RecordReader(path).manifest().config_toml == identity;
        } catch (const RequestError& error) {  // damaged
            if (files.replace) return false;
            throw RequestError(fmt::format("{}; {} makes the run anew", error.what(),
                                           files.folder.empty() ? "removing it" : "--force, or removing it,"));
        }
    };
    if (!is_of_this_run()) {
        if (files.replace) return Found::nothing;
        throw RequestError(fmt::format("{}: is the run of another configuration: expected that of this one, or {}",
                                       escaped(path, path.size()),
                                       files.folder.empty() ? "none: where it is removed the run is made" : "--force"));
    }
    samples = samples_of(path);
    if (!samples.empty() && samples.back().step + 1 == steps) return Found::whole;
    samples.clear();
    return fs::exists(gpt::checkpoint_path(path)) ? Found::part : Found::nothing;
}

void train(MatrixRun& run, const Making& how, RunResult& result, std::vector<StepSample>& samples) {
    gpt::Training& trainer = run.trainer();
    auto* const on_cpu = dynamic_cast<gpt::Trainer*>(&trainer);  // whose state can be kept in memory
    const std::string checkpoint = gpt::checkpoint_path(how.path);
    std::optional<gpt::RunRecord> record;
    const auto save = [&] {
        if (record) trainer.save(checkpoint);
    };
    if (!how.path.empty()) {
        const std::lock_guard lock(hdf5());
        if (how.found == Found::part) {
            trainer.restore(checkpoint);
            record = gpt::RunRecord::resume(how.path, trainer.next_step() - 1);
        } else {
            std::error_code ignored;
            fs::remove(checkpoint, ignored);  // it would be of another run
            Manifest manifest = make_manifest("run", how.command_line, run.identity(), result.seed);
            record = gpt::RunRecord::create(how.path, manifest);
        }
    }
    if (how.found == Found::nothing && how.taken_over != nullptr && how.taken_over->ready && on_cpu != nullptr) {
        const Dormant common = std::move(*how.taken_over);
        on_cpu->restore(common.state);
        run.channel().watch(trainer.report());
        samples = common.samples;
        if (record) {
            const std::lock_guard lock(hdf5());
            for (const gpt::StepReport& report : common.reports) record->write(report);
        }
        save();
    }
    how.skipped(trainer.next_step());
    trainer.cancel_when(how.cancelled, record.has_value());
    const bool from_the_start = trainer.next_step() == 0;
    bool stopped = false;
    while (!trainer.finished() && !stopped) {
        (void)trainer.step();
        if (trainer.abandoned()) {
            stopped = true;
            break;
        }
        if (trainer.failure()) break;
        const gpt::StepReport& report =
            trainer.report();  // whole: a device leaves the spectra to be finished, which are judged
        if (record) {
            const std::lock_guard lock(hdf5());
            record->write(report);
        }
        samples.push_back(sample_of(report));
        if (from_the_start && on_cpu != nullptr) leave_to_guards(how.guards, *on_cpu, report, record.has_value());
        how.stepped();
        if (trainer.next_step() % how.checkpoint_every == 0 && !trainer.finished()) save();
        stopped = !trainer.finished() && how.cancelled();
    }
    save();
    if (record) {
        const std::lock_guard lock(hdf5());
        record->close();
        // A resumed run has more steps than those made here; one that ended in its first step has no record.
        if (fs::exists(how.path)) samples = samples_of(how.path);
    }
    result.finished = !stopped;
    if (trainer.failure()) {
        result.not_finite = true;
        result.not_finite_where = fmt::format("step {}, {}", trainer.failure()->step, trainer.failure()->site);
    }
}

}  // namespace faultline
