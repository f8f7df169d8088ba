// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <faultline/gpt_device/optimizers.hpp>

namespace faultline::gpt::on_device {
namespace {

std::size_t elements(const MatrixGroup& g) {
    return static_cast<std::size_t>(g.count()) * static_cast<std::size_t>(g.rows) * static_cast<std::size_t>(g.cols);
}
std::size_t gram_elements(const MatrixGroup& g) {
    return static_cast<std::size_t>(g.count()) * static_cast<std::size_t>(g.rows) * static_cast<std::size_t>(g.rows);
}

}  // namespace

Muon::Muon(const ParameterLayout& layout, const ModelConfig& model, const OptimizerConfig& config) : config_(config) {
    const std::ptrdiff_t step = model.layers > 1 ? layout.layer(1).w_in - layout.layer(0).w_in : 0;
    const auto add = [&](MatrixGroup& group, const char* name) {
        const Parameter& p = layout.at(std::string("layer0.") + name);
        const int i = group.parts++;
        group.first[i] = p.offset;
        group.stride[i] = static_cast<int>(p.stride);
        group.transposed[i] = p.rows > p.cols;
        group.shape[i] =
            static_cast<float>(std::sqrt(std::max(1.0, static_cast<double>(p.cols) / static_cast<double>(p.rows))));
        group.rows = static_cast<int>(std::min(p.rows, p.cols));
        group.cols = static_cast<int>(std::max(p.rows, p.cols));
        group.layers = model.layers;
        group.layer_step = step;
    };
    for (const char* name : {"w_q", "w_k", "w_v", "w_o"}) add(groups_[0], name);
    if (model.output_gate) add(groups_[0], "w_gate");
    for (const char* name : {"w_fc", "w_proj"}) add(groups_[1], name);
}

std::size_t Muon::scratch_bytes() const {
    std::size_t most = 0;
    for (const MatrixGroup& g : groups_)
        most = std::max(most, static_cast<std::size_t>(g.count()) * muon_blocks * sizeof(double) +
                                  2 * (elements(g) + gram_elements(g)) * sizeof(float));
    return most;
}

void Muon::update(const UpdateArrays& arrays, Products& products, char* scratch, Stream stream) const {
    constexpr float a = 3.4445F, b = -4.7750F, c = 2.0315F;  // orthogonalise() of optimizer.hpp
    for (const MatrixGroup& g : groups_) {
        auto* squares = reinterpret_cast<double*>(scratch);
        auto* x = reinterpret_cast<float*>(squares + static_cast<std::size_t>(g.count()) * muon_blocks);
        float* next = x + elements(g);
        float* gram = next + elements(g);
        float* square = gram + gram_elements(g);
        muon_momentum(g, arrays, static_cast<float>(config_.momentum), config_.nesterov, x, squares, stream);
        muon_normalise(g, squares, x, stream);
        Product outer{.transpose_b = true, .m = g.rows, .n = g.rows, .k = g.cols, .batch = g.count()};
        Product power{.m = g.rows, .n = g.rows, .k = g.rows, .batch = g.count()};
        Product apply{.m = g.rows, .n = g.cols, .k = g.rows, .batch = g.count()};
        for (int i = 0; i < config_.newton_schulz_steps; ++i) {
            products.run(outer, x, x, gram);
            products.run(power, gram, gram, square);
            muon_polynomial(gram, square, gram_elements(g), b, c, stream);
            products.run(apply, square, x, next);
            muon_advance(x, next, elements(g), a, stream);
        }
        muon_apply(g, arrays, static_cast<float>(config_.weight_decay), x, stream);
    }
}

}  // namespace faultline::gpt::on_device
