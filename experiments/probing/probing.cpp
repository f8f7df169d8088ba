// SPDX-License-Identifier: Apache-2.0
#include <faultline/probing/probing.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include <faultline/base/error.hpp>

namespace faultline::probing {

std::span<const ProbeInfo> catalogue() {
    static constexpr std::array<ProbeInfo, 9> all{{
        {"conservation", "capture, run",
         "row sum of the score gradient and its running sum, sum of p, delta as dO.O against P.dP: for exact "
         "arithmetic, a plan's kernel and the observed kernels"},
        {"invariance", "capture",
         "what the plan's kernel makes of a shift of all scores, of V = 1, and of keys in reverse order"},
        {"coherence", "capture, run",
         "whether errors keep their sign, by head, source and site: mean sign, sum over sum of magnitudes, deviation, "
         "significance"},
        {"similarity", "capture",
         "rank-1 terms (PK)[t]^T X[t] of the error of W_Q's gradient: cosines, energies, effective and stable rank, "
         "principal angles between captures"},
        {"saturation", "capture",
         "largest logit, p_max, repeated maxima, entropy, mean key over spread of the keys, exponent of the winner"},
        {"output-error", "capture",
         "mean signed error of O in ulps by feature, and the running error of one row with its weights of 1"},
        {"directions", "checkpoint",
         "leading singular directions of W_Q, W_K and W_Q W_K^T per head, and how much of the last update lies along "
         "them"},
        {"trajectory", "checkpoint",
         "distance of weights from those of the first checkpoint: Wasserstein-1, largest, rms, relative"},
        {"early-warning", "run",
         "steps between each monitor's alarm and divergence, false alarms on the runs that stay healthy"},
    }};
    return all;
}

bool ProbeOptions::wants(std::string_view probe) const {
    return probes.empty() || std::ranges::find(probes, probe) != probes.end();
}

std::vector<int> heads_of(const LayerCapture& layer, const ProbeOptions& options) {
    std::vector<int> heads = options.heads;
    if (heads.empty()) {
        heads.resize(static_cast<std::size_t>(layer.heads()));
        std::iota(heads.begin(), heads.end(), 0);
    }
    std::ranges::sort(heads);
    heads.erase(std::unique(heads.begin(), heads.end()), heads.end());
    return heads;
}

std::vector<std::string> head_names(std::span<const int> heads) {
    std::vector<std::string> names;
    for (const int h : heads) names.push_back(fmt::format("head {}", h));
    return names;
}

std::string place_of(const ProbeCapture& capture, const LayerCapture& layer, std::size_t captures) {
    return captures > 1 ? capture.label + "/" + layer.name : layer.name;
}

HeadInputs inputs_of(const LayerCapture& layer, std::ptrdiff_t b, std::ptrdiff_t h, const ProbeOptions& options) {
    HeadInputs in;
    const std::ptrdiff_t kv = h / (layer.heads() / layer.kv_heads());
    in.q = layer.q(b, h);
    in.k = layer.k(b, kv);
    in.v = layer.v(b, kv);
    if (!layer.dout.empty()) in.dout = layer.dout(b, h);
    if (layer.bias) in.bias = (*layer.bias)(layer.bias->batch == 1 ? 0 : b, layer.bias->heads == 1 ? 0 : h);
    in.scale = layer.scale.value_or(1 / std::sqrt(static_cast<double>(layer.head_dim())));
    in.causal = layer.causal;
    in.softcap = softcap_of(layer, options);
    if (!layer.sink.empty()) in.sink = layer.sink[static_cast<std::size_t>(h)];
    return in;
}

double softcap_of(const LayerCapture& layer, const ProbeOptions& options) {
    return options.softcap > 0 ? options.softcap : layer.softcap;
}

void expect_no_dropout(const ProbeCapture& capture, const LayerCapture& layer) {
    if (layer.dropout)
        throw RequestError(
            fmt::format("{}: tensor \"{}.dropout\": the probes do not know dropout: expected a layer without",
                        capture.tensors.source, layer.name));
}

void expect_going_on(const ProbeOptions& options) {
    if (options.cancelled && options.cancelled()) throw WorkError("interrupted, nothing written");
}

}  // namespace faultline::probing
