// SPDX-License-Identifier: Apache-2.0
// One run of a plan over one key head and the query heads that share it, and its errors against truth.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/cpu/attention.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/injectors/attention_injector.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::attribution {

/// One batch element's key head with its query heads: views into a LayerCapture that outlives it.
struct Group {
    std::ptrdiff_t batch = 0, kv_head = 0;
    HeadGroup inputs;
    TruthProblem problem;
    std::shared_ptr<const Matrix> no_gradient;  ///< zeros that stand for dout in `problem` where the layer has none
    std::size_t query_heads() const { return inputs.q.size(); }
};

/// The groups of a layer, batch-major; with `heads` those that hold one of the query heads named. Their stochastic rounding
/// draws from (seed, name of the layer), so that two layers draw different numbers, and a layer the same whichever others
/// are attributed.
std::vector<Group> groups_of(const LayerCapture& layer, const std::vector<int>& heads, std::uint64_t seed);

/// What a run leaves: per output its matrices in head order (o, dq: one per query head; dk, dv: one).
struct RunOutputs {
    std::array<std::vector<Matrix>, 4> outputs;
    std::vector<Matrix> lse;    ///< per query head [n_q, 1], natural units; +inf where no key is seen
    std::vector<double> dsink;  ///< per query head, where there are sinks and a gradient
    const std::vector<Matrix>& operator[](Output output) const { return outputs[static_cast<std::size_t>(output)]; }
};

/// What is compared with truth and kernels has a place: the outputs in their order, then the log-sum-exp.
inline constexpr std::size_t lse_place = 4, place_count = 5;
[[nodiscard]] const std::vector<Matrix>& values_at(const RunOutputs& run, std::size_t place);

/// The gradients moved to where a run's outputs stand.
void keep_gradients(GroupBackward&& backward, RunOutputs& out);

/// Runs forward, and backward where the group has dout.
RunOutputs run_plan(const Group& group, const RoundingPlan& plan, Instrument* instrument = nullptr,
                    const AttentionBackend& backend = cpu_backend());

/// Faults that stand in the kernel. A counterfactual treats a fault as part of its site: alone, the site rounds and is at
/// fault; repaired, it does neither.
struct Faults {
    std::vector<Fault> list;  ///< of kernel sites
    int heads = 1;            ///< query heads of the layer
    [[nodiscard]] Faults only(Site site) const;
    [[nodiscard]] Faults without(Site site) const;
};
/// The same with faults; the instrument sees what they leave. `realised`, where given, gets what each fault did.
RunOutputs run_plan(const Group& group, const RoundingPlan& plan, const Faults& faults,
                    Instrument* instrument = nullptr, std::vector<Realised>* realised = nullptr,
                    const AttentionBackend& backend = cpu_backend());

/// Sees every tile of the sites that it is made for and keeps nothing: what stands for a recorder where memory is asked about.
class SeenSites final : public Instrument {
  public:
    /// sites: bit index(site); by default all.
    explicit SeenSites(std::uint64_t sites = ~std::uint64_t{0}) : sites_(sites) {}
    [[nodiscard]] bool watches(Site site) const override { return (sites_ >> index(site) & 1) != 0; }
    void at(Site, const TileAt&, MatrixView<double>, MatrixView<const double>) override {}

  private:
    std::uint64_t sites_;
};

/// AttentionBackend::expect_room of every group of a layer, for runs with these faults and what else sees them (nullptr: nothing).
/// NoRoom begins with the layer's name.
void expect_room(const std::string& layer, const std::vector<Group>& groups, const RoundingPlan& plan,
                 const AttentionBackend& backend, Instrument* instrument = nullptr, const Faults& faults = {});

/// The same of the groups' truth.
void expect_room_for_truth(const std::string& layer, const std::vector<Group>& groups, const AttentionBackend& backend);

/// The truth of matrix `i` of an output (i < query heads for o and dq; i = 0 for dk and dv).
const CertifiedMatrix& truth_of(const GroupTruth& truth, Output output, std::size_t i);

/// The format that a file's elements are in: one of its ulps is the distance that "near" allows. fp32 where the type has
/// none of ours.
[[nodiscard]] Format format_of(Dtype dtype);

/// Unit vector along the mean of the keys that some query sees (mean_visible_key), or empty where that mean is 0.
std::vector<double> mean_key_direction(const Group& group);

/// Errors of an output over the group's heads, in order.
ErrorSums errors_of(const std::vector<Matrix>& values, const GroupTruth& truth, Output output,
                    const std::vector<double>& direction);

/// The same by place; of the lse over the rows that see a key or a sink, since without one the truth is -inf, and kernels leave
/// that or +inf.
ErrorSums errors_at(const std::vector<Matrix>& values, const GroupTruth& truth, std::size_t place,
                    const std::vector<double>& direction);

/// The truth's matrices of a place: those of the lse without rows that see no key.
std::vector<CertifiedMatrix> truths_at(const GroupTruth& truth, std::size_t place);

/// value - truth, element by element, all matrices of an output after each other. Truths that underflow count as 0: the
/// vectors compare errors with each other, sizes are ErrorSums' matter. Not finite where a row of the lse sees no key.
std::vector<double> error_vector(const std::vector<Matrix>& values, const GroupTruth& truth, Output output);
std::vector<double> error_vector_at(const std::vector<Matrix>& values, const GroupTruth& truth, std::size_t place);

}  // namespace faultline::attribution
