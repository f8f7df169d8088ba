// SPDX-License-Identifier: Apache-2.0
// Which probe works on which file, and what runs them: faultline probe. Definitions are in <faultline/probes/…>.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/attribution/capture.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/probes/conservation.hpp>
#include <faultline/probing/report.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline::probing {

struct ProbeInfo {
    std::string_view name;
    std::string_view files;  ///< "capture, run"
    std::string_view description;
};
/// The public table (`faultline probe --list`).
[[nodiscard]] std::span<const ProbeInfo> catalogue();

struct ProbeOptions {
    std::vector<std::string> probes;  ///< names of the catalogue; empty: all that the files allow
    std::vector<std::string> layers;  ///< empty: all
    std::vector<int> heads;           ///< empty: all
    RoundingPlan plan;                ///< captures: whose kernel is watched
    int terms = 128;                  ///< rank-1 terms per head and file, rows evenly spaced
    int directions = 3;               ///< leading singular directions
    std::optional<int> row;           ///< of the running output; empty: the row with the most weights of 1, of
                                      ///< several the one whose delta is furthest off
    int window = 0;                   ///< of coherence, rows or steps; 0: all
    double tolerance = 1e-3;          ///< logits within which a maximum counts as repeated
    double softcap = 0;               ///< of the scores of a capture; 0: what the capture says
    double rise = 0.3;                ///< nat: DivergenceRule
    double margin = 2;                ///< WarningRule
    int threads = 1;                  ///< 0: one per hardware thread; results do not depend on it
    std::function<bool()> cancelled;  ///< polled between pieces; true: WorkError
    const AttentionBackend* backend = &cpu_backend();  ///< where plans run; results do not depend on it

    [[nodiscard]] bool wants(std::string_view probe) const;
};

/// A capture with what only probes read: LAYER.x, the layer's input [batch, seq, width].
struct ProbeCapture {
    std::string label;  ///< the file's stem: names it where there are several
    TensorSet tensors;
    Capture capture;
};

/// Blocks of every layer and probe. RequestError where files do not fit each other.
[[nodiscard]] Report probe_captures(std::span<const ProbeCapture> captures, const ProbeOptions& options);
/// Checkpoints of `faultline train`: singular directions of each, distances of each from the first.
[[nodiscard]] Report probe_checkpoints(std::span<const TensorSet> checkpoints, const ProbeOptions& options);
/// Runs of `faultline train`: conservation and coherence of each, and early warning over all.
[[nodiscard]] Report probe_runs(std::span<const std::string> paths, const ProbeOptions& options);

/// For the sources of this folder.
void add_similarity(std::span<const ProbeCapture> captures, const ProbeOptions& options, Report& report);
/// The softcap of a layer's scores: the options' where they give one, else the capture's.
[[nodiscard]] double softcap_of(const LayerCapture& layer, const ProbeOptions& options);
/// What a note says where no plan ran.
inline constexpr std::string_view plan_left_out = "the plan is left out: a layer with a softcap or a sink";
/// RequestError for a layer with dropout.
void expect_no_dropout(const ProbeCapture& capture, const LayerCapture& layer);
/// Query head `h` of batch element `b`, as the probes take it.
[[nodiscard]] HeadInputs inputs_of(const LayerCapture& layer, std::ptrdiff_t b, std::ptrdiff_t h,
                                   const ProbeOptions& options);
/// The query heads that are probed, rising.
[[nodiscard]] std::vector<int> heads_of(const LayerCapture& layer, const ProbeOptions& options);
/// "head 0", …
[[nodiscard]] std::vector<std::string> head_names(std::span<const int> heads);
/// Place of a layer of a capture: its name, behind the file's label where there are several.
[[nodiscard]] std::string place_of(const ProbeCapture& capture, const LayerCapture& layer, std::size_t captures);
/// WorkError "interrupted" where the options say so.
void expect_going_on(const ProbeOptions& options);

}  // namespace faultline::probing
