// SPDX-License-Identifier: Apache-2.0
// The rank-1 terms of W_Q's gradient error, over the rows of all captures of a layer: one capture has the tokens of a step,
// several have several steps.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <Eigen/SVD>

#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/layer_plan.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/probes/plan_conservation.hpp>
#include <faultline/probes/similarity.hpp>
#include <faultline/probing/probing.hpp>

namespace faultline::probing {
namespace {

/// Terms of one head: a row of PK and of X (or q) each.
struct Terms {
    Matrix pk, x;
    std::vector<double> delta_error, capture, sequence, row;
};

void append_row(Matrix& m, std::span<const double> row) {
    m.cols = static_cast<std::ptrdiff_t>(row.size());
    m.values.insert(m.values.end(), row.begin(), row.end());
    ++m.rows;
}

/// The layer's input of a capture, [batch, seq, width] flat; empty where it has none.
std::vector<double> layer_input(const ProbeCapture& capture, const LayerCapture& layer) {
    const Tensor* x = capture.tensors.find(layer.name + ".x");
    if (x == nullptr) return {};
    const bool fits = x->shape.size() == 3 && x->shape[0] == layer.q.batch && x->shape[1] == layer.q.rows;
    if (!fits)
        throw RequestError(fmt::format("{}: tensor \"{}.x\": shape {}: expected [{}, {}, width]",
                                       capture.tensors.source, layer.name, shape_text(x->shape), layer.q.batch,
                                       layer.q.rows));
    std::vector<double> values = x->to_double();
    for (const double v : values)
        if (!std::isfinite(v))
            throw RequestError(fmt::format("{}: tensor \"{}.x\": holds {}: expected finite numbers",
                                           capture.tensors.source, layer.name, v));
    return values;
}

/// delta of the plan's kernel minus exact delta, [batch, head][row]; NaN where the layer has no dO or the plan does not run.
std::vector<std::vector<double>> plan_delta(const LayerCapture& layer, const ProbeOptions& options, bool runs) {
    std::vector<std::vector<double>> all(static_cast<std::size_t>(layer.q.batch * layer.heads()));
    if (layer.dout.empty() || !runs) return all;
    const RoundingPlan plan = for_layer(options.plan, layer);
    const std::vector<attribution::Group> groups = attribution::groups_of(layer, options.heads, 0);
    parallel_for(groups.size(), options.threads, [&](std::size_t n) {
        expect_going_on(options);
        std::vector<PlanRows> rows = plan_conservation(groups[n].inputs, plan, *options.backend);
        for (std::size_t i = 0; i < rows.size(); ++i)
            all[static_cast<std::size_t>(groups[n].inputs.first_head) + i] = std::move(rows[i].delta);
    });
    return all;
}

void append_terms(const ProbeCapture& capture, const LayerCapture& layer, std::size_t file,
                  const std::vector<int>& heads, const ProbeOptions& options, std::vector<Terms>& terms) {
    const std::vector<double> x = layer_input(capture, layer);
    const auto width = x.empty() ? 0 : x.size() / static_cast<std::size_t>(layer.q.batch * layer.q.rows);
    const bool plan_runs = softcap_of(layer, options) == 0 && layer.sink.empty();
    expect_no_dropout(capture, layer);
    const auto delta = plan_delta(layer, options, plan_runs);
    const std::ptrdiff_t rows = layer.q.batch * layer.q.rows;
    const std::ptrdiff_t count = std::min<std::ptrdiff_t>(rows, options.terms);
    for (std::size_t h = 0; h < heads.size(); ++h) {
        std::ptrdiff_t at_sequence = -1;
        ScoreGradient g;
        HeadInputs in;
        for (std::ptrdiff_t t = 0; t < count; ++t) {
            const std::ptrdiff_t place = (2 * t + 1) * rows / (2 * count);  // the middles of equal parts
            const std::ptrdiff_t b = place / layer.q.rows, i = place % layer.q.rows;
            if (b != at_sequence) {
                in = inputs_of(layer, b, heads[h], options);
                g = score_gradient(in);
                at_sequence = b;
            }
            std::vector<double> pk(static_cast<std::size_t>(in.k.cols), 0.0);
            for (std::ptrdiff_t j = 0; j < in.k.rows; ++j)
                for (std::ptrdiff_t c = 0; c < in.k.cols && g.p(i, j) != 0; ++c)
                    pk[static_cast<std::size_t>(c)] += g.p(i, j) * in.k(j, c);
            Terms& head = terms[h];
            append_row(head.pk, pk);
            if (x.empty())
                append_row(head.x, {in.q.row(i), static_cast<std::size_t>(in.q.cols)});
            else
                append_row(head.x, std::span(x).subspan(static_cast<std::size_t>(place) * width, width));
            const std::vector<double>& d = delta[static_cast<std::size_t>(b * layer.heads() + heads[h])];
            head.delta_error.push_back(
                d.empty() ? NAN : d[static_cast<std::size_t>(i)] - g.delta[static_cast<std::size_t>(i)]);
            head.capture.push_back(static_cast<double>(file));
            head.sequence.push_back(static_cast<double>(b));
            head.row.push_back(static_cast<double>(i));
        }
    }
}

/// Leading directions of the rows of PK that belong to a capture, as columns: at most k, and no more than there are. A
/// singular value below 2^-20 of the first is no direction (k and v of bf16 and their P hold no more); what an iteration
/// would complete the block with has angles that mean nothing.
Matrix leading_rows(const Terms& terms, std::size_t file, int k) {
    std::vector<std::ptrdiff_t> rows;
    for (std::size_t t = 0; t < terms.capture.size(); ++t)
        if (terms.capture[t] == static_cast<double>(file)) rows.push_back(static_cast<std::ptrdiff_t>(t));
    Eigen::MatrixXd m(static_cast<Eigen::Index>(rows.size()), terms.pk.cols);
    for (std::size_t t = 0; t < rows.size(); ++t)
        for (std::ptrdiff_t c = 0; c < terms.pk.cols; ++c) m(static_cast<Eigen::Index>(t), c) = terms.pk(rows[t], c);
    if (!m.allFinite()) return {terms.pk.cols, 1, NAN};
    const Eigen::JacobiSVD<Eigen::MatrixXd> svd(m, Eigen::ComputeThinV);
    const Eigen::VectorXd& sigma = svd.singularValues();
    Eigen::Index count = 0;
    while (count < std::min<Eigen::Index>(k, sigma.size()) && sigma(count) > 0x1p-20 * sigma(0)) ++count;
    Matrix out(terms.pk.cols, count);
    for (std::ptrdiff_t i = 0; i < out.rows; ++i)
        for (std::ptrdiff_t j = 0; j < out.cols; ++j) out(i, j) = svd.matrixV()(i, j);
    return out;
}

void add_layer(const std::string& name, std::span<const ProbeCapture> captures, const ProbeOptions& options,
               Report& report) {
    const LayerCapture& first = captures.front().capture[name];
    const std::vector<int> heads = heads_of(first, options);
    std::vector<Terms> terms(heads.size());
    bool plan_runs = true;
    for (std::size_t f = 0; f < captures.size(); ++f) {
        const LayerCapture& layer = captures[f].capture[name];
        plan_runs = plan_runs && softcap_of(layer, options) == 0 && layer.sink.empty();
        if (layer.dout.empty() != first.dout.empty())
            throw RequestError(fmt::format("{}: {}: has {}: expected a tensor {}.do in all captures or in none",
                                           captures[f].tensors.source, name, layer.dout.empty() ? "no dO" : "dO",
                                           name));
        const bool same = layer.heads() == first.heads() && layer.head_dim() == first.head_dim() &&
                          (layer_input(captures[f], layer).empty() == layer_input(captures[0], first).empty());
        if (!same)
            throw RequestError(
                fmt::format("{}: {}: {} heads of {}: expected {} of {}, as in {}, and a layer input in all "
                            "captures or in none",
                            captures[f].tensors.source, name, layer.heads(), layer.head_dim(), first.heads(),
                            first.head_dim(), captures[0].tensors.source));
        append_terms(captures[f], layer, f, heads, options, terms);
    }
    const bool has_x = !layer_input(captures[0], first).empty();
    const std::size_t n = terms.front().row.size();
    Block out{name,
              "similarity",
              fmt::format(
                  "{} terms (PK)[t]^T {}[t] a head, rows evenly spaced{}; {}", n, has_x ? "X" : "q",
                  captures.size() > 1 ? ", over all captures" : "",
                  plan_runs ? "coefficient: error of delta in plan " + options.plan.name : std::string(plan_left_out)),
              head_names(heads),
              {},
              {},
              {}};
    const char* titles[] = {"mean cosine",
                            "mean |cosine|",
                            "energy in the first",
                            "energy in the first 3",
                            "effective rank",
                            "stable rank",
                            "resultant with the coefficients",
                            "coefficients, sum over sum of magnitudes"};
    for (const char* title : titles) out.lines.push_back({title, "1", {}});
    std::vector<double> cosines, energies, pk, x, delta;
    for (const Terms& head : terms) {
        expect_going_on(options);
        const Matrix c = term_cosines(head.pk.view(), head.x.view());
        TermStructure s = term_structure(c);
        double sum = 0, magnitude = 0;
        for (const double e : head.delta_error) sum += e, magnitude += std::abs(e);
        const double values[] = {s.mean_cosine,
                                 s.mean_abs_cosine,
                                 s.leading(1),
                                 s.leading(3),
                                 s.effective_rank,
                                 s.stable_rank,
                                 resultant(head.pk.view(), head.x.view(), head.delta_error),
                                 sum / magnitude};
        for (std::size_t i = 0; i < out.lines.size(); ++i) out.lines[i].values.push_back(values[i]);
        s.energies.resize(n, NAN);
        const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
            to.insert(to.end(), from.begin(), from.end());
        };
        append(cosines, c.values);
        append(energies, s.energies);
        append(pk, head.pk.values);
        append(x, head.x.values);
        append(delta, head.delta_error);
    }
    const auto size = [](std::size_t s) { return static_cast<std::int64_t>(s); };
    const Axis head_axis{"head", size(heads.size())}, term{"term", size(n)};
    std::vector<std::string> labels;
    for (const int h : heads) labels.push_back(std::to_string(h));
    out.labels.emplace_back("head", labels);
    out.quantities.push_back(
        {"cosine", {"cosine of two terms", "1"}, {head_axis, term, {"other_term", size(n)}}, cosines});
    out.quantities.push_back({"energy",
                              {"squared singular values of the unit terms over their number", "1"},
                              {head_axis, {"direction", size(n)}},
                              energies});
    out.quantities.push_back({"pk",
                              {"row of P K: mean key by the row's weights", "value"},
                              {head_axis, term, {"key_feature", terms[0].pk.cols}},
                              pk});
    out.quantities.push_back({has_x ? "x" : "q",
                              {has_x ? "row of the layer's input" : "row of q, in place of the layer's input", "value"},
                              {head_axis, term, {has_x ? "input_feature" : "query_feature", terms[0].x.cols}},
                              x});
    out.quantities.push_back({"coefficient", {"error of delta of that row", "nat/logit"}, {head_axis, term}, delta});
    out.quantities.push_back({"term_capture", {"capture that the term is of", "1"}, {term}, terms[0].capture});
    out.quantities.push_back({"term_sequence", {"sequence that the term is of", "1"}, {term}, terms[0].sequence});
    out.quantities.push_back({"term_row", {"row that the term is of", "1"}, {term}, terms[0].row});
    if (captures.size() > 1) {
        Line largest{
            fmt::format("largest angle of the leading {} of PK, first to last capture", options.directions), "rad", {}};
        std::vector<double> angles;
        for (const Terms& head : terms) {
            const Matrix base = leading_rows(head, 0, options.directions);
            std::vector<double> found;
            for (std::size_t f = 0; f < captures.size(); ++f) {
                found = principal_angles(base.view(), leading_rows(head, f, options.directions).view());
                found.resize(static_cast<std::size_t>(options.directions), NAN);
                angles.insert(angles.end(), found.begin(), found.end());
            }
            double most = NAN;
            for (const double a : found)
                if (!(a <= most) && !std::isnan(a)) most = a;
            largest.values.push_back(most);
        }
        out.lines.push_back(std::move(largest));
        out.quantities.push_back({"principal_angle",
                                  {"angles of the leading directions of PK to those of the first capture", "rad"},
                                  {head_axis, {"capture", size(captures.size())}, {"angle", options.directions}},
                                  angles});
    }
    report.blocks.push_back(std::move(out));
}

}  // namespace

void add_similarity(std::span<const ProbeCapture> captures, const ProbeOptions& options, Report& report) {
    for (const LayerCapture& layer : captures.front().capture.layers) {
        const bool no_gradient =
            std::ranges::all_of(captures, [&](const ProbeCapture& c) { return c.capture[layer.name].dout.empty(); });
        if (no_gradient) continue;  // no terms
        add_layer(layer.name, captures, options, report);
    }
}

}  // namespace faultline::probing
