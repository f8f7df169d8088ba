// SPDX-License-Identifier: Apache-2.0
// What a run on the CPU keeps in memory: a function of its shapes, known before the first byte is asked for, so that a run which
// does not fit is refused at once. On a device: gpt_device/memory_plan.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <faultline/gpt/memory_room.hpp>
#include <faultline/gpt/training.hpp>

namespace faultline::gpt {

/// What a run needs beside what every run does.
struct HostNeeds {
    bool checkpoints = false;   ///< it writes a file: its state is copied into each checkpoint
    int captured = 0;           ///< sequences of a micro-batch that a capture writes; 0: it captures no step
    bool instrumented = false;  ///< faults in attention: what passes a site is shown in binary64
    bool emulated = false;      ///< at sites that the fast kernel does not show: every head is emulated
    bool may_norm = false;      ///< QK norm may be switched on
    bool projects = false;      ///< updates of W_Q and W_K are taken apart in binary64
    int ranks = 1;              ///< processes that divide the work
};

/// Bytes at the run's peak, in groups for the print. All of them stop at 2^64 - 1, where sizes are beyond any machine's.
struct HostMemory {
    struct Part {
        std::string name;
        std::uint64_t bytes = 0;
    };
    /// weights, gradient, update, moments, activations, logits, attention, monitors, scratch, in this order; [].
    std::vector<Part> parts;
    [[nodiscard]] std::uint64_t bytes() const;
    [[nodiscard]] std::uint64_t of(std::string_view name) const;
    /// "1.52 GiB: weights 0.46, gradient 0.69, …", or in MiB below 1 GiB; "more than 16 EiB" where it is not known how many.
    [[nodiscard]] std::string text() const;
};

/// Parameters of a model: the size of its layout (ParameterLayout), which for a million layers would itself need a gigabyte.
/// At most 2^64 - 1.
[[nodiscard]] std::uint64_t parameter_count(const ModelConfig& model);

/// Of a run by config.threads threads of one of the ranks. `config` has passed check(ModelConfig) and check(TrainConfig).
[[nodiscard]] HostMemory host_memory(const TrainConfig& config, const HostNeeds& needs);

/// WorkError, one sentence with `what` ("the run needs"), where `count` times as much is more than there is.
void expect_room(const std::string& what, const HostMemory& memory, std::uint64_t count, const MemoryRoom& room);
/// How many of `runs` equal ones are made at once: all, where there is room for them. Else, where nobody has `asked` for so many,
/// as many as there is room for, and WorkError where that is none, or where somebody has.
[[nodiscard]] int runs_with_room(const std::string& what, const HostMemory& one, int runs, bool asked,
                                 const MemoryRoom& room);

}  // namespace faultline::gpt
