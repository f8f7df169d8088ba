// SPDX-License-Identifier: Apache-2.0
// Where the emulated kernels run. What is asked of them is declared here once; a back end is a folder that implements it
// (kernels/cpu, kernels/device), and whoever runs plans takes the back end that it is given.
#pragma once

#include <string_view>

#include <faultline/base/error.hpp>
#include <faultline/cpu/attention.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline {

/// The back end has not the memory for a run of a plan on a group: what is needed and what there is.
class NoRoom : public WorkError {
  public:
    using WorkError::WorkError;
};

struct GroupAttention {
    GroupForward forward;
    GroupBackward backward;
};

/// Every member may be called by any thread; results are the same bits on every back end.
class AttentionBackend {
  public:
    virtual ~AttentionBackend() = default;
    /// As --device has it.
    [[nodiscard]] virtual std::string_view name() const = 0;
    /// How many calls from threads of their own serve it best where the caller was asked for `threads` (0: one for each
    /// hardware thread): parallel_for's threads.
    [[nodiscard]] virtual int calls_at_once(int threads) const = 0;
    /// attention_forward and attention_backward. WorkError where the back end fails, RequestError where it has not what the
    /// call asks for.
    [[nodiscard]] virtual GroupForward forward(const HeadGroup& in, const RoundingPlan& plan,
                                               Instrument* instrument) const = 0;
    [[nodiscard]] virtual GroupBackward backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                                 Instrument* instrument) const = 0;
    /// Both of a group that has gradients of its output, with no instrument. What the plan saves for the backward alone (p and
    /// capped of HeadForward) may be left out: a device keeps it where it is.
    [[nodiscard]] virtual GroupAttention both(const HeadGroup& in, const RoundingPlan& plan) const {
        GroupAttention all{forward(in, plan, nullptr), {}};
        all.backward = backward(in, all.forward, plan, nullptr);
        return all;
    }
    /// Before work that begins with something else: NoRoom, which names the plan, where the back end has not the memory for a run
    /// of it on groups of this shape, its backward too where the group has gradients of its output. instrument: as the run will
    /// be given it, since what is seen takes memory too. Only shapes are read.
    virtual void expect_room(const HeadGroup& /*in*/, const RoundingPlan& /*plan*/,
                             const Instrument* /*instrument*/) const {}
    /// The same of truth: NoRoom where the back end has not the memory for it.
    virtual void expect_room_for_truth(const TruthProblem& /*problem*/) const {}
    /// attention_truth. WorkError where the back end fails, RequestError as attention_truth.
    [[nodiscard]] virtual GroupTruth truth(const TruthProblem& problem, const TruthOptions& options) const = 0;
};

/// kernels/cpu: always there.
[[nodiscard]] const AttentionBackend& cpu_backend();

}  // namespace faultline
