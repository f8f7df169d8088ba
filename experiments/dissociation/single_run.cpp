// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/single_run.hpp>

#include <filesystem>

#include <fmt/format.h>

#include <faultline/dissociation/collect.hpp>
#include <faultline/dissociation/matrix_run.hpp>
#include <faultline/gpt/run.hpp>

namespace faultline {
namespace {

namespace fs = std::filesystem;

std::string where(const gpt::NonFinite& failure) { return fmt::format("step {}, {}", failure.step, failure.site); }

/// As faultline train makes a run on a device: the record is written and the spectra are worked out beside the steps, for
/// which nothing waits.
SingleOutcome without_hooks(MatrixRun& run, const gpt::TokenData& data, const SingleRun& how, Found found,
                            const std::string& identity) {
    const std::unique_ptr<gpt::Training> trainer = run.trainer_without_hooks();
    gpt::RunFiles files;
    files.output = how.record;
    files.resume = found == Found::part;
    files.checkpoint_every = how.checkpoint_every;
    files.manifest = make_manifest("run", how.command_line, identity, how.plan.seed);
    files.manifest.inputs = data.inputs;
    const gpt::RunOutcome outcome = gpt::run(
        *trainer, files, [&](const gpt::StepReport& report) { how.stepped(report.step + 1); }, how.cancelled);
    SingleOutcome out{outcome.end != gpt::RunEnd::interrupted, "", outcome.first_step, trainer->next_step()};
    if (trainer->failure()) out.not_finite_where = where(*trainer->failure());
    return out;
}

}  // namespace

std::string identity_of(const MatrixConfig& config, const RunPlan& plan, const gpt::TokenData& data) {
    const MatrixRun run(config, plan, data);
    gpt::check(run.config());
    gpt::check_tokens(data, run.config().model.vocabulary, run.config().model.context);
    return run.identity();
}

SingleOutcome make_single_run(const MatrixConfig& config, const gpt::TokenData& data, const SingleRun& how) {
    MatrixRun run(config, how.plan, data);
    run.use_threads(how.threads);
    const std::string identity = run.identity();
    std::vector<StepSample> samples;
    const Found found = find_record(how.record, identity, {}, run.config().steps, samples);
    if (found == Found::whole) return {true, "", run.config().steps, run.config().steps};
    if (config.trainers != nullptr && !run.hooked()) return without_hooks(run, data, how, found, identity);

    Making making;
    making.path = how.record;
    making.found = found;
    making.command_line = how.command_line;
    making.checkpoint_every = how.checkpoint_every;
    making.cancelled = how.cancelled;
    SingleOutcome outcome;
    making.skipped = [&](std::int64_t steps) {
        outcome.first_step = outcome.steps = steps;
        how.stepped(steps);
    };
    making.stepped = [&] { how.stepped(++outcome.steps); };
    RunResult result;
    result.seed = how.plan.seed;
    train(run, making, result, samples);
    outcome.finished = result.finished;
    outcome.not_finite_where = result.not_finite_where;
    return outcome;
}

RunResult result_of(const RunPlan& plan, const std::string& record, const SingleOutcome& outcome) {
    RunResult result;
    result.source = plan.source;
    result.intervention = plan.intervention;
    result.seed = plan.seed;
    result.finished = outcome.finished;
    result.not_finite = !outcome.not_finite_where.empty();
    result.not_finite_where = outcome.not_finite_where;
    std::vector<StepSample> samples;
    if (fs::exists(record)) {  // a run that ended in its first step has none
        samples = samples_of(record);
        result.file = fs::path(record).filename().string();
    }
    collect(samples, result);
    return result;
}

}  // namespace faultline
