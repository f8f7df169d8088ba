// SPDX-License-Identifier: Apache-2.0
// Targets as a person writes them.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/bisection/target.hpp>

namespace faultline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<std::string> two_layers{"layer1", "model.layers.7"};

Target parsed(std::string_view text) { return parse_target(text, two_layers, 0.1); }

std::string refusal(std::string_view text, std::optional<double> tolerance = std::nullopt) {
    try {
        (void)parse_target(text, two_layers, tolerance);
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

TEST(Target, IsReadPartByPart) {
    const Target t = parsed(" layer1.dq.rel_error<1e-2 ");
    EXPECT_EQ(t.layer, "layer1");
    EXPECT_EQ(t.output, Output::dq);
    EXPECT_EQ(t.metric, Metric::rel_error);
    EXPECT_EQ(t.relation, Target::Relation::less);
    EXPECT_TRUE(t.met(WideReal(0.009)));
    EXPECT_FALSE(t.met(WideReal(0.01)));
    EXPECT_TRUE(parsed("layer1.dq.rel_error <= 0.5").met(WideReal(0.5)));
    EXPECT_EQ(parsed("model.layers.7.dk.gain > -0.5").layer, "model.layers.7");
    EXPECT_TRUE(parsed("layer1.o.rel_error >= 1%").met(WideReal(0.02)));
    EXPECT_TRUE(parsed("abs(layer1.dq.signed_bias) < 0.01").absolute);
}

/// Why these are refused together; "" where they are not.
std::string problem(const std::vector<std::string>& texts) {
    std::vector<Target> targets;
    for (const std::string& text : texts) targets.push_back(parse_target(text, {"a", "b"}, 0.1));
    try {
        expect_compatible(targets);
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

TEST(Target, ContradictoryOnesAreRefused) {
    EXPECT_THAT(
        problem({"a.dq.rel_error < 1e-3", "a.dq.rel_error > 1e-2"}),
        HasSubstr("\"a.dq.rel_error > 1e-2\": cannot be met together with \"a.dq.rel_error < 1e-3\": expected"));
    for (const auto& [one, other] : {std::pair{"a.dq.gain <= 1", "a.dq.gain > 1"},
                                     {"a.dq.gain < 1", "a.dq.gain >= 1"},
                                     {"abs(a.dq.gain) < 1", "a.dq.gain > 1"},
                                     {"abs(a.dq.gain) < 1", "abs(a.dq.gain) > 2"},
                                     {"a.dq.rel_error < 1", "abs(a.dq.rel_error) > 2"},
                                     {"abs(a.dq.gain) < 1", "a.dq.gain < -2"},
                                     {"abs(a.dq.gain) < 1", "a.dq.gain <= -1"},
                                     {"a.dq.nonfinite > 0.2", "a.dq.nonfinite < 0.8"},  // a count
                                     {"a.dq.nonfinite > 7", "a.dq.nonfinite < 8"},
                                     {"a.dq.signed_bias < -0.1", "abs(a.dq.signed_bias) < 0.05"},
                                     {"abs(a.dq.error_norm) > 1e-4000", "a.dq.error_norm <= 1e-4000"}}) {
        EXPECT_NE(problem({one, other}), "") << one << other;
        EXPECT_NE(problem({other, one}), "") << one << other;
    }
    for (const auto& [one, other] : {std::pair{"a.dq.gain <= 1", "a.dq.gain >= 1"},  // 1 meets both
                                     {"a.dq.gain < 2", "a.dq.gain > 1"},
                                     {"a.dq.gain < 1", "b.dq.gain > 2"},
                                     {"a.dq.gain < 1", "a.dk.gain > 2"},
                                     {"a.dq.gain < 1", "a.dq.rel_error > 2"},
                                     {"a.dq.gain < -1", "abs(a.dq.gain) > 2"},  // -3 does
                                     {"abs(a.dq.gain) <= 1", "a.dq.gain <= -1"},
                                     {"a.dq.rel_error", "a.dq.rel_error > 2"},
                                     {"a.dq.nonfinite > 7", "a.dq.nonfinite < 9"},
                                     {"a.dq.nonfinite > 0.2", "a.dq.nonfinite < 1.5"},
                                     {"a.dq.nonfinite > 1e300", "a.dq.nonfinite < 1e301"},
                                     {"a.dq.row_coherence >= 1", "a.dq.row_coherence > 0.5"},
                                     {"a.dq.gain < 1", "a.dq.gain < 2"}})
        EXPECT_EQ(problem({one, other}), "") << one << other;
}

// An output with some elements that are not finite has an infinite error, and no sign.
TEST(Target, WhereElementsAreNotFiniteFewOthersHold) {
    EXPECT_THAT(problem({"a.o.rel_error < 1", "a.o.nonfinite > 0"}),
                HasSubstr("\"a.o.nonfinite > 0\": cannot be met together with \"a.o.rel_error < 1\": expected"));
    for (const char* other :
         {"a.o.error_norm <= 1e4000", "a.o.signed_bias > 0.1", "a.o.gain > -1", "a.o.t_statistic > 3"})
        EXPECT_NE(problem({"a.o.nonfinite >= 1", other}), "") << other;
    for (const char* other : {"a.o.rel_error > 1", "a.o.error_norm > 1e4000", "a.o.rel_error", "a.o.nonfinite < 5",
                              "b.o.rel_error < 1", "a.dq.rel_error < 1"})
        EXPECT_EQ(problem({"a.o.nonfinite >= 1", other}), "") << other;
    EXPECT_EQ(problem({"a.o.nonfinite < 5", "a.o.rel_error < 1"}), "");
}

// No two of the first three contradict each other: within 1 of 0, and more than 2 off it.
TEST(Target, ThreeMayContradictEachOther) {
    const auto problem_with = [](const char* last) { return problem({"a.dq.gain < 1", "a.dq.gain > -1", last}); };
    EXPECT_THAT(
        problem_with("abs(a.dq.gain) > 2"),
        HasSubstr("\"a.dq.gain < 1\": cannot be met together with \"a.dq.gain > -1\" and \"abs(a.dq.gain) > 2\":"));
    EXPECT_EQ(problem_with("abs(a.dq.gain) > 0.5"), "");
}

TEST(Target, HoldsBoundsThatNoDoubleHolds) {
    const Target t = parsed("layer1.dq.error_norm < 1e-4000");
    EXPECT_FALSE(t.met(WideReal(1e-300)));
    EXPECT_TRUE(t.met(WideReal(1.0, -14000)));
}

TEST(Target, TheLayerMayBeLeftOutWhereThereIsOne) {
    EXPECT_EQ(parse_target("dq.rel_error < 1", {"a.b"}, std::nullopt).layer, "a.b");
    EXPECT_THAT(refusal("layer1.dk.rel_error < -1"), HasSubstr("rel_error is never below 0"));
    EXPECT_THAT(refusal("layer1.dk.rel_error < 0"), HasSubstr("rel_error is never below 0"));
    EXPECT_THAT(refusal("abs(layer1.dk.gain) <= -0.1"), HasSubstr("abs(gain) is never below 0"));
    EXPECT_EQ(refusal("layer1.dk.gain < -0.1"), "");
    EXPECT_THAT(refusal("layer1.dk.t_statistic < 1"), HasSubstr("defined for o and dq alone"));
    EXPECT_THAT(refusal("layer1.dv.row_coherence < 1"), HasSubstr("defined for o and dq alone"));
    EXPECT_THAT(refusal("dq.rel_error < 1"), HasSubstr("no layer is named and the capture has 2: \"layer"));
}

// A cosine, a coherence and a share have an end on both sides; an error and a gain have none above.
TEST(Target, BoundsBeyondWhatTheMeasureMayBeAreRefused) {
    for (const char* text :
         {"layer1.dq.row_coherence > 2", "layer1.dk.head_coherence > 1.5", "layer1.dq.mean_key_share > 1.5",
          "layer1.dq.signed_bias > 1", "abs(layer1.dq.signed_bias) > 1", "layer1.dq.mean_key_sign >= 1.01"})
        EXPECT_THAT(refusal(text), HasSubstr("is never above 1: expected a number ")) << text;
    for (const char* text :
         {"layer1.dq.mean_key_sign < -2", "layer1.dq.signed_bias < -1", "layer1.dq.signed_bias <= -1.5"})
        EXPECT_THAT(refusal(text), HasSubstr("is never below -1: expected a number ")) << text;
    EXPECT_THAT(refusal("layer1.dq.row_coherence < 0"), HasSubstr("is never below 0: expected a number above it"));
    for (const char* text : {"layer1.dq.row_coherence >= 1", "layer1.dq.mean_key_sign <= -1",
                             "layer1.dq.signed_bias > -2", "layer1.dq.gain > 2", "layer1.dq.rel_error > 2",
                             "layer1.dq.t_statistic < -9", "layer1.dq.nonfinite > 5", "layer1.dq.error_norm > 1e4000"})
        EXPECT_EQ(refusal(text), "") << text;
}

TEST(Target, MeasuresAlongTheMeanKeyAreOfDqAlone) {
    for (const char* output : {"o", "dk", "dv"})
        for (const char* measure : {"mean_key_sign", "mean_key_share"})
            EXPECT_THAT(refusal(std::string("layer1.") + output + "." + measure + " < 1"),
                        HasSubstr("defined for dq alone"));
    EXPECT_EQ(parsed("layer1.dq.mean_key_sign < 1").metric, Metric::mean_key_sign);
}

// ErrorMeasure leaves elements that are not finite out of its sums: no target may be met by what is left.
TEST(Target, AnOutputThatIsNotFiniteMeetsNoTargetButThoseThatSaySo) {
    ErrorMeasure measure;  // nothing finite is left: sums of 0
    measure.rel_error = WideReal(std::numeric_limits<double>::infinity());
    measure.nonfinite = 3;
    for (const char* text : {"layer1.dq.rel_error < 1", "layer1.dq.error_norm < 1", "layer1.dq.signed_bias < 1",
                             "layer1.dq.gain > -1", "layer1.dq.mean_key_share < 1", "layer1.dq.nonfinite < 3"}) {
        const Target t = parsed(text);
        EXPECT_FALSE(t.met(value_of(t, measure, 0))) << text;
    }
    EXPECT_TRUE(parsed("layer1.dq.nonfinite > 2").met(value_of(parsed("layer1.dq.nonfinite > 2"), measure, 0)));
    Target near = parsed("layer1.dq.rel_error");
    near.bound = measure.rel_error;
    EXPECT_FALSE(near.met(WideReal(1.0)));
}

TEST(Target, AMeasureAloneIsNearThePlan) {
    Target t = parsed("layer1.dq.rel_error");
    ASSERT_EQ(t.relation, Target::Relation::near_plan);
    t.bound = WideReal(1.5);
    EXPECT_TRUE(t.met(WideReal(1.6)));
    EXPECT_FALSE(t.met(WideReal(1.7)));
    EXPECT_THAT(refusal("layer1.dq.rel_error"), HasSubstr("there is no < or >"));
}

TEST(Target, DistanceIsZeroOrLessExactlyWhereItIsMet) {
    for (const char* text : {"layer1.dq.gain < 0.25", "layer1.dq.gain > 0.25", "layer1.dq.gain < -0.25"})
        for (const double x : {-3.0, -0.3, -0.1, 0.0, 0.1, 0.24, 0.26, 7.0}) {
            const Target t = parsed(text);
            EXPECT_EQ(t.met(WideReal(x)), t.distance(WideReal(x)) < 0) << text << " " << x;
        }
    EXPECT_TRUE(std::isinf(parsed("layer1.dq.mean_key_sign < 1").distance(WideReal(std::nan("")))));
}

TEST(Target, NamesTheParenthesisThatIsMissing) {
    EXPECT_THAT(refusal("abs(layer1.dq.signed_bias < 1"), HasSubstr("the \")\" of abs( is missing: expected LAYER"));
    EXPECT_THAT(refusal("layer1.dq.signed_bias) < 1"), HasSubstr("\")\" has no abs( before it: expected LAYER"));
}

TEST(Target, ExpectsOneThing) {
    for (const char* text : {"layer1.dq.rel_error < -1", "layer1.dq.rel_error <= -1", "layer1.dk.t_statistic < 1",
                             "layer1.o.mean_key_share < 1", "layer1.dk.row_coherence < 1", "dq.rel_error < 1",
                             "abs(layer1.dq.signed_bias < 1", "layer1.dq.rel_error < x", "layer1.dq.rel_eror < 1",
                             "layer2.dq.rel_error < 1"}) {
        const std::string said = refusal(text);
        const std::size_t first = said.find("expected");
        EXPECT_NE(first, std::string::npos) << text;
        EXPECT_EQ(said.find("expected", first + 1), std::string::npos) << said;
    }
}

TEST(Target, RefusesWithTheGrammar) {
    for (const char* text : {"", "<", "layer1.dq.rel_error <", "layer1.dq.rel_error < x", "layer1.dq.rel_error < inf",
                             "rel_error < 1", "layer1.dq.rel_error = 1", "layer1.dq.rel_error << 1", ". < 1"})
        EXPECT_THAT(refusal(text), HasSubstr("expected LAYER.OUTPUT.MEASURE < NUMBER")) << text;
    for (const char* text : {"layer1.dp.rel_error < 1", "layer2.dq.rel_error < 1", "layer1.dq. < 1"})
        EXPECT_THAT(refusal(text), HasSubstr("expected one of ")) << text;
    EXPECT_THAT(refusal("layer1.dq.rel_eror < 1"),
                AllOf(HasSubstr("\"rel_eror\" is no measure"), HasSubstr("did you mean \"rel_error\"?")));
}

}  // namespace
}  // namespace faultline
