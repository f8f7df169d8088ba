// SPDX-License-Identifier: Apache-2.0
// Probes of checkpoints: the flat weights of `faultline train` (experiments/gpt/parameters.hpp) and what its optimizer
// remembers, from which the last update follows up to its learning rate.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/checkpoint_file.hpp>
#include <faultline/gpt/parameters.hpp>
#include <faultline/probes/leading.hpp>
#include <faultline/probes/spectra.hpp>
#include <faultline/probes/trajectory.hpp>
#include <faultline/probing/probing.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::probing {
namespace {

constexpr std::string_view schema = "faultline.checkpoint/1";

std::string metadata(const TensorSet& set, const std::string& key) {
    const auto found = set.metadata.find(key);
    if (found == set.metadata.end())
        throw RequestError(fmt::format(
            "{}: metadata \"{}\": is missing: expected that of a checkpoint of faultline train", set.source, key));
    return found->second;
}

int integer(const TensorSet& set, const std::string& key, int least, int most) {
    const std::string text = metadata(set, key);
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
        throw RequestError(fmt::format("{}: metadata \"{}\": {}: expected an integer from {} to {}", set.source, key,
                                       in_quotes(text), least, most));
    return value;
}

double number(const TensorSet& set, const std::string& key, double least, double below) {
    const std::string text = metadata(set, key);
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !(value >= least && value < below))
        throw RequestError(fmt::format("{}: metadata \"{}\": {}: expected a number from {:g}{}", set.source, key,
                                       in_quotes(text), least,
                                       std::isinf(below) ? std::string() : fmt::format(" to less than {:g}", below)));
    return value;
}

bool truth(const TensorSet& set, const std::string& key) {
    const std::string text = metadata(set, key);
    if (text != "true" && text != "false")
        throw RequestError(
            fmt::format("{}: metadata \"{}\": {}: expected true or false", set.source, key, in_quotes(text)));
    return text == "true";
}

std::vector<float> floats(const TensorSet& set, const std::string& name, std::ptrdiff_t size) {
    const Tensor& tensor = set.at(name);
    if (tensor.dtype != Dtype::f32 || tensor.size() != size)
        throw RequestError(fmt::format(
            "{}: tensor \"{}\": {} of shape {}: expected {} float32 numbers, those of the model in the metadata",
            set.source, name, print_name(tensor.dtype), shape_text(tensor.shape), size));
    return tensor.to_float();
}

/// A checkpoint with its layout. Weights under sigma reparametrisation are those before the reparametrisation.
struct Weights {
    std::string source;
    gpt::ModelConfig model;
    gpt::ParameterLayout layout;
    std::vector<float> values,
        update;  ///< the last one of a matrix over its rate, with its weight decay; empty where it is not known

    static gpt::ModelConfig model_of(const TensorSet& set) {
        gpt::expect_checksum(set);
        if (metadata(set, "schema") != schema)
            throw RequestError(fmt::format("{}: metadata \"schema\": {}: expected {}", set.source,
                                           in_quotes(metadata(set, "schema")), schema));
        gpt::ModelConfig m;
        constexpr int large = 1 << 20;  // beyond any size whose layout a file could fill
        m.layers = integer(set, "config.layers", 1, 1 << 12);
        m.width = integer(set, "config.width", 1, large);
        m.heads = integer(set, "config.heads", 1, m.width);
        m.context = integer(set, "config.context", 1, large);
        m.vocabulary = integer(set, "config.vocab", 1, large);
        m.bias = truth(set, "config.bias");
        m.qk_norm = static_cast<gpt::QkNorm>(integer(set, "config.qk-norm", 0, 2));
        m.sigma_reparam = truth(set, "config.sigma-reparam");
        m.output_gate = truth(set, "config.output-gate");
        try {
            gpt::check(m);
        } catch (const RequestError& error) {
            throw RequestError(fmt::format("{}: metadata \"config\": {}", set.source, error.what()));
        }
        return m;
    }

    explicit Weights(const TensorSet& set) : source(set.source), model(model_of(set)), layout(model) {
        values = floats(set, "weights", layout.size());
        // AdamW's step is first / (sqrt(second) + epsilon) with both unbiased; Muon's and SGD's moments are not enough.
        if (set.find("optimizer.second") == nullptr || metadata(set, "config.optimizer") != "0") return;
        const std::vector<float> first = floats(set, "optimizer.first", layout.size()),
                                 second = floats(set, "optimizer.second", layout.size());
        const double steps = integer(set, "optimizer_steps", 0, 1 << 30),
                     epsilon = number(set, "config.epsilon", 0, INFINITY),
                     decay = number(set, "config.weight-decay", 0, INFINITY);
        const double unbias_1 = 1 - std::pow(number(set, "config.beta1", 0, 1), steps),
                     unbias_2 = 1 - std::pow(number(set, "config.beta2", 0, 1), steps);
        if (steps == 0) return;
        // W after the step stands for W before it, from which the step took `decay` W: they differ by the rate.
        for (std::size_t i = 0; i < first.size(); ++i) {
            if (second[i] < 0)
                throw RequestError(fmt::format("{}: tensor \"optimizer.second\": {} at {}: expected means of squares",
                                               set.source, second[i], i));
            const double step = (first[i] / unbias_1) / (std::sqrt(second[i] / unbias_2) + epsilon);
            update.push_back(static_cast<float>(-(step + decay * values[i])));
        }
    }
    [[nodiscard]] MatrixView<const float> of(const std::string& name, const std::vector<float>& flat) const {
        return layout.at(name).of(std::span<const float>(flat));
    }
};

Matrix doubles(MatrixView<const float> m) {
    Matrix out(m.rows, m.cols);
    for (std::ptrdiff_t i = 0; i < m.rows; ++i)
        for (std::ptrdiff_t j = 0; j < m.cols; ++j) out(i, j) = static_cast<double>(m(i, j));
    return out;
}
Matrix rows_of(const Eigen::MatrixXd& m) {
    Matrix out(m.rows(), m.cols());
    for (std::ptrdiff_t i = 0; i < out.rows; ++i)
        for (std::ptrdiff_t j = 0; j < out.cols; ++j) out(i, j) = m(i, j);
    return out;
}
MatrixView<const float> columns(MatrixView<const float> m, int head, int d) {
    return {m.data + head * d, m.rows, d, m.stride};
}

std::vector<std::string> layers_of(const Weights& w, const ProbeOptions& options) {
    std::vector<std::string> all;
    for (int l = 0; l < w.model.layers; ++l) all.push_back(fmt::format("layer{}", l));
    for (const std::string& name : options.layers)
        if (std::ranges::find(all, name) == all.end())
            throw RequestError(fmt::format("{}: --layers: {}: expected layer0 to layer{}", w.source, in_quotes(name),
                                           w.model.layers - 1));
    return options.layers.empty() ? all : options.layers;
}

struct Spectrum {
    std::vector<double> sigma;
    double stable = NAN, effective = NAN;
};
Spectrum spectrum_of(std::vector<double> all, int k) {
    Spectrum s;
    for (double& x : all) s.sigma.push_back(x);
    for (double& x : all) x *= x;
    s.stable = stable_rank(all);
    s.effective = effective_rank(all);
    s.sigma.resize(static_cast<std::size_t>(k), NAN);
    return s;
}

/// `previous` given: the update is the way from it to `w`.
Block directions_block(const Weights& w, const std::string& layer, const std::string& place, const Weights* previous,
                       const ProbeOptions& options) {
    const int k = options.directions, d = w.model.head_dim();
    const std::string what =
        previous != nullptr ? "from the first checkpoint" : "AdamW's last, decay included, over its rate";
    Block out{place + layer, "directions", "", {}, {}, {}, {}};
    const bool has_update = previous != nullptr || !w.update.empty();
    out.note =
        fmt::format("leading {}; update: {}; a random one has two-sided k^2/(m n), one-sided k/m + k/n - k^2/(m n)", k,
                    has_update ? what : "not known for this optimizer");
    std::vector<std::vector<double>> sigma;
    std::vector<double> stable, effective;
    std::vector<Alignment> aligned;
    std::vector<std::string> matrices;
    const auto weight = [&](const char* name, const std::vector<float>& flat) { return w.of(layer + name, flat); };
    const auto add = [&](const std::string& name, const Spectrum& s, const Alignment& a) {
        matrices.push_back(name);
        sigma.push_back(s.sigma);
        stable.push_back(s.stable);
        effective.push_back(s.effective);
        aligned.push_back(a);
    };
    for (const char* name : {".w_q", ".w_k"}) {
        const MatrixView<const float> m = weight(name, w.values);
        const Spectrum s = spectrum_of(singular_values(m, static_cast<int>(std::min(m.rows, m.cols))), k);
        LeadingDirections leading(k);
        leading.update(to_eigen(m));
        const Matrix u = rows_of(leading.left()), v = rows_of(leading.right());
        // Of a rank below k the last directions are what the iteration was begun with.
        const bool has_directions =
            leading.sigma().size() > 0 && leading.sigma()(leading.sigma().size() - 1) > 0x1p-40 * leading.sigma()(0);
        Alignment a{NAN, NAN, NAN, NAN};
        if (has_update) {
            Matrix update = doubles(previous != nullptr ? m : weight(name, w.update));
            if (previous != nullptr) {
                const MatrixView<const float> was = previous->of(layer + name, previous->values);
                for (std::ptrdiff_t i = 0; i < m.rows; ++i)
                    for (std::ptrdiff_t j = 0; j < m.cols; ++j) update(i, j) -= static_cast<double>(was(i, j));
            }
            if (has_directions) a = alignment(update.view(), u.view(), v.view());
        }
        add(name[3] == 'q' ? "W_Q" : "W_K", s, a);
        const std::string side = name[3] == 'q' ? "q" : "k";
        out.quantities.push_back({"left_" + side,
                                  {"left singular vectors, by input feature", "1"},
                                  {{"input_feature", u.rows}, {side + "_direction", u.cols}},
                                  u.values});
        out.quantities.push_back({"right_" + side,
                                  {"right singular vectors, by column: feature of a head, head after head", "1"},
                                  {{"column", v.rows}, {side + "_direction", v.cols}},
                                  v.values});
    }
    for (int h = 0; h < w.model.heads; ++h) {
        const MatrixView<const float> q = columns(weight(".w_q", w.values), h, d),
                                      kk = columns(weight(".w_k", w.values), h, d);
        add(fmt::format("QK head {}", h), spectrum_of(product_singular_values(q, kk, d), k), {NAN, NAN, NAN, NAN});
    }
    out.columns = matrices;
    for (int i = 0; i < k; ++i) {
        Line line{fmt::format("sigma_{}", i + 1), "1", {}};
        for (const auto& s : sigma) line.values.push_back(s[static_cast<std::size_t>(i)]);
        out.lines.push_back(std::move(line));
    }
    out.lines.push_back({"stable rank", "1", stable});
    out.lines.push_back({"effective rank", "1", effective});
    const std::vector<Axis> axis{{"matrix", static_cast<std::int64_t>(matrices.size())}};
    const auto put = [&](const char* name, const char* about, double Alignment::*member) {
        Line line{about, "1", {}};
        for (const Alignment& a : aligned) line.values.push_back(a.*member);
        out.quantities.push_back({name, {about, "1"}, axis, line.values});
        if (has_update) out.lines.push_back(std::move(line));
    };
    put("update_two_sided", "update's energy along U and V: two-sided projection removes", &Alignment::two_sided);
    put("update_one_sided", "update's energy along U or V: one-sided projection removes", &Alignment::one_sided);
    out.labels.emplace_back("matrix", matrices);
    std::vector<double> flat;
    for (const auto& s : sigma) flat.insert(flat.end(), s.begin(), s.end());
    out.quantities.push_back({"sigma", {"largest singular values", "1"}, {axis[0], {"singular_value", k}}, flat});
    out.quantities.push_back({"stable_rank", {"sum of squared singular values over the largest", "1"}, axis, stable});
    out.quantities.push_back(
        {"effective_rank", {"exp of the entropy of squared singular values", "1"}, axis, effective});
    return out;
}

Block trajectory_block(const Weights& w, const Weights& first, const std::string& place, const ProbeOptions& options) {
    Block out{place + "parameters",
              "trajectory",
              fmt::format("distance from {}", first.source),
              {"Wasserstein", "largest", "rms", "relative"},
              {},
              {},
              {}};
    const std::vector<std::string> layers = layers_of(w, options);
    std::vector<std::string> names;
    std::vector<std::vector<double>> values(4);
    for (const gpt::Parameter& p : w.layout.all()) {
        if (p.layer >= 0 && std::ranges::find(layers, fmt::format("layer{}", p.layer)) == layers.end()) continue;
        if (p.layer < 0 && !options.layers.empty()) continue;
        std::vector<float> a, b;
        const auto was = p.of(std::span<const float>(first.values)), is = p.of(std::span<const float>(w.values));
        for (std::ptrdiff_t i = 0; i < p.rows; ++i) {
            a.insert(a.end(), was.row(i), was.row(i) + p.cols);
            b.insert(b.end(), is.row(i), is.row(i) + p.cols);
        }
        const WeightDistance d = weight_distance(a, b);
        out.lines.push_back({p.name, "1", {d.wasserstein, d.largest, d.rms, d.relative}});
        names.push_back(p.name);
        for (std::size_t i = 0; i < 4; ++i) values[i].push_back(out.lines.back().values[i]);
    }
    out.labels.emplace_back("parameter", names);
    const std::vector<Axis> axes{{"parameter", static_cast<std::int64_t>(names.size())}};
    const char* const about[] = {"Wasserstein-1 distance of the entries", "largest distance of an entry",
                                 "rms distance of the entries", "Frobenius distance over the first's norm"};
    const char* const keys[] = {"wasserstein", "largest", "rms", "relative"};
    for (std::size_t i = 0; i < 4; ++i) out.quantities.push_back({keys[i], {about[i], "1"}, axes, values[i]});
    return out;
}

}  // namespace

Report probe_checkpoints(std::span<const TensorSet> checkpoints, const ProbeOptions& options) {
    Report report{"checkpoint", {}, "", {}};
    std::vector<Weights> all;
    for (const TensorSet& set : checkpoints) {
        report.inputs.push_back(set.source);
        all.emplace_back(set);
        if (all.back().values.size() != all.front().values.size() ||
            all.back().model.width != all.front().model.width || all.back().model.heads != all.front().model.heads)
            throw RequestError(fmt::format("{}: is of another model than {}: expected checkpoints of one model",
                                           set.source, all.front().source));
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
        const std::string place = all.size() > 1 ? fmt::format("checkpoint{}/", i) : "";
        if (options.wants("directions"))
            for (const std::string& layer : layers_of(all[i], options)) {
                expect_going_on(options);
                report.blocks.push_back(
                    directions_block(all[i], layer, place, i > 0 ? &all.front() : nullptr, options));
            }
        if (options.wants("trajectory") && i > 0)
            report.blocks.push_back(trajectory_block(all[i], all.front(), place, options));
    }
    return report;
}

}  // namespace faultline::probing
