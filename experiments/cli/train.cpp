// SPDX-License-Identifier: Apache-2.0
// faultline train: one run of a small GPT, with faults if they are asked for, recorded step by step.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/same_request.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/cli/train_settings.hpp>
#include <faultline/cli/train_summary.hpp>
#include <faultline/cli/written_file.hpp>
#include <faultline/dissociation/fault_hooks.hpp>
#include <faultline/dissociation/fault_report.hpp>
#include <faultline/dissociation/passed_faults.hpp>
#include <faultline/dissociation/run_memory.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt/host_memory.hpp>
#include <faultline/gpt/run.hpp>
#include <faultline/gpt/share.hpp>
#include <faultline/gpt/trainer.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/ranks/ending.hpp>
#include <faultline/ranks/errors.hpp>
#include <faultline/ranks/sums.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

struct TrainCommand {
    TrainSettings train;
    std::string resume;
    std::vector<std::string> injections;
    std::vector<int> capture;
    std::int64_t checkpoint_every = 250, capture_sequences = 4, ranks = 1;
    std::optional<bool> deterministic, overlap, monitors;
    std::string reduce = "auto";
};

/// `expect`: throws RequestError of a fault.
template <class Expect>
void expect_of_faults(const Settings& settings, Expect&& expect) {
    try {
        expect();
    } catch (const RequestError& error) {
        throw RequestError(fmt::format("{}: {}", settings.where("inject"), error.what()));
    }
}

std::vector<Fault> faults_of(const TrainCommand& own, const Settings& settings) {
    std::vector<Fault> faults;
    expect_of_faults(settings, [&] {
        for (const std::string& word : own.injections) faults.push_back(parse_fault(word));
        expect_magnitudes(faults);
    });
    return faults;
}

std::optional<gpt::Reduce> reduce_of(std::string_view name) {
    using gpt::Reduce;
    for (const auto& [known, reduce] : {std::pair("auto", Reduce::automatic),
                                        {"gather", Reduce::gather},
                                        {"fp32", Reduce::nccl},
                                        {"bf16", Reduce::nccl_bf16}})
        if (name == known) return reduce;
    return std::nullopt;
}

/// Settings that name what there is not, or that the CPU would not heed.
void check_options(const TrainCommand& own, const Invocation& call) {
    const Settings& settings = call.settings;
    if (!reduce_of(own.reduce))
        throw RequestError(fmt::format("{}: {}: expected auto, gather, fp32 or bf16", settings.where("reduce"),
                                       in_quotes(own.reduce)));
    if (call.common.output.empty() && own.resume.empty())
        settings.refuse_unread({"checkpoint-every"}, "without --output or --resume");
    if (own.capture.empty()) settings.refuse_unread({"capture-sequences"}, "without --capture");
    if (call.common.share_card && (own.reduce == "fp32" || own.reduce == "bf16"))
        throw RequestError(fmt::format("{}: {}: NCCL takes no two ranks on one card: expected auto or gather with {}",
                                       settings.where("reduce"), own.reduce, settings.where("share-card")));
    if (call.common.share_card && own.ranks == 1 && call.group.ranks() == nullptr)
        throw RequestError(
            fmt::format("{}: a single rank has its card to itself: expected several with it, as --ranks 2",
                        settings.where("share-card")));
    if (call.common.device == "cuda") return;
    for (const auto& [key, asked] : {std::pair("deterministic", !own.deterministic.value_or(true)),
                                     {"overlap", !own.overlap.value_or(true)},
                                     {"monitors", !own.monitors.value_or(true)},
                                     {"share-card", call.common.share_card},
                                     {"reduce", own.reduce == "gather" || own.reduce == "bf16"}})
        if (asked)
            throw RequestError(fmt::format("{}: {}: the CPU has no choice of it: expected --device cuda with it",
                                           settings.where(key),
                                           key == std::string_view("reduce")       ? own.reduce
                                           : key == std::string_view("share-card") ? "true"
                                                                                   : "false"));
}

/// Of a rank on the CPU, beyond the data, which has been read.
gpt::HostMemory memory_of(const TrainCommand& own, const Invocation& call, const gpt::TrainConfig& config,
                          const std::vector<Fault>& faults, int ranks) {
    gpt::HostNeeds needs = host_needs(faults);
    needs.checkpoints = !own.resume.empty() || !call.common.output.empty();
    if (!own.capture.empty()) needs.captured = static_cast<int>(own.capture_sequences);
    needs.ranks = ranks;
    return gpt::host_memory(config, needs);
}

/// RequestError where the record that is gone on with names other data, by their hashes: a checkpoint has no names. What is wrong
/// with the record itself is for run() to say.
void expect_recorded_data(const std::string& record, const TrainData& data, const std::string& given,
                          const Settings& settings) {
    std::vector<InputHash> was;
    try {
        was = RecordReader(record).manifest().inputs;
    } catch (const std::exception&) {
        return;
    }
    const std::vector<InputHash> is = data.inputs();
    if (was.empty() || std::ranges::equal(was, is, {}, &InputHash::hash, &InputHash::hash)) return;
    const auto names = [](const std::vector<InputHash>& all) {
        std::vector<std::string> out;
        for (const InputHash& input : all)
            out.push_back(fmt::format("{} ({})", escaped(input.path, input.path.size()), input.hash));
        return fmt::format("{}", fmt::join(out, " and "));
    };
    throw RequestError(fmt::format("{}: this command reads {}, and {} was begun with {}: expected the data of then",
                                   given.empty() ? "data" : settings.where("data"), names(is),
                                   escaped(record, record.size()), names(was)));
}

/// Everything that is wrong with the run and can be seen by one process: before there are others, so that it is said once and
/// nothing is read many times in vain.
void check_run(const TrainCommand& own, const Invocation& call, const gpt::TrainConfig& config,
               const std::vector<Fault>& faults, const TrainData& data, int ranks, int local) {
    const Settings& settings = call.settings;
    const bool on_device = call.common.device == "cuda";
    if (!own.resume.empty()) expect_recorded_data(own.resume, data, own.train.data, settings);
    gpt::check(config.model);
    gpt::check(config);
    if (!on_device)  // before anything is made whose size goes by the model's
        gpt::expect_room(local > 1 ? "a rank needs" : "the run needs", memory_of(own, call, config, faults, ranks),
                         static_cast<std::uint64_t>(local), gpt::memory_room());
    gpt::check_tokens(data.tokens, config.model.vocabulary, config.model.context);
    data.windows.check(config.steps,
                       static_cast<std::size_t>(config.batch) * static_cast<std::size_t>(config.accumulate),
                       data.tokens.training.size(), config.model.context);
    for (const int step : own.capture)
        if (step < 0 || step >= config.steps)
            throw RequestError(fmt::format("{}: step {}: expected steps of the run, 0 to {}", settings.where("capture"),
                                           step, config.steps - 1));
    if (settings.given("capture-sequences") && own.capture_sequences > config.batch)
        throw RequestError(fmt::format("{}: {}: expected at most the batch, {}", settings.where("capture-sequences"),
                                       own.capture_sequences, config.batch));
    if (ranks == 1) return;
    if (on_device)
        (void)gpt::micro_batches_of_a_rank(ranks, config);
    else
        gpt::expect_work_for(
            ranks, config,
            gpt::groups_of_batch(gpt::ParameterLayout(config.model).size(), config.batch, config.model.context));
}

/// RequestError where the checkpoint or a capture would replace what the command reads or, without --force, what is there.
void expect_beside(const TrainCommand& own, const Invocation& call, int micro_steps) {
    const bool resumes = !own.resume.empty();
    const std::string& output = resumes ? own.resume : call.common.output;
    if (output.empty()) return;
    const std::set<std::int64_t> steps(own.capture.begin(), own.capture.end());
    expect_writable_beside(call.settings, resumes ? "resume" : "output", gpt::there_beside(output, steps, micro_steps),
                           resumes || call.common.force);
    if (!resumes) PartialName(output).abandon();
    // Names that are longer than the record's; of micro-batches the last.
    for (const std::string& path : {gpt::checkpoint_path(output),
                                    gpt::capture_path(output, steps.empty() ? 0 : *steps.rbegin(), micro_steps - 1)})
        PartialName(path).abandon();
}

/// A run on the device, and what is to be said of it.
std::unique_ptr<gpt::Training> on_device(const gpt::TrainConfig& config, const TrainData& data, const TrainCommand& own,
                                         const Invocation& call, FaultHooks& faults, gpt::StepHook* step,
                                         Manifest& manifest, std::vector<std::string>& about) {
    gpt::Hooks hooks;
    hooks.step = step;
    auto trainer = std::make_unique<gpt::DeviceTrainer>(
        config, data.tokens, data.windows,
        gpt::DeviceOptions{
            .deterministic = own.deterministic.value_or(true),
            .ranks = call.group.ranks(),
            .exchange = {own.overlap.value_or(true), reduce_of(own.reduce).value(), call.common.share_card},
            .monitors = own.monitors.value_or(true),
            .faults = &faults},
        hooks);
    manifest.gpu = trainer->device_name();
    about = trainer->description();
    return trainer;
}

/// The run. Where this rank fails alone, or another one is lost, a card may wait for sums that do not come: the record is closed by
/// then, and the process ends without waiting for the card, which tells the others.
template <class F>
gpt::RunOutcome whole_or_at_once(RankGroup& group, gpt::Training& trainer, Progress& line, F&& work) {
    if (group.ranks() == nullptr || !trainer.runs_elsewhere()) return work();
    const auto end = [&](const std::exception& error, Status status) {
        line.clear();
        const bool last = trainer.let_go();
        end_at_once(*group.ranks(), fmt::format("faultline train: {}", error.what()), static_cast<int>(status), last);
    };
    try {
        return work();
    } catch (const SharedFailure&) {
        // All of them end, each with its step done: nobody's memory goes while another one has it open.
        (void)trainer.let_go();
        try {
            settle(group.ranks(), nullptr);
        } catch (const PeerLost&) {
            line.clear();  // what all know is said, and not this
        }
        throw;
    } catch (const RequestError& error) {
        end(error, Status::refused);
    } catch (const std::exception& error) {
        end(error, Status::failed);
    }
    return {};  // not reached
}

Status run(const TrainCommand& own, const Invocation& call) {
    watch_for_interrupts();
    const Settings& settings = call.settings;
    if (std::error_code none; !own.resume.empty() && !call.common.output.empty() &&
                              !std::filesystem::equivalent(own.resume, call.common.output, none))
        throw RequestError(
            fmt::format("{}: {}: is beside {}: expected one of them; a resumed run goes on in its own file",
                        settings.where("output"), in_quotes(call.common.output), settings.where("resume")));
    check_options(own, call);
    const std::vector<Fault> faults = faults_of(own, settings);
    const TrainData data = read_data(own.train, settings);
    end_if_interrupted();
    gpt::TrainConfig config = train_config(own.train, settings, data, 1);
    expect_of_faults(settings, [&] { expect_faults_in_run(faults, config.model, config.steps); });
    expect_beside(own, call, config.accumulate);
    const bool joined = call.group.ranks() != nullptr;
    const int rank_count = joined ? call.group.ranks()->size() : static_cast<int>(own.ranks),
              local = joined ? call.group.ranks()->local_size() : rank_count;
    config.threads =
        call.common.threads > 0 ? static_cast<int>(call.common.threads) : std::max(1, hardware_threads() / local);
    check_run(own, call, config, faults, data, rank_count, local);
    expect_device(call);
    call.group.start(own.ranks, settings.where("ranks"));
    Ranks* const ranks = call.group.ranks();
    std::vector<std::string> planted, hashes;
    for (const Fault& fault : faults) planted.push_back(to_string(fault));
    for (const InputHash& input : data.inputs()) hashes.push_back(input.hash);
    config.also = {{"data", fmt::format("{}", fmt::join(hashes, " "))},
                   {"inject", fmt::format("{}", fmt::join(planted, " "))}};
    AgreedOn agreed = agreed_on(call, config);
    // What is held out goes by the files' names, of which the hashes know nothing.
    agreed.emplace_back("tokens",
                        fmt::format("{} and {} held out", data.tokens.training.size(), data.tokens.validation.size()));
    expect_same(ranks, agreed);

    const RoundingPlan fast = gpt::fast_plan(config.model.bf16);
    FaultHooks hooks(faults, config.model.layers, config.model.heads, [&](int layer, int head) {
        const RoundingPlan* plan = config.model.plan(layer, head);
        return plan != nullptr ? plan : &fast;
    });
    FaultReport report(hooks);
    gpt::Hooks hooked;
    if (!faults.empty()) {
        hooked.step = &report;
        if (hooks.any_attention()) hooked.attention = &hooks;
        if (hooks.any_model()) hooked.model = &hooks;
    }

    gpt::RunFiles files;
    files.resume = !own.resume.empty();
    files.output = files.resume ? own.resume : call.common.output;
    files.checkpoint_every = own.checkpoint_every;
    files.capture.insert(own.capture.begin(), own.capture.end());
    files.capture_sequences = static_cast<int>(own.capture_sequences);
    files.manifest = call.manifest("run", config.seed);
    files.manifest.inputs = data.inputs();
    for (const std::string_view key : settings_of_a_rank()) files.may_differ.emplace(key);
    // How long it is and what it leaves; how the work is divided. Words for the same thing (a plan's file, a fault): the checkpoint
    // has the thing.
    for (const char* key : {"steps", "capture", "capture-sequences", "checkpoint-every", "overlap", "reduce",
                            "share-card", "data-format", "vocab", "attention", "layer-attention", "inject"})
        files.may_differ.emplace(key);
    files.ranks = ranks;
    std::unique_ptr<gpt::Training> training;
    std::vector<std::string> about;  // what is said of the run before its first step
    if (!data.tokens.remark.empty()) about.push_back("faultline train: " + data.tokens.remark);
    files.begins = [&] {
        if (!call.talks()) return;
        for (const std::string& line : about) remark(line);
    };
    const auto expect_passed = [&] { expect_of_faults(settings, [&] { expect_faults_passed(faults, config.model); }); };
    if (call.common.device == "cuda") {
        training = on_device(config, data, own, call, hooks, hooked.step, files.manifest, about);
        expect_passed();  // behind what the device says of faults that it has not
    } else {
        gpt::check(config.model);
        expect_passed();
        training = std::make_unique<gpt::Trainer>(config, data.tokens, data.windows, hooked, ranks);
        about.push_back("memory " + memory_of(own, call, config, faults, rank_count).text());
    }
    gpt::Training& trainer = *training;
    files.manifest.ranks = ranks == nullptr ? 1 : ranks->size();
    files.manifest.reductions = trainer.reductions();
    call.group.ready();

    Progress line(call.talks());
    const gpt::RunOutcome outcome = whole_or_at_once(call.group, trainer, line, [&] {
        return gpt::run(
            trainer, files,
            [&](const gpt::StepReport& r) {
                line.update(static_cast<std::size_t>(r.step) + 1, static_cast<std::size_t>(config.steps), step_text(r));
            },
            interrupted);
    });
    line.clear();
    const Status status = outcome.end == gpt::RunEnd::finished ? Status::done : Status::failed;
    if (!call.group.speaks()) return status;
    print(summary(trainer, outcome, trainer.next_step() - outcome.first_step, call.common.json));
    const std::string again = files.output.empty()
                                  ? "nothing was written"
                                  : fmt::format("to go on: the same command with --resume {} in place of -o",
                                                escaped(files.output, files.output.size()));
    if (outcome.end == gpt::RunEnd::interrupted)
        remark(fmt::format("faultline train: interrupted {}; {}",
                           trainer.next_step() == 0 ? std::string("in the first step")
                                                    : fmt::format("after step {}", trainer.next_step() - 1),
                           again));
    if (const auto& failure = trainer.failure())
        remark(fmt::format("faultline train: step {}: {} is not finite, first at row {}, column {}; {}", failure->step,
                           failure->site, failure->row, failure->column,
                           files.output.empty() ? again
                                                : fmt::format("the state before the step is in {}",
                                                              gpt::checkpoint_path(files.output))));
    return status;
}

}  // namespace

Command train_command() {
    return {
        "train", "Train a small GPT on text, with any attention kernel and any fault, recorded step by step",
        "  faultline train -o control.h5\n"
        "  faultline train --inject delta:multiplicative:0.3 --capture 740 -o fault.h5\n"
        "  faultline attribute fault.step000740.safetensors --plan fa2 --inject delta:multiplicative:0.3\n"
        "  faultline dissociate --help      # runs with a guard, a projection or a repair; or faultline sweep",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<TrainCommand>();
            own->train.declare(settings);
            settings.items("inject", own->injections, "SITE:LAW:MAGNITUDE",
                           "A fault in the attention kernel or the model (docs/injectors.md), again for more");
            settings.may_repeat("inject");
            settings.list("capture", own->capture, "STEP,...",
                          "Write q, k, v, dO of these steps beside the file: captures for faultline attribute");
            settings.integer("capture-sequences", own->capture_sequences, 1, "N", "Sequences of a capture", 1 << 20);
            settings.integer("checkpoint-every", own->checkpoint_every, 0, "N",
                             "Steps between checkpoints; 0: at the end and at an interruption alone");
            settings.choice("deterministic", own->deterministic,
                            "On the device: the same bits each time (default), or (--no-deterministic) the fastest");
            settings.choice("overlap", own->overlap, "Cards add up during the backward (default), or all at its end");
            settings.text("reduce", own->reduce, "auto|gather|fp32|bf16",
                          "How cards add up: copied to each and added there, or by NCCL, in bf16 with rounding");
            settings.integer("ranks", own->ranks, 1, "N",
                             "Processes of this machine that share the work, with --device cuda a card each", 1024);
            settings.choice(
                "monitors", own->monitors,
                "On the device: what is seen inside attention, each step (default), or (--no-monitors) not");
            settings.text("resume", own->resume, "FILE.h5", "Go on with this run from its last checkpoint");
            return [own](const Invocation& call) { return run(*own, call); };
        }};
}

}  // namespace faultline::cli
