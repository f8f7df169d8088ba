// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/passed_faults.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/cpu/attention.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt/parameters.hpp>
#include <faultline/injectors/passed_sites.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

/// Rows and keys that pass every site that the context's do: splits are cut from all of it, tiles repeat from the third on.
std::ptrdiff_t rows_needed(const Schedule& schedule, std::ptrdiff_t context) {
    if (schedule.key_splits > 1) return context;
    const int block = std::max({schedule.block_q, schedule.block_k, schedule.bwd_block_q, schedule.bwd_block_k});
    return std::min<std::ptrdiff_t>(context, 2 * std::max(block, 1) + 1);
}

Matrix drawn(std::ptrdiff_t rows, std::ptrdiff_t cols, std::uint64_t number) {
    const RandomStream stream(number);
    Matrix values(rows, cols);
    for (std::size_t a = 0; a < values.values.size(); ++a)
        values.values[a] = round(stream.normal(a), bf16, Rounding::nearest_even);
    return values;
}

PassedSites run_once(const RoundingPlan& plan, const gpt::ModelConfig& model) {
    const std::ptrdiff_t rows = rows_needed(plan.schedule, model.context), columns = model.head_dim();
    const Matrix q = drawn(rows, columns, 0), k = drawn(rows, columns, 1), v = drawn(rows, columns, 2),
                 dout = drawn(rows, columns, 3);
    HeadGroup group;
    group.q = {q.view()};
    group.k = k.view();
    group.v = v.view();
    group.dout = {dout.view()};
    group.scale = 1 / std::sqrt(static_cast<double>(columns));
    group.softcap = model.softcap;
    PassedSites passed;
    const GroupForward forward = attention_forward(group, plan, &passed);
    (void)attention_backward(group, forward, plan, &passed);
    return passed;
}

/// A sweep asks the same for each of its runs.
const PassedSites& passed_by(const RoundingPlan& plan, const gpt::ModelConfig& model) {
    static std::mutex mutex;
    static std::map<std::string, PassedSites> known;
    const std::lock_guard lock(mutex);
    const std::string key = fmt::format("{} {} {}\n{}", model.context, model.head_dim(), model.softcap, to_toml(plan));
    const auto found = known.find(key);
    return found != known.end() ? found->second : known.emplace(key, run_once(plan, model)).first->second;
}

/// The layers at which a fault's site is passed, first and last.
std::pair<std::int64_t, std::int64_t> layers_of_site(const Fault& fault, std::int64_t layers) {
    const ModelSite* site = std::get_if<ModelSite>(&fault.site);
    if (site != nullptr && *site == ModelSite::logits) return {layers, layers};
    if (site != nullptr && *site == ModelSite::layer_norm_statistics) return {0, layers};  // the final norm's too
    return {0, layers - 1};
}

std::string range(std::string_view what, std::int64_t first, std::int64_t last) {
    return first == last ? fmt::format("{} {}", what, first) : fmt::format("a {} from {} to {}", what, first, last);
}

/// Columns of the values at a site of the model, but for updates, which have their parameters'.
std::int64_t columns_of(ModelSite site, const gpt::ModelConfig& model) {
    switch (site) {
        case ModelSite::layer_norm_statistics:
            return 2;
        case ModelSite::logits:
            return model.vocabulary;
        case ModelSite::ffn_activation_gradient:
            return std::int64_t{4} * model.width;
        default:
            return model.width;
    }
}

void expect_columns(const Fault& fault, const gpt::ModelConfig& model) {
    const ModelSite* site = std::get_if<ModelSite>(&fault.site);
    if (site == nullptr) return;
    const auto expect = [&](std::int64_t columns, std::string_view of) {
        if (fault.column >= columns)
            throw RequestError(fmt::format("fault \"{}\": column {}: expected less than the {} columns of {}",
                                           to_string(fault), fault.column, columns, of));
        if (!fault.heads.empty() && columns % model.heads != 0)  // no blocks of columns that are one head's
            throw RequestError(
                fmt::format("fault \"{}\": heads: the {} columns of {} are no {} equal blocks: expected none",
                            to_string(fault), columns, of, model.heads));
    };
    if (*site != ModelSite::optimizer_update) return expect(columns_of(*site, model), name(*site));
    if (fault.column < 0 && fault.heads.empty()) return;  // nothing is asked of the columns
    const gpt::ParameterLayout layout(model);
    for (const gpt::Parameter& parameter : layout.all())
        if (fault.active(fault.from, parameter.layer)) expect(parameter.cols, parameter.name);
}

}  // namespace

void expect_faults_in_run(const std::vector<Fault>& faults, const gpt::ModelConfig& model, std::int64_t steps) {
    for (const Fault& fault : faults) {
        const auto expect = [&](std::string_view what, int number, std::int64_t first, std::int64_t last) {
            if (number < first || number > last)
                throw RequestError(fmt::format("fault \"{}\": {} {}: expected {} at {}", to_string(fault), what, number,
                                               range(what, first, last), site_name(fault)));
        };
        const auto [first, last] = layers_of_site(fault, model.layers);
        for (const int layer : fault.layers) expect("layer", layer, first, last);
        for (const int head : fault.heads) expect("head", head, 0, model.heads - 1);
        expect_columns(fault, model);
        if (fault.from >= steps)
            throw RequestError(fmt::format("fault \"{}\": from: {}: expected a step of the run, 0 to {}",
                                           to_string(fault), fault.from, steps - 1));
    }
}

void expect_faults_passed(const std::vector<Fault>& faults, const gpt::ModelConfig& model) {
    for (const Fault& fault : faults) {
        const Site* site = std::get_if<Site>(&fault.site);
        if (site == nullptr) continue;
        std::set<std::string> plans;  // those that do not pass it
        bool passed = false;
        for (int layer = 0; layer < model.layers && !passed; ++layer) {
            if (!fault.layers.empty() &&
                std::find(fault.layers.begin(), fault.layers.end(), layer) == fault.layers.end())
                continue;
            for (int head = 0; head < model.heads && !passed; ++head) {
                if (!fault.touches_head(head)) continue;
                const RoundingPlan* own = model.plan(layer, head);
                const RoundingPlan plan =
                    own != nullptr ? for_head_dim(*own, model.head_dim()) : gpt::fast_plan(model.bf16);
                passed = passed_by(plan, model)[*site];
                if (!passed)
                    plans.insert(own != nullptr ? fmt::format("plan \"{}\"", plan.name) : "the trainer's kernel");
            }
        }
        if (!passed && !plans.empty())
            throw RequestError(
                fmt::format("fault \"{}\": {} has nothing to do in a context of {} under {}: expected a site that "
                            "the run passes (faultline sites says what each is of)",
                            to_string(fault), name(*site), model.context, *plans.begin()));
    }
}

void expect_repairs_passed(const Source& source, const gpt::ModelConfig& model) {
    for (const RepairedSite& repaired : source.repaired) {
        if (repaired.site == Site::scale) continue;  // a constant, which every kernel has
        if (!passed_by(for_head_dim(*repaired.plan, model.head_dim()), model)[repaired.site])
            throw RequestError(fmt::format(
                "{}: exact={}: does nothing: the site is not passed in a context of {} under plan {}: expected one that is "
                "(faultline sites says what each is of)",
                in_quotes(repaired.word), name(repaired.site), model.context, in_quotes(repaired.plan->name)));
    }
}

void expect_magnitudes(const std::vector<Fault>& faults) {
    for (const Fault& fault : faults)
        if (fault.magnitude == 0)
            throw RequestError(fmt::format("fault {}: magnitude 0: changes nothing: expected another, or no fault",
                                           in_quotes(to_string(fault))));
}

Fault in_fewest_words(const Fault& fault, const gpt::ModelConfig& model, std::int64_t steps) {
    Fault out = fault;
    std::ranges::sort(out.layers);
    std::ranges::sort(out.heads);
    const auto [first, last] = layers_of_site(fault, model.layers);
    const ModelSite* site = std::get_if<ModelSite>(&fault.site);
    // Without layers an update's fault is in the embeddings too.
    const bool of_layers = site == nullptr || *site != ModelSite::optimizer_update;
    const auto whole = [](const std::vector<int>& sorted, std::int64_t from, std::int64_t to) {
        return !sorted.empty() && sorted.front() == from && sorted.back() == to &&
               static_cast<std::int64_t>(sorted.size()) == to - from + 1;
    };
    if (of_layers && whole(out.layers, first, last)) out.layers.clear();
    if (whole(out.heads, 0, model.heads - 1)) out.heads.clear();
    if (out.until >= steps) out.until = Fault{}.until;
    if (out.magnitude == 0) out.magnitude = 0, out.unit = Fault::Unit::relative;  // of either sign, in any unit
    return out;
}

}  // namespace faultline
