// SPDX-License-Identifier: Apache-2.0
// Captures with a softcap, sinks and dropout: read from safetensors, .npy and HDF5 alike, attributed, refused.
#include <cmath>
#include <filesystem>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/capture.hpp>
#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/json.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/base/error.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/record/capture.hpp>
#include <faultline/tensor/npy.hpp>
#include <faultline/tensor/safetensors.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t heads = 2, rows = 12, size = 8;

void add(TensorSet& set, const std::string& name, std::vector<std::int64_t> shape, std::uint64_t seed) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i)
        values.push_back(static_cast<float>(RandomStream(seed).normal(static_cast<std::uint64_t>(i))));
    set.add(make_tensor<float>(name, std::move(shape), values));
}

void add_number(TensorSet& set, const std::string& name, double x) {
    set.add(make_tensor<double>(name, {1}, std::vector{x}));
}

TensorSet plain() {
    TensorSet set;
    set.source = "test";
    std::uint64_t seed = 1;
    for (const char* name : {"l.q", "l.k", "l.v", "l.do"}) add(set, name, {1, heads, rows, size}, seed++);
    return set;
}

TensorSet with_all() {
    TensorSet set = plain();
    add_number(set, "l.softcap", 2.5);
    set.add(make_tensor<float>("l.sink", {heads}, std::vector<float>{0.5F, -1}));
    std::vector<std::uint8_t> kept;
    for (std::int64_t i = 0; i < heads * rows * rows; ++i) kept.push_back(i % 5 != 0);
    set.add(make_tensor<std::uint8_t>("l.dropout", {1, heads, rows, rows}, kept, Dtype::boolean));
    add_number(set, "l.keep", 0.8);
    return set;
}

void expect_all(const LayerCapture& layer) {
    EXPECT_EQ(layer.softcap, 2.5);
    EXPECT_EQ(layer.sink, (std::vector<double>{0.5, -1}));
    EXPECT_EQ(layer.keep, 0.8);
    ASSERT_TRUE(layer.dropout);
    EXPECT_EQ((*layer.dropout)(0, 0)(0, 0), 0);
    EXPECT_EQ((*layer.dropout)(0, 1)(0, 0), 1);
}

class Folder {
  public:
    Folder() : path_(std::filesystem::temp_directory_path() / ("extras_" + std::to_string(::getpid()))) {
        std::filesystem::create_directories(path_ / "npy");
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    [[nodiscard]] std::string operator/(const char* name) const { return (path_ / name).string(); }

  private:
    std::filesystem::path path_;
};

TEST(Extras, AreReadFromEveryKindOfFile) {
    const Folder folder;
    const TensorSet set = with_all();
    write_safetensors(folder / "x.safetensors", set);
    write_hdf5_capture(folder / "x.h5", set, Manifest{});
    for (const auto& [name, tensor] : set.tensors) write_npy(folder / ("npy/" + name + ".npy").c_str(), tensor);
    for (const char* name : {"x.safetensors", "x.h5", "npy"}) {
        SCOPED_TRACE(name);
        const Capture capture = read_capture(folder / name);
        EXPECT_TRUE(capture.unused.empty());
        expect_all(capture["l"]);
    }
}

TEST(Extras, OfMetadataAndOptions) {
    TensorSet set = plain();
    set.metadata["softcap"] = "30";
    EXPECT_EQ(capture_of(set)["l"].softcap, 30);
    CaptureOptions options;
    options.softcap = 0;
    EXPECT_EQ(capture_of(set, options)["l"].softcap, 0);
    options.softcap = 7;
    EXPECT_EQ(capture_of(set, options)["l"].softcap, 7);
    set.metadata["keep"] = "1";
    EXPECT_EQ(capture_of(set)["l"].keep, 1);
    set.add(make_tensor<float>("l.dropout", {rows, rows}, std::vector<float>(rows * rows, 1)));
    set.metadata["keep"] = "0.75";
    EXPECT_EQ(capture_of(set)["l"].keep, 0.75);
    EXPECT_EQ(capture_of(set)["l"].dropout->heads, 1);
}

void expect_refused(const TensorSet& set, const char* what) {
    try {
        (void)capture_of(set);
        FAIL() << "expected: " << what;
    } catch (const RequestError& error) {
        EXPECT_THAT(error.what(), HasSubstr(what));
    }
}

TEST(Extras, WhatIsWrongIsNamed) {
    const auto changed = [](const char* name, const Tensor& tensor) {
        TensorSet set = with_all();
        set.tensors.erase(name);
        set.add(tensor);
        return set;
    };
    const auto number = [](const char* name, double x) { return make_tensor<double>(name, {1}, std::vector{x}); };
    expect_refused(changed("l.softcap", number("l.softcap", -1)),
                   "tensor \"l.softcap\": -1: expected 0 for none, or a number from 1e-30 to 1e+30");
    expect_refused(changed("l.softcap", make_tensor<double>("l.softcap", {2}, std::vector{1.0, 2.0})),
                   "expected one number");
    expect_refused(changed("l.keep", number("l.keep", 0)), "expected a probability above 0 and at most 1");
    expect_refused(changed("l.sink", make_tensor<float>("l.sink", {3}, std::vector<float>{1, 2, 3})),
                   "one score per head");
    expect_refused(changed("l.sink", make_tensor<float>("l.sink", {2}, std::vector<float>{1, NAN})),
                   "element [1] is NaN");
    expect_refused(
        changed("l.dropout", make_tensor<float>("l.dropout", {rows, rows}, std::vector<float>(rows * rows, 0.5F))),
        "expected 1 or true where p is kept");
    expect_refused(changed("l.dropout", make_tensor<float>("l.dropout", {rows, 1}, std::vector<float>(rows, 1))),
                   "expected [1, 2 or 1, 12, 12]");
    TensorSet alone = with_all();
    alone.tensors.erase("l.keep");
    expect_refused(alone, "\"l.keep\": is missing");
    alone = with_all();
    alone.tensors.erase("l.dropout");
    expect_refused(alone, "\"l.dropout\": is missing");
    alone = plain();
    alone.metadata["softcap"] = "much";
    expect_refused(alone, "metadata \"softcap\": \"much\"");
}

// The exact plan's error is its floor, with all three; sites and corrections that have nothing to do, or no law to rest on,
// are not there.
TEST(Extras, AreAttributed) {
    const Capture with = capture_of(with_all()), without = capture_of(plain());
    AttributionOptions options;
    options.corrections = standard_corrections(plan("fa2"));
    options.verify_truth = 50;
    const LayerAttribution a = attribute(with["l"], plan("fa2"), options);
    const LayerAttribution b = attribute(without["l"], plan("fa2"), options);
    EXPECT_EQ(a.verified->outside, 0u);
    EXPECT_GT(a.verified->checked, 100u);
    const auto has_site = [](const LayerAttribution& layer, Site site) {
        return std::any_of(layer.sites.begin(), layer.sites.end(), [&](const auto& s) { return s == site; });
    };
    const auto corrected = [](const LayerAttribution& layer, std::string_view name) {
        const auto& all = layer.outputs.front().corrections;
        return std::any_of(all.begin(), all.end(), [&](const auto& c) { return c.correction == name; });
    };
    for (const Site site : {Site::softcap, Site::ds_softcap, Site::sink_exp, Site::sink_p}) {
        EXPECT_TRUE(has_site(a, site)) << name(site);
        EXPECT_FALSE(has_site(b, site)) << name(site);
    }
    for (const char* correction : {"key_centering", "zero_sum_uniform"}) {
        EXPECT_FALSE(corrected(a, correction));
        EXPECT_TRUE(corrected(b, correction));
    }
    // delta of FlashAttention-2 is keep times that of the function; the rows' error is of the latter.
    for (const double error : a.rows.delta_error) EXPECT_LT(std::abs(error), 0.1);
    for (const OutputAttribution& output : a.outputs) {
        EXPECT_LT(output.floor.rel_error.to_double(), 1e-13) << name(output.output);
        EXPECT_GT(output.plan.rel_error.to_double(), 1e-4) << name(output.output);
        EXPECT_LT(output.plan.rel_error.to_double(), 0.02) << name(output.output);
    }
    options.corrections = {parse_correction("zero_sum_weighted")};
    EXPECT_THROW((void)attribute(with["l"], plan("fa2"), options), RequestError);
    EXPECT_THROW((void)attribute(with["l"], plan("fa1"), {}), RequestError);
}

// The gradient of the sinks' logits, by head: the truth against central differences of the loss sum(O o dO), the plan without
// rounding against the truth, a kernel's own in the file.
TEST(Extras, TheSinksGradientIsAttributed) {
    TensorSet set = with_all();
    set.add(make_tensor<float>("l.mine.dsink", {2}, std::vector<float>{0.25F, -0.5F}));
    const Capture capture = capture_of(set);
    const LayerAttribution a = attribute(capture["l"], plan("fa2"), {});
    ASSERT_TRUE(a.dsink);
    ASSERT_EQ(a.dsink->truth.size(), 2u);
    EXPECT_LT(a.dsink->rel_error(a.dsink->plan).to_double(), 0.1);
    EXPECT_GT(a.dsink->rel_error(a.dsink->plan).to_double(), 1e-6);
    const LayerAttribution exact = attribute(capture["l"], plan("exact"), {});
    EXPECT_LT(exact.dsink->rel_error(exact.dsink->plan).to_double(), 1e-12);
    ASSERT_EQ(a.dsink->observed.size(), 1u);
    EXPECT_EQ(a.dsink->observed[0].kernel, "mine");
    EXPECT_EQ(a.dsink->observed[0].values, (std::vector<double>{0.25, -0.5}));
    // sum(O o dO) of the layer with one logit moved; the third order's error is below (1e-3)^2 of it.
    const auto loss = [&](std::size_t head, double by) {
        LayerCapture moved = capture["l"];
        moved.sink[head] += by;
        double sum = 0;
        for (const attribution::Group& group : attribution::groups_of(moved, {}, 0)) {
            const GroupTruth truth = attention_truth(group.problem);
            for (std::size_t h = 0; h < group.query_heads(); ++h)
                for (std::ptrdiff_t i = 0; i < truth.heads[h].o.rows; ++i)
                    for (std::ptrdiff_t c = 0; c < truth.heads[h].o.cols; ++c)
                        sum += truth.heads[h].o(i, c) * group.inputs.dout[h](i, c);
        }
        return sum;
    };
    for (std::size_t head = 0; head < 2; ++head) {
        constexpr double h = 1e-3;
        const double slope = (loss(head, h) - loss(head, -h)) / (2 * h);
        EXPECT_NEAR(slope, a.dsink->truth[head].to_double(), 1e-5 * std::abs(slope) + 1e-9) << head;
    }
    Attribution all;
    all.plan = plan("fa2");
    all.layers.push_back(a);
    EXPECT_THAT(table(all), HasSubstr("dsink, the gradient of the sinks' logits, over all heads:\n    plan "));
    EXPECT_THAT(to_json(all), HasSubstr("\"dsink\": {"));
    TensorSet alone = plain();
    alone.add(make_tensor<float>("l.mine.dsink", {2}, std::vector<float>{0, 0}));
    EXPECT_THROW((void)capture_of(alone), RequestError);
}

// A cap of 1e-7, a thousandth of the smallest score here, makes dQ smaller than the absolute bound that a sink's truth has there: that is said, and not printed as exact.
TEST(Extras, ATruthThatIsNotResolvedIsFlagged) {
    CaptureOptions options;
    options.softcap = 1e-7;
    const Capture capture = capture_of(with_all(), options);
    Attribution all;
    all.plan = plan("fa2");
    all.layers.push_back(attribute(capture["l"], plan("fa2"), {}));
    for (const OutputAttribution& output : all.layers[0].outputs)
        if (output.output != Output::dk) {
            EXPECT_EQ(truth_is_resolved(output), output.output != Output::dq) << name(output.output);
        }
    EXPECT_THAT(table(all), HasSubstr("  dq: its truth is only known to be within "));
    EXPECT_THAT(to_json(all), HasSubstr("\"truth_resolved\": false"));
}

}  // namespace
}  // namespace faultline
