// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/group_run.hpp>

#include <algorithm>
#include <cmath>

#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::attribution {

namespace {

/// One id a character: any two names give unrelated streams.
std::uint64_t seed_of(std::uint64_t seed, const std::string& layer) {
    RandomStream stream(seed);
    for (const char c : layer) stream = stream.child(static_cast<unsigned char>(c));
    return stream.key;
}

using Injectors = std::vector<std::unique_ptr<AttentionInjector>>;

Injectors injectors_of(const Faults& faults, const RoundingPlan& plan) {
    Injectors injectors;
    for (const Fault& fault : faults.list)
        injectors.push_back(std::make_unique<AttentionInjector>(fault, plan, faults.heads));
    return injectors;
}
/// The faults, then the instrument, where there is one.
Instruments joined(const Injectors& injectors, Instrument* instrument) {
    std::vector<Instrument*> parts;
    for (const auto& injector : injectors) parts.push_back(injector.get());
    if (instrument != nullptr) parts.push_back(instrument);
    return Instruments(std::move(parts));
}

}  // namespace

Format format_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16:
            return bf16;
        case Dtype::f16:
            return fp16;
        case Dtype::e5m2:
            return e5m2;
        case Dtype::e4m3:
            return e4m3;
        case Dtype::f64:
            return binary64;
        default:
            return fp32;
    }
}

std::vector<Group> groups_of(const LayerCapture& layer, const std::vector<int>& heads, std::uint64_t seed) {
    const std::ptrdiff_t per_group = layer.heads() / layer.kv_heads();
    const std::uint64_t layer_seed = seed_of(seed, layer.name);
    std::vector<Group> groups;
    for (std::ptrdiff_t b = 0; b < layer.q.batch; ++b)
        for (std::ptrdiff_t kv = 0; kv < layer.kv_heads(); ++kv) {
            const std::ptrdiff_t first = kv * per_group;
            const auto wanted = [&](int h) { return h >= first && h < first + per_group; };
            if (!heads.empty() && std::none_of(heads.begin(), heads.end(), wanted)) continue;
            Group g;
            g.batch = b;
            g.kv_head = kv;
            HeadGroup& in = g.inputs;
            in.k = layer.k(b, kv);
            in.v = layer.v(b, kv);
            for (std::ptrdiff_t h = first; h < first + per_group; ++h) {
                in.q.push_back(layer.q(b, h));
                if (!layer.dout.empty()) in.dout.push_back(layer.dout(b, h));
                if (layer.bias) {
                    const HeadArray& bias = *layer.bias;
                    in.bias.push_back(bias(bias.batch == 1 ? 0 : b, bias.heads == 1 ? 0 : h));
                }
            }
            in.scale = layer.scale.value_or(1.0 / std::sqrt(static_cast<double>(layer.head_dim())));
            in.causal = layer.causal;
            in.softcap = layer.softcap;
            in.keep = layer.keep;
            for (std::ptrdiff_t h = first; h < first + per_group; ++h) {
                if (!layer.sink.empty()) in.sink.push_back(layer.sink[static_cast<std::size_t>(h)]);
                if (!layer.dropout) continue;
                const HeadArray& kept = *layer.dropout;
                in.dropout.push_back(kept(kept.batch == 1 ? 0 : b, kept.heads == 1 ? 0 : h));
            }
            in.first_head = static_cast<int>(b * layer.heads() + first);
            in.seed = layer_seed;
            g.problem.q = in.q;
            g.problem.dout = in.dout;
            if (layer.dout.empty()) {
                g.no_gradient = std::make_shared<const Matrix>(layer.q.rows, layer.v.cols);
                g.problem.dout.assign(in.q.size(), g.no_gradient->view());
            }
            g.problem.k = in.k;
            g.problem.v = in.v;
            g.problem.scale = layer.scale ? Scale::exactly(*layer.scale) : Scale::inverse_sqrt_head_dim();
            g.problem.causal = in.causal;
            g.problem.bias = in.bias;
            g.problem.softcap = in.softcap;
            g.problem.sink = in.sink;
            g.problem.dropout = in.dropout;
            g.problem.keep = in.keep;
            groups.push_back(std::move(g));
        }
    return groups;
}

void keep_gradients(GroupBackward&& backward, RunOutputs& out) {
    out.dsink = std::move(backward.dsink);
    out.outputs[static_cast<std::size_t>(Output::dq)] = std::move(backward.dq);
    out.outputs[static_cast<std::size_t>(Output::dk)] = {std::move(backward.dk)};
    out.outputs[static_cast<std::size_t>(Output::dv)] = {std::move(backward.dv)};
}

RunOutputs run_plan(const Group& group, const RoundingPlan& plan, Instrument* instrument,
                    const AttentionBackend& backend) {
    RunOutputs out;
    GroupForward fwd;
    if (instrument == nullptr && !group.inputs.dout.empty()) {
        GroupAttention both = backend.both(group.inputs, plan);
        fwd = std::move(both.forward);
        keep_gradients(std::move(both.backward), out);
    } else {
        fwd = backend.forward(group.inputs, plan, instrument);
        if (!group.inputs.dout.empty()) keep_gradients(backend.backward(group.inputs, fwd, plan, instrument), out);
    }
    for (HeadForward& head : fwd.heads) {
        out.outputs[static_cast<std::size_t>(Output::o)].push_back(std::move(head.o));
        Matrix& lse = out.lse.emplace_back(static_cast<std::ptrdiff_t>(head.lse.size()), 1);
        lse.values = std::move(head.lse);
    }
    return out;
}

Faults Faults::only(Site site) const {
    Faults kept{{}, heads};
    for (const Fault& fault : list)
        if (std::get<Site>(fault.site) == site) kept.list.push_back(fault);
    return kept;
}

Faults Faults::without(Site site) const {
    Faults kept{{}, heads};
    for (const Fault& fault : list)
        if (std::get<Site>(fault.site) != site) kept.list.push_back(fault);
    return kept;
}

RunOutputs run_plan(const Group& group, const RoundingPlan& plan, const Faults& faults, Instrument* instrument,
                    std::vector<Realised>* realised, const AttentionBackend& backend) {
    if (faults.list.empty()) return run_plan(group, plan, instrument, backend);
    const auto injectors = injectors_of(faults, plan);
    Instruments all = joined(injectors, instrument);
    RunOutputs out = run_plan(group, plan, &all, backend);
    if (realised != nullptr)
        for (const auto& injector : injectors) realised->push_back(injector->total());
    return out;
}

namespace {

/// What it has no room for is the layer's.
template <class Ask>
void with_name(const std::string& layer, const Ask& ask) {
    try {
        ask();
    } catch (const NoRoom& error) {
        throw NoRoom(escaped(layer, layer.size()) + ": " + error.what());
    }
}

}  // namespace

void expect_room(const std::string& layer, const std::vector<Group>& groups, const RoundingPlan& plan,
                 const AttentionBackend& backend, Instrument* instrument, const Faults& faults) {
    const auto injectors = injectors_of(faults, plan);
    const Instruments all = joined(injectors, instrument);
    const Instrument* const seen = injectors.empty() ? instrument : &all;
    with_name(layer, [&] {
        for (const Group& group : groups) backend.expect_room(group.inputs, plan, seen);
    });
}

void expect_room_for_truth(const std::string& layer, const std::vector<Group>& groups,
                           const AttentionBackend& backend) {
    with_name(layer, [&] {
        for (const Group& group : groups) backend.expect_room_for_truth(group.problem);
    });
}

const CertifiedMatrix& truth_of(const GroupTruth& truth, Output output, std::size_t i) {
    switch (output) {
        case Output::o:
            return truth.heads[i].o;
        case Output::dq:
            return truth.heads[i].dq;
        case Output::dk:
            return truth.dk;
        case Output::dv:
            return truth.dv;
    }
    return truth.dk;
}

std::vector<double> mean_key_direction(const Group& group) {
    std::vector<double> mean = mean_visible_key(group.inputs, group.inputs.k);
    double squares = 0;
    for (const double x : mean) squares += x * x;
    if (squares == 0) return {};
    for (double& x : mean) x /= std::sqrt(squares);
    return mean;
}

ErrorSums errors_of(const std::vector<Matrix>& values, const GroupTruth& truth, Output output,
                    const std::vector<double>& direction) {
    const double* along = output == Output::dq && !direction.empty() ? direction.data() : nullptr;
    ErrorSums sums(values[0].view(), truth_of(truth, output, 0), along);
    for (std::size_t i = 1; i < values.size(); ++i)
        sums.join(ErrorSums(values[i].view(), truth_of(truth, output, i), along));
    if (output == Output::dk || output == Output::dv) sums.rows_are_keys();
    return sums;
}

const std::vector<Matrix>& values_at(const RunOutputs& run, std::size_t place) {
    return place == lse_place ? run.lse : run.outputs[place];
}

ErrorSums errors_at(const std::vector<Matrix>& values, const GroupTruth& truth, std::size_t place,
                    const std::vector<double>& direction) {
    if (place != lse_place) return errors_of(values, truth, static_cast<Output>(place), direction);
    const std::vector<CertifiedMatrix> truths = truths_at(truth, place);
    ErrorSums sums;
    for (std::size_t i = 0; i < values.size(); ++i) {
        Matrix kept(truths[i].rows, 1);
        std::size_t at = 0;
        for (std::size_t r = 0; r < values[i].values.size(); ++r)
            if (std::isfinite(truth.heads[i].lse.value[r])) kept.values[at++] = values[i].values[r];
        const ErrorSums head(kept.view(), truths[i], nullptr);
        i == 0 ? void(sums = head) : sums.join(head);
    }
    return sums;
}

std::vector<CertifiedMatrix> truths_at(const GroupTruth& truth, std::size_t place) {
    if (place == static_cast<std::size_t>(Output::dk)) return {truth.dk};
    if (place == static_cast<std::size_t>(Output::dv)) return {truth.dv};
    std::vector<CertifiedMatrix> all;
    for (const HeadTruth& head : truth.heads) {
        if (place != lse_place) {
            all.push_back(place == static_cast<std::size_t>(Output::o) ? head.o : head.dq);
            continue;
        }
        CertifiedMatrix& kept = all.emplace_back();
        for (std::size_t r = 0; r < head.lse.value.size(); ++r) {
            if (!std::isfinite(head.lse.value[r])) continue;
            kept.value.push_back(head.lse.value[r]);
            kept.bound.push_back(head.lse.bound[r]);
            kept.exponent.push_back(head.lse.exponent[r]);
        }
        kept.rows = static_cast<std::ptrdiff_t>(kept.value.size());
        kept.cols = 1;
    }
    return all;
}

std::vector<double> error_vector(const std::vector<Matrix>& values, const GroupTruth& truth, Output output) {
    return error_vector_at(values, truth, static_cast<std::size_t>(output));
}

std::vector<double> error_vector_at(const std::vector<Matrix>& values, const GroupTruth& truth, std::size_t place) {
    std::vector<double> e;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const CertifiedMatrix& t =
            place == lse_place ? truth.heads[i].lse : truth_of(truth, static_cast<Output>(place), i);
        Matrix true_values(t.rows, t.cols);
        t.copy_to(true_values.view());
        for (std::size_t a = 0; a < true_values.values.size(); ++a)
            e.push_back(values[i].values[a] - true_values.values[a]);
    }
    return e;
}

}  // namespace faultline::attribution
