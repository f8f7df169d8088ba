// SPDX-License-Identifier: Apache-2.0
// Places of a transformer outside attention where an error can be put, and the interface through which it is. Here and not
// beside the model, because an injector is below every experiment.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// A named place of the model where a matrix has just been computed and may be changed. Rows are tokens, sequence after
/// sequence, where nothing else is said. `operands` are what the value was computed from.
enum class ModelSite : unsigned char {
    layer_norm_statistics,  ///< [token, 2]: mean and 1/sqrt(variance + epsilon); operands: the input [token, width]
    attention_projection,   ///< [token, width]: heads' outputs times W_O, bias added; operands: heads' outputs, W_O
    ffn_output,             ///< [token, width]: second product of the feed-forward, bias added; operands: activation, W
    residual_add,           ///< [token, width]: residual stream after the addition; operands: stream before, branch
    logits,                 ///< [token, vocabulary]; operands: final norm's output, embedding [vocabulary, width]
    ffn_output_gradient,    ///< [token, width]: dL/d(ffn_output) before the backward products use it; no operands
    ffn_activation_gradient,  ///< [token, 4 width]: dL/d(activation after GELU); operands: ffn output gradient, W
    optimizer_update,         ///< a parameter's shape: what is about to be added to it; operands: the parameter
};

inline constexpr std::size_t model_site_count = static_cast<std::size_t>(ModelSite::optimizer_update) + 1;

struct ModelSiteInfo {
    ModelSite site;
    std::string_view name;  ///< as written in files
    std::string_view description;
};

/// In the order of the enumeration.
[[nodiscard]] const std::array<ModelSiteInfo, model_site_count>& model_sites();
[[nodiscard]] std::string_view name(ModelSite site);
[[nodiscard]] std::optional<ModelSite> find_model_site(std::string_view name);

/// Where a value of the model stands.
struct ModelAt {
    std::int64_t step = 0;
    int micro_step = 0;  ///< of gradient accumulation
    int layer = 0;       ///< the final norm and the logits have the number of layers
    int part = 0;        ///< layer norms and residual adds: 0 before/after attention, 1 before/after the feed-forward
    std::ptrdiff_t row0 = 0;  ///< index in the micro-batch of the value's first token
    std::string_view name;    ///< optimizer_update: the parameter, "layer0.w_q"
};

/// What watches or changes the model's values. at() is called from several threads at once, for different rows; what it
/// does must depend on its arguments alone, so that a run does not depend on the number of threads.
class ModelHook {
  public:
    virtual ~ModelHook() = default;
    /// Whether at() is to be called for this site in this layer. Cheap.
    [[nodiscard]] virtual bool watches(ModelSite site, int layer) const = 0;
    virtual void at(ModelSite site, const ModelAt& where, MatrixView<float> value,
                    std::span<const MatrixView<const float>> operands) = 0;
};

}  // namespace faultline
