// SPDX-License-Identifier: Apache-2.0
#include <faultline/cpu/backend.hpp>

namespace faultline {
namespace {

class CpuBackend final : public AttentionBackend {
  public:
    [[nodiscard]] std::string_view name() const override { return "cpu"; }
    [[nodiscard]] int calls_at_once(int threads) const override { return threads; }
    [[nodiscard]] GroupForward forward(const HeadGroup& in, const RoundingPlan& plan,
                                       Instrument* instrument) const override {
        return attention_forward(in, plan, instrument);
    }
    [[nodiscard]] GroupBackward backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                         Instrument* instrument) const override {
        return attention_backward(in, fwd, plan, instrument);
    }
    [[nodiscard]] GroupTruth truth(const TruthProblem& problem, const TruthOptions& options) const override {
        return attention_truth(problem, options);
    }
};

}  // namespace

const AttentionBackend& cpu_backend() {
    static const CpuBackend backend;
    return backend;
}

}  // namespace faultline
