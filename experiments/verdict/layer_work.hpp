// SPDX-License-Identifier: Apache-2.0
// What a verdict on a layer is made from: truth, the plan's own run, and the runs of the null model, which go by and are
// not kept (head_cells.hpp).
#pragma once

#include <array>
#include <optional>
#include <vector>

#include <faultline/attribution/group_run.hpp>
#include <faultline/base/work_count.hpp>
#include <faultline/verdict/check.hpp>
#include <faultline/verdict/head_cells.hpp>

namespace faultline::verdict {

/// One output, or lse, over the heads.
struct OutputWork {
    std::vector<HeadCells> heads;
    std::vector<int> numbers;  ///< of the heads: as in Finding
    std::vector<ErrorSums> observed_errors, plan_errors;
    std::size_t equal = 0, total = 0;  ///< elements; equal: to the plan's, in the type of the file
    WideReal truth_squared, bound_squared;
    std::vector<WideReal> run_squared;  ///< by run
    bool in_log2 = true;                ///< lse: of every head
};

class LayerWork {
  public:
    /// All four outlive it. RequestError where the plan cannot be run, or not on this layer.
    LayerWork(const LayerCapture& layer, const ObservedKernel& kernel, const RoundingPlan& plan,
              const CheckOptions& options);

    [[nodiscard]] bool empty() const { return outputs_.empty() && !has_lse_; }
    [[nodiscard]] const std::string& name() const { return layer_.name; }
    [[nodiscard]] std::size_t units() const;  ///< of work: runs of a group; 0 where nothing is judged
    void run(WorkCount& count);
    [[nodiscard]] std::size_t tests() const;

    [[nodiscard]] const std::vector<Output>& outputs() const { return outputs_; }
    [[nodiscard]] bool has_lse() const { return has_lse_; }
    [[nodiscard]] const std::vector<Output>& unjudged() const { return unjudged_; }
    [[nodiscard]] const OutputWork& work(Output output) const { return work_[static_cast<std::size_t>(output)]; }
    [[nodiscard]] const OutputWork& lse() const { return work_.back(); }

  private:
    struct Tested;
    /// Runs of a group that are held: their number times what one leaves stays within CheckOptions::held_bytes.
    [[nodiscard]] std::size_t held(const attribution::Group& group) const;
    /// One group whole.
    void add(const attribution::Group& group, WorkCount& units);
    [[nodiscard]] attribution::RunOutputs null_run(const attribution::Group& group, std::size_t number) const;
    [[nodiscard]] std::vector<Tested> tests_of(const attribution::Group& group, const GroupTruth& truth,
                                               attribution::RunOutputs& plan) const;
    [[nodiscard]] Tested lse_test(const attribution::Group& group, const GroupTruth& truth, const Matrix& plan,
                                  std::size_t i) const;
    void store_with_signs(Dtype dtype, const attribution::Group& group, std::size_t place, std::size_t i,
                          std::size_t number, Matrix& values) const;
    [[nodiscard]] HeadLayout layout_of(Output output, const Matrix& truth, const std::vector<double>& mean_key) const;
    [[nodiscard]] int head_number(const attribution::Group& group, Output output, std::size_t i) const;

    const LayerCapture& layer_;
    const ObservedKernel& kernel_;
    RoundingPlan plan_;
    const CheckOptions& options_;
    std::vector<attribution::Group> groups_;
    std::vector<Site> flipped_;
    std::vector<Output> outputs_, unjudged_;  // left by the kernel, and asked for: judged, and not
    bool has_lse_ = false;
    bool low_precision_ = false;                           // some flipped site has fewer bits than fp32
    std::array<OutputWork, all_outputs.size() + 1> work_;  // by Output, then lse
};

}  // namespace faultline::verdict
