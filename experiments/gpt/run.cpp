// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/run.hpp>

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/record_writer.hpp>
#include <faultline/ranks/sums.hpp>
#include <faultline/tensor/safetensors.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

namespace fs = std::filesystem;

std::string stem_of(const std::string& output) {
    return (fs::path(output).parent_path() / fs::path(output).stem()).string();
}

/// [sequence, head, token, head_dim] from [token, width].
std::vector<float> by_head(const std::vector<float>& x, const ModelConfig& m, int sequences) {
    const auto width = static_cast<std::size_t>(m.width), d = static_cast<std::size_t>(m.head_dim());
    const auto length = static_cast<std::size_t>(m.context);
    std::vector<float> out;
    out.reserve(static_cast<std::size_t>(sequences) * length * width);
    for (std::size_t b = 0; b < static_cast<std::size_t>(sequences); ++b)
        for (std::size_t h = 0; h < static_cast<std::size_t>(m.heads); ++h)
            for (std::size_t t = 0; t < length; ++t) {
                const auto row = x.begin() + static_cast<std::ptrdiff_t>((b * length + t) * width + h * d);
                out.insert(out.end(), row, row + static_cast<std::ptrdiff_t>(d));
            }
    return out;
}

/// bf16 as its bits where every value is one, else as float: nothing is lost.
Tensor tensor_of(const std::string& name, const std::vector<std::int64_t>& shape, const std::vector<float>& values) {
    std::vector<std::uint16_t> bits;
    bits.reserve(values.size());
    for (const float value : values) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        if ((word & 0xffffU) != 0) return make_tensor<float>(name, shape, values);
        bits.push_back(static_cast<std::uint16_t>(word >> 16));
    }
    return make_tensor<std::uint16_t>(name, shape, bits, Dtype::bf16);
}

void write_capture(const std::string& path, const Training& trainer, std::int64_t step, int sequences,
                   const Training::Captured& layers) {
    const ModelConfig& m = trainer.config().model;
    sequences = std::min(sequences, trainer.config().batch);
    const std::vector<std::int64_t> shape{sequences, m.heads, m.context, m.head_dim()};
    TensorSet set;
    for (std::size_t l = 0; l < layers.size(); ++l) {
        const auto add = [&](const char* part, const std::vector<float>& values) {
            set.add(tensor_of(fmt::format("layer{}.{}", l, part), shape, by_head(values, m, sequences)));
        };
        add("q", layers[l].q);
        add("k", layers[l].k);
        add("v", layers[l].v);
        add("do", layers[l].dout);
        // The layer's input is of no head: [batch, seq, width], as `faultline probe` reads it.
        const auto tokens = static_cast<std::size_t>(sequences) * static_cast<std::size_t>(m.context);
        std::vector<float> x = layers[l].x;
        x.resize(tokens * static_cast<std::size_t>(m.width));
        set.add(tensor_of(fmt::format("layer{}.x", l), {sequences, m.context, m.width}, x));
    }
    set.metadata["causal"] = "true";
    set.metadata["scale"] = fmt::format("{}", 1.0 / std::sqrt(static_cast<double>(m.head_dim())));
    if (m.softcap > 0) set.metadata["softcap"] = fmt::format("{}", m.softcap);
    set.metadata["step"] = std::to_string(step);
    write_safetensors(path, set);
}

void prepare_captures(Training& trainer, const RunFiles& files) {
    if (files.capture.empty()) return;
    if (files.output.empty()) throw RequestError("capture: needs a file to stand beside: expected -o FILE.h5 with it");
    trainer.capture([&files](std::int64_t step) { return files.capture.contains(step); },
                    [&files, &trainer](std::int64_t step, int micro_step, const Training::Captured& layers) {
                        write_capture(capture_path(files.output, step, micro_step), trainer, step,
                                      files.capture_sequences, layers);
                    });
}

/// RequestError where a step is to be captured that was done before, and its capture is not there from then.
void expect_captures_to_come(const Training& trainer, const RunFiles& files) {
    for (const std::int64_t step : files.capture)
        if (const std::string path = capture_path(files.output, step, 0);
            step < trainer.next_step() && !fs::exists(path))
            throw RequestError(
                fmt::format("capture: step {}: was done before, and {} is not there: expected steps from {} on", step,
                            escaped(path, path.size()), trainer.next_step()));
}

bool writes(const RunFiles& files) { return files.ranks == nullptr || files.ranks->first(); }

std::optional<RunRecord> open_record(Training& trainer, const RunFiles& files) {
    if (files.output.empty()) {
        if (files.resume) throw RequestError("resume: needs a file to go on with: expected -o FILE.h5 with it");
        return std::nullopt;
    }
    if (!files.resume && !writes(files)) return std::nullopt;
    if (!files.resume) {
        // First, for it refuses a file that another run is still writing.
        RunRecord record = RunRecord::create(files.output, files.manifest);
        std::error_code ignored;
        fs::remove(checkpoint_path(files.output), ignored);  // it would be of another run
        return record;
    }
    const std::string checkpoint = checkpoint_path(files.output);
    if (!fs::exists(checkpoint))
        throw RequestError(fmt::format("{}: is missing: expected the checkpoint of the run to resume",
                                       escaped(checkpoint, checkpoint.size())));
    trainer.restore(checkpoint);
    if (!writes(files)) return std::nullopt;  // the first rank does
    expect_captures_to_come(trainer, files);
    // A run that ended in its first step has left its state alone.
    if (trainer.next_step() == 0 && !fs::exists(files.output)) return RunRecord::create(files.output, files.manifest);
    // Before anything is written, and of a run that is done as of any other.
    StepReport last = trainer.report();
    last.step = trainer.next_step() - 1;
    RunRecord::expect_record_of(files.output, last, files.manifest, files.may_differ);
    if (trainer.finished()) return std::nullopt;  // the file is whole
    return RunRecord::resume(files.output, trainer.next_step() - 1, trainer.config().steps, &files.manifest);
}

}  // namespace

std::string checkpoint_path(const std::string& output) { return stem_of(output) + ".checkpoint.safetensors"; }

std::string capture_path(const std::string& output, std::int64_t step, int micro_step) {
    return micro_step == 0 ? fmt::format("{}.step{:06}.safetensors", stem_of(output), step)
                           : fmt::format("{}.step{:06}-{}.safetensors", stem_of(output), step, micro_step);
}

std::vector<std::string> there_beside(const std::string& output, const std::set<std::int64_t>& steps,
                                      std::int64_t micro_steps) {
    std::vector<std::string> there;
    std::error_code error;
    if (fs::exists(fs::symlink_status(checkpoint_path(output), error))) there.push_back(checkpoint_path(output));
    const std::string begin = fs::path(output).stem().string() + ".step", end = ".safetensors";
    const fs::path folder = fs::path(output).parent_path();
    for (const fs::directory_entry& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
        const std::string name = entry.path().filename().string();
        if (!name.starts_with(begin) || !name.ends_with(end) || name.size() < begin.size() + end.size()) continue;
        const char* const last = name.data() + name.size() - end.size();
        std::int64_t step = -1, micro_step = 0;
        const auto [after, wrong] = std::from_chars(name.data() + begin.size(), last, step);
        if (wrong != std::errc() || !steps.contains(step)) continue;
        if (after != last && (*after != '-' || std::from_chars(after + 1, last, micro_step).ptr != last)) continue;
        if (micro_step >= micro_steps) continue;
        if (const std::string path = capture_path(output, step, static_cast<int>(micro_step));
            fs::path(path).filename() == name)
            there.push_back(path);
    }
    return there;
}

RunOutcome run(Training& trainer, const RunFiles& files, const std::function<void(const StepReport&)>& progress,
               const std::function<bool()>& cancelled) {
    const auto begin = std::chrono::steady_clock::now();
    std::optional<RunRecord> record;
    std::error_code unknown;
    const bool was_there = files.resume || fs::exists(files.output, unknown);
    together(files.ranks, [&] {
        prepare_captures(trainer, files);
        record = open_record(trainer, files);
    });
    if (files.begins) files.begins();
    RunOutcome outcome;
    outcome.first_step = trainer.next_step();
    std::optional<RecordWriter> writer;
    if (record) writer.emplace(*record, trainer.runs_elsewhere());
    // A checkpoint is never of a step that the file has not: a run that is taken up drops later steps, and misses none.
    const auto save = [&] {
        if (!record) return;
        writer->drain();
        trainer.save(checkpoint_path(files.output));
    };
    if (cancelled) trainer.cancel_when(cancelled, record.has_value());
    // Where the disk refuses the first step there is nothing to go on from, and nothing shall be in the way of another try.
    const auto write_or_remove = [&](const StepReport& report) {
        try {
            writer->write(report);
        } catch (const WorkError&) {
            if (report.step == 0 && !was_there) {
                writer.reset();
                record.reset();
                std::error_code ignored;
                fs::remove(files.output, ignored);
            }
            throw;
        }
    };
    while (!trainer.finished()) {
        const StepReport& report = trainer.step();
        if (trainer.abandoned()) {
            outcome.end = RunEnd::interrupted;
            break;
        }
        if (trainer.failure()) {
            outcome.end = RunEnd::not_finite;
            break;
        }
        const bool stop = any_together(files.ranks, [&] {
            if (writer) write_or_remove(report);
            if (progress) progress(report);
            const bool due = files.checkpoint_every > 0 && trainer.next_step() % files.checkpoint_every == 0;
            if (due && !trainer.finished()) save();
            return !trainer.finished() && cancelled && cancelled();
        });
        if (stop) {
            outcome.end = RunEnd::interrupted;
            break;
        }
    }
    together(files.ranks, [&] {
        save();
        if (record) record->close();
    });
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return outcome;
}

}  // namespace faultline::gpt
