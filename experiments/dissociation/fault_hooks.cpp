// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/fault_hooks.hpp>

#include <cmath>
#include <cstring>

#include <faultline/base/error.hpp>
#include <faultline/injectors/attention_injector.hpp>

namespace faultline {

/// The faults of one head in one pass. Places are given as the trainer names them, whatever numbers its kernel uses.
class FaultHooks::HeadInstrument final : public Instrument {
  public:
    HeadInstrument(FaultHooks& owner, const gpt::HeadAt& where) : owner_(owner), where_(where) {}
    ~HeadInstrument() override {
        const std::lock_guard lock(owner_.mutex_);
        for (std::size_t i = 0; i < injectors_.size(); ++i)
            owner_.attention_[{where_.layer, where_.head, where_.micro_step, where_.sequence, numbers_[i]}].join(
                injectors_[i].total());
    }
    void add(std::size_t number, const Fault& fault, const RoundingPlan& plan) {
        numbers_.push_back(number);
        sites_.push_back(std::get<Site>(fault.site));
        injectors_.emplace_back(fault, plan, owner_.heads_, where_.step);
    }
    [[nodiscard]] bool watches(Site site) const override {
        for (const Site at_fault : sites_)
            if (at_fault == site) return true;
        return false;
    }
    [[nodiscard]] bool alters(Site site) const override { return watches(site); }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        for (std::size_t i = 0; i < sites_.size(); ++i)
            if (sites_[i] == site) injectors_[i].at(site, placed(where), value, exact);
    }
    void at_again(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        for (std::size_t i = 0; i < sites_.size(); ++i)
            if (sites_[i] == site) injectors_[i].at_again(site, placed(where), value, exact);
    }
    /// Of its one head, as it is named in the run.
    void alterations(int, int, std::vector<Alteration>& to) const override {
        const TileAt where = placed({});
        for (const AttentionInjector& injector : injectors_) injector.alterations(where.layer, where.head, to);
    }

  private:
    [[nodiscard]] TileAt placed(TileAt where) const {
        where.layer = where_.layer;
        // Batch elements of all micro steps count on: an injector takes heads modulo the layer's.
        constexpr int sequences_at_most = 1 << 12;
        where.head = (where_.micro_step * sequences_at_most + where_.sequence) * owner_.heads_ + where_.head;
        return where;
    }
    FaultHooks& owner_;
    gpt::HeadAt where_;
    std::vector<std::size_t> numbers_;
    std::vector<Site> sites_;
    std::vector<AttentionInjector> injectors_;
};

FaultHooks::FaultHooks(std::vector<Fault> faults, int layers, int heads, PlanOf plan_of)
    : faults_(std::move(faults)),
      layers_(layers),
      heads_(heads),
      plan_of_(std::move(plan_of)),
      steps_(static_cast<std::size_t>(layers * heads), 0.0),
      signs_(steps_) {
    for (const Fault& fault : faults_) {
        if (std::holds_alternative<Site>(fault.site)) {
            any_attention_ = true;
            for (int layer = 0; layer < layers; ++layer)
                for (int head = 0; head < heads; ++head)  // says now what cannot stand in a plan
                    if (const RoundingPlan* plan = plan_of_(layer, head)) (void)AttentionInjector(fault, *plan, heads);
        } else {
            model_.push_back(std::make_unique<ModelInjector>(fault, heads));
        }
    }
}

FaultHooks::~FaultHooks() = default;

bool FaultHooks::watches(std::int64_t step, int layer, Site site) const {
    if (stopped_) return false;
    for (const Fault& fault : faults_)
        if (fault.active(step, layer) && fault.site == std::variant<Site, ModelSite>(site)) return true;
    return false;
}

std::unique_ptr<Instrument> FaultHooks::instrument(const gpt::HeadAt& where) {
    if (stopped_) return nullptr;
    std::unique_ptr<HeadInstrument> found;
    for (std::size_t i = 0; i < faults_.size(); ++i) {
        const Fault& fault = faults_[i];
        if (!std::holds_alternative<Site>(fault.site) || !fault.active(where.step, where.layer) ||
            !fault.touches_head(where.head))
            continue;
        if (!found) found = std::make_unique<HeadInstrument>(*this, where);
        found->add(i, fault, *plan_of_(where.layer, where.head));
    }
    return found;
}

bool FaultHooks::watches(ModelSite site, int layer) const {
    if (stopped_) return false;
    for (const auto& injector : model_)
        if (injector->watches(site, layer)) return true;
    return false;
}

void FaultHooks::at(ModelSite site, const ModelAt& where, MatrixView<float> value,
                    std::span<const MatrixView<const float>> operands) {
    if (stopped_) return;
    for (const auto& injector : model_)
        if (injector->watches(site, where.layer)) injector->at(site, where, value, operands);
}

void FaultHooks::did(std::span<const Realised> by_head) { planted_.assign(by_head.begin(), by_head.end()); }

FaultHooks::Step FaultHooks::take_step() {
    Step step;
    step.realised.resize(signs_.size());
    for (std::size_t i = 0; i < planted_.size(); ++i) step.realised[i].join(planted_[i]);
    planted_.clear();
    for (const auto& [place, found] : attention_)
        step.realised[static_cast<std::size_t>(std::get<0>(place) * heads_ + std::get<1>(place))].join(found);
    attention_.clear();
    for (const auto& injector : model_) {
        for (int layer = -1; layer <= layers_; ++layer) {
            const int under = layer < 0 || layer >= layers_ ? 0 : layer;  // head and embedding stand under layer 0
            step.realised[static_cast<std::size_t>(under * heads_)].join(injector->of_layer(layer));
        }
        injector->reset();
    }
    for (std::size_t i = 0; i < signs_.size(); ++i) {
        const double mean = step.realised[i].mean();
        steps_[i] += step.realised[i].sum_squared > 0;
        signs_[i] += (mean > 0) - (mean < 0);
        step.step_coherence.push_back(std::abs(signs_[i]) / steps_[i]);  // NaN: 0/0
    }
    return step;
}

void FaultHooks::report(gpt::StepReport& report) {
    const Step step = take_step();
    std::vector<double> rms, asked, mean, coherence;
    for (const Realised& r : step.realised) {
        rms.push_back(r.relative_rms());
        asked.push_back(r.value_squared > 0 ? std::sqrt(r.asked_squared / r.value_squared) : 0);
        mean.push_back(r.relative_mean());
        coherence.push_back(r.sign_coherence());
    }
    bool sampled = false;
    for (const Fault& fault : faults_) sampled |= fault.sampled;
    const std::string of =
        sampled ? "; on a device, of faults with record=sample, over the first sequence of each micro-batch" : "";
    report.extras.push_back(
        {"injected_rms", std::move(rms), "rms of the injected error, over the rms of the values" + of});
    report.extras.push_back(
        {"injected_asked_rms", std::move(asked), "the same as asked for, before it was rounded" + of});
    report.extras.push_back(
        {"injected_mean", std::move(mean), "mean of the injected error, over the rms of the values" + of});
    report.extras.push_back({"injected_sign_coherence", std::move(coherence),
                             "size of the sum of the injected errors over the sum of their sizes, in the step" + of});
    report.extras.push_back({"injected_step_coherence", step.step_coherence,
                             "size of the mean of the sign of the step's mean error, over the steps with an error so "
                             "far; NaN before the first" +
                                 of});
}

std::string FaultHooks::save() const {
    std::string out(1, stopped_ ? '\1' : '\0');
    for (const std::vector<double>* part : {&steps_, &signs_})
        out.append(reinterpret_cast<const char*>(part->data()), part->size() * sizeof(double));
    return out;
}

void FaultHooks::load(std::string_view state) {
    const std::size_t part = signs_.size() * sizeof(double);
    if (state.size() != 1 + 2 * part)
        throw WorkError("checkpoint: the state of the faults has another size: expected a checkpoint of this run");
    stopped_ = state[0] != 0;
    if (part == 0) return;
    std::memcpy(steps_.data(), state.data() + 1, part);
    std::memcpy(signs_.data(), state.data() + 1 + part, part);
}

}  // namespace faultline
