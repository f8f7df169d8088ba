// SPDX-License-Identifier: Apache-2.0
// What is asked for of a matrix and could change nothing, or contradicts its settings.
#include <functional>

#include <gmock/gmock.h>

#include <faultline/dissociation/matrix_words.hpp>
#include <faultline/dissociation/without_effect.hpp>

#include "matrix_support.hpp"

namespace faultline::test {
namespace {

using gpt::OptimizerKind;
using gpt::QkNorm;
using gpt::TrainConfig;
using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& request) {
    try {
        request();
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

std::string said(const std::string& word, const std::function<void(TrainConfig&)>& change,
                 const std::vector<std::string>& faults = {}) {
    TrainConfig config = small().train;
    change(config);
    std::vector<Fault> parsed;
    for (const std::string& fault : faults) parsed.push_back(parse_fault(fault));
    return refusal([&] { expect_intervention_acts(parse_intervention(word), word, config, parsed); });
}

TEST(WithoutEffect, ActionsOfAGuard) {
    const auto nothing = [](TrainConfig&) {};
    for (const char* action : {"lower_rate", "tighter_clip", "reset_optimizer", "fp32_ffn", "qk_clip", "qk_norm"})
        EXPECT_EQ(said(std::string("guard:action=") + action, nothing), "") << action;
    EXPECT_THAT(said("guard:action=tighter_clip", [](TrainConfig& c) { c.clip = 0; }),
                HasSubstr("intervention \"guard:action=tighter_clip\": does nothing: the run does not clip gradients"));
    EXPECT_THAT(said("guard:action=fp32_ffn", [](TrainConfig& c) { c.model.bf16 = false; }),
                HasSubstr("does nothing: the run is in fp32"));
    EXPECT_THAT(said("guard", [](TrainConfig& c) { c.steps = 1; }), HasSubstr("the run has one step"));
    EXPECT_EQ(said("qk_clip", [](TrainConfig& c) { c.steps = 1; }), "");
}

TEST(WithoutEffect, ResetsOfAnOptimizerThatKeepsNothing) {
    const auto of = [](OptimizerKind kind, double beta1, double beta2, double momentum) {
        return said("guard:action=reset_optimizer", [&](TrainConfig& c) {
            c.optimizer.kind = kind;
            c.optimizer.beta1 = beta1;
            c.optimizer.beta2 = beta2;
            c.optimizer.momentum = momentum;
        });
    };
    EXPECT_THAT(of(OptimizerKind::sgd, 0.9, 0.9, 0), HasSubstr("keeps nothing from step to step"));
    EXPECT_EQ(of(OptimizerKind::sgd, 0, 0, 0.9), "");
    EXPECT_EQ(of(OptimizerKind::adamw, 0, 0.9, 0), "");
    EXPECT_EQ(of(OptimizerKind::muon, 0, 0, 0.9), "");
    EXPECT_THAT(of(OptimizerKind::adamw, 0, 0, 0.9), HasSubstr("does nothing"));
}

TEST(WithoutEffect, QkClipBesideQkClipAndQkNorm) {
    const auto clipped = [](TrainConfig& c) { c.qk_clip = 50; };
    for (const char* word : {"qk_clip:tau=0.5", "guard:action=qk_clip:tau=100"})
        EXPECT_THAT(said(word, clipped), HasSubstr("the run has qk-clip 50 from the first step")) << word;
    for (const char* word : {"qk_norm", "guard", "guard:action=lower_rate"}) EXPECT_EQ(said(word, clipped), "") << word;
    // Heads of 8 columns: no logit passes sqrt(8), roundings aside.
    const auto normed = [](TrainConfig& c) { c.model.qk_norm = QkNorm::parameter_free; };
    for (const char* word : {"qk_clip:tau=100", "guard:action=lower_rate"})
        EXPECT_THAT(said(word, normed), HasSubstr("no logit passes sqrt(8)")) << word;
    EXPECT_EQ(said("qk_clip:tau=2", normed), "");
    EXPECT_EQ(said("guard:action=lower_rate:threshold=2", normed), "");
    EXPECT_EQ(said("guard:action=lower_rate:monitor=grad_norm", normed), "");
    EXPECT_EQ(said("qk_clip:tau=100", normed, {"s_cast:multiplicative:99"}), "");
    EXPECT_THAT(said("qk_clip:tau=100", normed, {"delta:fixed:0.1", "ffn_output:fixed:9"}), HasSubstr("does nothing"));
    EXPECT_EQ(said("qk_clip:tau=100", [](TrainConfig& c) { c.model.qk_norm = QkNorm::learned; }), "");
}

TEST(WithoutEffect, RepairsMeetAFaultAtWork) {
    const auto met = [](const std::string& source, const std::string& repair) {
        return refusal([&] { expect_interventions_met({source, "plan:fa2"}, {repair}, {}, 8); });
    };
    EXPECT_THAT(met("delta:fixed:0.1:until=2", "repair:from=5"), HasSubstr("ends no fault of the sources"));
    EXPECT_THAT(met("delta:fixed:0.1:until=5", "repair:from=5"), HasSubstr("ends no fault of the sources"));
    EXPECT_THAT(met("delta:fixed:0.1:from=5", "repair:from=3"), HasSubstr("ends no fault of the sources"));
    EXPECT_THAT(met("delta:fixed:0.1:until=1", "guard:action=repair"), HasSubstr("ends no fault of the sources"));
    EXPECT_EQ(met("delta:fixed:0.1:until=5", "repair:from=4"), "");
    EXPECT_EQ(met("delta:fixed:0.1:until=2+ds:fixed:0.1", "repair:from=5"), "");  // one of them is enough
    EXPECT_EQ(met("delta:fixed:0.1:from=5", "guard:action=repair"), "");
    for (const char* word : {"repair:from=2", "guard:action=repair"})
        EXPECT_THAT(refusal([&] {
                        expect_controls_met({"none", word});
                    }),
                    HasSubstr(std::string("\"") + word + "\": does nothing: a control has no fault"));
    EXPECT_EQ(refusal([] { expect_controls_met({"qk_norm", "guard", "project"}); }), "");
}

TEST(WithoutEffect, IsSaidBeforeTheFirstRun) {
    MatrixConfig config = small();
    config.train.clip = 0;
    config.interventions = {"none", "guard:action=tighter_clip"};
    EXPECT_THAT(refusal([&] { (void)run(config); }), HasSubstr("\"guard:action=tighter_clip\": does nothing"));
}

}  // namespace
}  // namespace faultline::test
