// SPDX-License-Identifier: Apache-2.0
// Where a fault or a projection may stand it does something; elsewhere the matrix is refused before its first step.
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "matrix_support.hpp"

namespace faultline {
namespace {

using test::refusal;
using test::run;
using test::small;
using ::testing::HasSubstr;

// At every site of the trainer's kernel and of the model: where a fault may stand it does something, and elsewhere it is
// refused before the first run. Layer 2 of two is the place of the final norm and the logits.
TEST(Matrix, FaultsStandInLayersAndHeadsOfTheModel) {
    MatrixConfig config = small();
    config.train.steps = 1;
    config.interventions = {"none"};
    config.controls = {};
    config.seeds = {0};
    std::vector<std::string> sites{"delta", "row_max"};
    for (const ModelSiteInfo& site : model_sites()) sites.emplace_back(site.name);
    for (const std::string& site : sites)
        for (int layer = 0; layer <= 3; ++layer) {
            const std::string source = fmt::format("{}:multiplicative:0.1:layers={}", site, layer);
            config.sources = {source};
            const bool stands = site == "logits"                  ? layer == 2
                                : site == "layer_norm_statistics" ? layer <= 2
                                                                  : layer <= 1;
            if (stands) {
                const RunMatrix matrix = run(config);
                ASSERT_EQ(matrix.runs.size(), 2U) << source;
                EXPECT_GT(matrix.runs[1].injected_rms, 0) << source;
                continue;
            }
            const std::string expected = site == "logits"                  ? "expected layer 2 at logits"
                                         : site == "layer_norm_statistics" ? "expected a layer from 0 to 2 at"
                                                                           : "expected a layer from 0 to 1 at";
            EXPECT_THAT(refusal(config),
                        HasSubstr(fmt::format("source \"{0}\", intervention \"none\": fault \"{0}\": layer {1}: {2}",
                                              source, layer, expected)));
        }
    for (const std::string& site : sites) {
        if (site == "layer_norm_statistics") continue;  // has no heads
        config.sources = {site + ":multiplicative:0.1:heads=0,2"};
        EXPECT_THAT(refusal(config), HasSubstr("head 2: expected a head from 0 to 1 at " + site));
    }
    // One of several, and the later fault of a source.
    config.sources = {"delta:multiplicative:0.1+ds:fixed:0.1:layers=1,2"};
    EXPECT_THAT(refusal(config), HasSubstr("fault \"ds:fixed:0.1:layers=1,2\": layer 2: expected"));
}

// A column is one of the model's at the site, and a step one of the run's; what is asked for beyond is refused before the first.
TEST(Matrix, FaultsStandInColumnsOfTheModelAndStepsOfTheRun) {
    MatrixConfig config = small();
    config.interventions = {"none"};
    config.controls = {};
    config.seeds = {0};
    config.train.steps = 2;
    const auto said = [&](const std::string& fault) {
        config.sources = {fault};
        return refusal(config);
    };
    for (const ModelSiteInfo& info : model_sites()) {
        const std::string site(info.name);
        const int columns = site == "logits"                    ? config.train.model.vocabulary
                            : site == "layer_norm_statistics"   ? 2
                            : site == "ffn_activation_gradient" ? 64
                                                                : 16;
        config.sources = {fmt::format("{}:fixed:0.1:column={}", site, columns - 1)};
        const RunMatrix matrix = run(config);
        ASSERT_EQ(matrix.runs.size(), 2U) << site;
        EXPECT_GT(matrix.runs[1].injected_rms, 0) << site;
        EXPECT_THAT(said(fmt::format("{}:fixed:0.1:column={}", site, columns)),
                    HasSubstr(fmt::format("column {0}: expected less than the {0} columns of {1}", columns,
                                          site == "optimizer_update" ? "wte" : site)));
    }
    // A learned gain of QK normalisation has head_dim columns, 8, and stands in a layer.
    config.train.model.qk_norm = gpt::QkNorm::learned;
    EXPECT_THAT(said("optimizer_update:fixed:0.1:column=8:layers=1"), HasSubstr("the 8 columns of layer1."));
    config.train.model.qk_norm = gpt::QkNorm::none;
    config.train.model.vocabulary = 257;
    EXPECT_THAT(said("logits:fixed:0.1:heads=1"), HasSubstr("the 257 columns of logits are no 2 equal blocks"));
    EXPECT_THAT(said("delta:fixed:0.1:from=2"),
                HasSubstr("delta:fixed:0.1:from=2\": from: 2: expected a step of the run, 0 to 1"));
}

// A matrix of width 16 has 16 directions; along all of them lies the whole update.
TEST(Matrix, AProjectionHasNoMoreDirectionsThanTheWidth) {
    MatrixConfig config = small();
    config.train.steps = 2;
    config.sources = {"delta:multiplicative:0.1"};
    config.controls = {};
    config.seeds = {0};
    config.interventions = {"project:k=16"};
    const RunMatrix matrix = run(config);
    ASSERT_EQ(matrix.runs.size(), 2U);
    constexpr double of_doubles = 1e-9;  // bases of 16 columns in doubles
    EXPECT_NEAR(matrix.runs[1].removed_fraction, 1, of_doubles);
    config.interventions = {"project:k=17"};
    const std::string expected =
        "intervention \"project:k=17\": k: 17: expected directions that W_Q and W_K have, 1 to 16";
    EXPECT_EQ(refusal(config), expected);
    config.interventions = {"none"};
    config.controls = {"project:removal=shrink:k=17"};
    EXPECT_THAT(refusal(config), HasSubstr("k: 17: expected directions"));
}

// The model's own normalisation is what the intervention would switch on; of a learned one a guard changes nothing.
TEST(Matrix, AnInterventionSwitchesOnWhatTheModelHasNot) {
    using gpt::QkNorm;
    MatrixConfig config = small();
    config.train.steps = 3;
    config.sources = {"delta:multiplicative:0.1"};
    config.controls = {};
    config.seeds = {0};
    const auto said = [&](QkNorm of_the_model, const std::string& intervention) {
        config.train.model.qk_norm = of_the_model;
        config.interventions = {intervention};
        return refusal(config);
    };
    const std::string guard = "guard:threshold=0.001";
    for (const std::string& word : {std::string("qk_norm"), guard})
        EXPECT_EQ(said(QkNorm::parameter_free, word),
                  fmt::format("intervention \"{}\": does nothing: the model has QK normalisation from the first step: "
                              "expected another intervention, or qk-norm none",
                              word));
    EXPECT_THAT(said(QkNorm::learned, guard), HasSubstr("does nothing"));
    EXPECT_EQ(said(QkNorm::learned, "qk_norm"), "");  // takes its place
    EXPECT_EQ(said(QkNorm::parameter_free, "guard:action=lower_rate:threshold=0.001"), "");
    EXPECT_EQ(said(QkNorm::none, "qk_norm"), "");
}

}  // namespace
}  // namespace faultline
