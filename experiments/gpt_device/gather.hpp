// SPDX-License-Identifier: Apache-2.0
// What each rank has, copied to the card of every other rank of its machine by memory copies, which CUDA gives to the cards' copy
// engines where it likes: no kernel of ours or NCCL's stands beside the products. Private to this folder.
//
// A rank opens the others' memory (CUDA IPC) and copies into it. Two words a pair of ranks order that, set on one card and waited for
// on the other by stream memory operations, all of which may be recorded in a graph:
//   full   at the receiver: the sender's copies of this step are there; the receiver takes it back once it has seen it;
//   empty  at the sender: the receiver has read those of the step before, so that new ones may come; likewise.
// Each is set anew only after the other one was seen, so none is set twice before it is taken back.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/ranks/ranks.hpp>

namespace faultline::gpt::on_device {

/// Where the parts of all ranks are on one of them: its own anywhere, those of the others one after the other, in their order.
struct GatheredParts {
    const char* others = nullptr;
    std::size_t bytes = 0;  ///< from one of the others' to the next
    int rank = 0, ranks = 1;
};

class Gather {
  public:
    /// All ranks make one at the same time, for parts of `bytes`, a multiple of 256. Null, on all of them, where it cannot be: ranks of
    /// several machines, cards that do not reach each other, no room; then `why` says which, in words that fit behind a colon.
    [[nodiscard]] static std::unique_ptr<Gather> among(Ranks& ranks, std::size_t bytes, std::string& why);
    /// At the end of a run that went well the ranks wait for each other: nobody's memory goes while another one has it open.
    ~Gather();
    Gather(const Gather&) = delete;
    Gather& operator=(const Gather&) = delete;

    // A step of each rank: begin, copies, done; then wait, and after the last use of what came, release. They launch on the stream and do
    // not wait; WorkError where CUDA fails.
    /// What comes on the stream waits until the others have released what this rank copied in the step before.
    void begin(Stream stream) const;
    /// Bytes of this rank's part from `offset` on, to all others.
    void copy(std::size_t offset, const void* from, std::size_t bytes, Stream stream) const;
    /// All copies that are on the stream are the whole part.
    void done(Stream stream) const;
    /// What comes on the stream waits until the others' parts are here.
    void wait(Stream stream) const;
    void release(Stream stream) const;

    [[nodiscard]] GatheredParts parts() const;
    /// Bytes of this card that it has for the others' parts.
    [[nodiscard]] std::size_t room() const;
    /// Ends what waits for another rank on this card, so that the device can be taken apart. Nothing but the end of this may come
    /// afterwards.
    void call_off() noexcept;

  private:
    struct State;
    explicit Gather(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace faultline::gpt::on_device
