// SPDX-License-Identifier: Apache-2.0
// What each rank has, copied to the card of every other rank of its machine by memory copies, which CUDA gives to the cards' copy
// engines where it likes: no kernel that adds or copies stands beside the products. Private to this folder.
//
// A rank opens the others' memory (CUDA IPC) and copies into it. Two words a pair of ranks order that, set on one card and waited for
// on the other by stream memory operations, all of which may be recorded in a graph:
//   full   at the receiver: the sender's copies of this step are there; the receiver takes it back once it has seen it;
//   empty  at the sender: the receiver has read those of the step before, so that new ones may come; likewise.
// Each is set anew only after the other one was seen, so none is set twice before it is taken back.
//
// What makes the copies seen with the word: the sender writes it behind a fence of the whole system (cuda.h,
// CU_STREAM_WRITE_VALUE_DEFAULT), which is promised to threads of other devices, and a thread of the receiver's takes it back with an
// acquiring operation of the same scope (gather_kernels.hpp), in front of whatever reads. The wait in front of that thread is no
// part of the order: it keeps the thread from turning in a loop.
//
// Two ranks may have one card, each in a process. Without MPS their work takes turns there. A wait that is not fulfilled gives the turn
// away (the host engine's semaphore acquire switches to another group of channels: ACQUIRE_SWITCH_TSG in NVIDIA's clc86f.h), and one
// that did not would lose it at the end of its time; under MPS every process has its queues. No rank waits for what another one does
// later than this rank's own part of the same step, so that there is no circle, also where streams of a process share a queue.
// That it goes so on the machine at hand is tried before the first step.
#pragma once

#include <chrono>
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
    /// several machines, cards that do not reach each other, no room, or a first exchange that brings other values than were sent or
    /// is not done within `patience`; then `why` says which, in words that fit behind a colon.
    [[nodiscard]] static std::unique_ptr<Gather> among(Ranks& ranks, std::size_t bytes, std::string& why,
                                                       std::chrono::milliseconds patience = std::chrono::seconds(30));
    /// At the end of a run that went well, as part(). Where an exception comes by, the memory is left to the end of the process.
    ~Gather();
    /// All ranks at the same time, with nothing on their streams: each closes what it has open of the others', and waits until all
    /// have; only then is memory freed. Nothing but the end of this may come afterwards. PeerLost.
    void part();
    /// The same of one rank that ends without the others, whose memory it has open no longer: what it has itself stays until its
    /// process ends.
    void let_go() noexcept;
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
    void call_off() const noexcept;

  private:
    struct State;
    /// A step with a few words of each rank's own, and whether they came; empty. WorkError.
    [[nodiscard]] std::string first_exchange(std::chrono::milliseconds patience);
    /// As call_off(), until the stream is done: the process ends where it is not within some seconds.
    void end_waiting(Stream stream) const;
    explicit Gather(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace faultline::gpt::on_device
