// SPDX-License-Identifier: Apache-2.0
// What `attribute` leaves: the JSON object, the HDF5 file, the same for any number of threads and any form of the capture.
#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/plan/site.hpp>
#include <faultline/record/capture.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/npy.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// --- the object's form ----------------------------------------------------------------------------------------------

/// A number, or what a double cannot hold as text.
bool is_number(const json& value) {
    if (value.is_number()) return true;
    if (!value.is_string()) return false;
    const std::string text = value;
    if (text == "inf" || text == "-inf" || text == "nan") return true;
    char* end = nullptr;
    std::strtold(text.c_str(), &end);
    return end == text.c_str() + text.size() && text.find('e') != std::string::npos;
}

void expect_numbers(const json& object, const std::vector<std::string>& keys) {
    for (const std::string& key : keys)
        EXPECT_TRUE(object.contains(key) && is_number(object[key])) << key << " of " << object.dump().substr(0, 200);
}

/// A statistic that is undefined where nothing varies.
void expect_number_or_null(const json& object, const std::string& key) {
    EXPECT_TRUE(object.contains(key) && (object[key].is_null() || is_number(object[key]))) << key;
}

void expect_error(const json& object) {
    expect_numbers(object, {"rel_error", "error_norm", "signed_bias", "gain"});
    for (const char* key : {"t", "row_coherence", "head_coherence"}) expect_number_or_null(object, key);
}

std::vector<std::string> keys_of(const json& object) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object.items()) keys.push_back(key);
    return keys;
}

void expect_output(const json& output, bool is_dq) {
    expect_numbers(output, {"truth_norm", "truth_bound", "format_level", "floor", "unexplained"});
    expect_error(output["plan"]);
    EXPECT_EQ(output["plan"].contains("mean_key_share"), is_dq);
    for (const auto& [kernel, seen] : output["observed"].items()) {
        expect_error(seen);
        expect_numbers(seen, {"bit_equal_to_plan", "within_one_ulp_of_plan"});
    }
    EXPECT_FALSE(output["sites"].empty());
    for (const auto& [site, effect] : output["sites"].items()) {
        EXPECT_TRUE(find_site(site)) << site;
        expect_numbers(effect, {"share", "alone", "repaired", "signed_bias", "interaction"});
        for (const char* key : {"t", "row_coherence"}) expect_number_or_null(effect, key);
        expect_numbers(effect["local"], {"rms", "signed_bias"});
        expect_number_or_null(effect["local"], "t");
    }
    EXPECT_FALSE(output["corrections"].empty());
    for (const auto& [correction, corrected] : output["corrections"].items()) {
        expect_error(corrected);
        EXPECT_TRUE(corrected["changes_function"].is_boolean());
        EXPECT_TRUE(corrected["at_level"].is_boolean());
    }
    const json& best = output["best_correction"];
    EXPECT_TRUE(best.is_null() || output["corrections"].contains(best.get<std::string>()));
}

TEST(Json, HasTheFormOfItsSchema) {
    const Folder folder;
    const Outcome run = run_program({"attribute", small_capture(folder), "--json", "--quiet", "--verify-truth", "4"});
    ASSERT_EQ(run.status, 0) << run.err;
    const json object = json::parse(run.out);
    EXPECT_EQ(object["schema"], "faultline.attribution/1");
    EXPECT_EQ(object["plan"], "fa2");
    EXPECT_EQ(object["complete"], true);
    EXPECT_THAT(object["input"].get<std::string>(), HasSubstr("capture.safetensors"));
    ASSERT_EQ(object["layers"].size(), 2u);
    for (const json& layer : object["layers"]) {
        EXPECT_EQ(layer["heads"], 2);
        EXPECT_EQ(layer["kv_heads"], 1);
        EXPECT_EQ(layer["seq"], 24);
        EXPECT_EQ(layer["head_dim"], 16);
        EXPECT_EQ(keys_of(layer["outputs"]),
                  (std::vector<std::string>{"dk", "dq", "dv", "o"}));  // nlohmann::json sorts
        for (const auto& [name, output] : layer["outputs"].items()) expect_output(output, name == "dq");
        EXPECT_EQ(keys_of(layer["outputs"]["dq"]["observed"]), std::vector<std::string>{"toy"});
        EXPECT_TRUE(layer["outputs"]["dk"]["observed"].empty());
        expect_numbers(layer["rows"], {"saturated_fraction", "zero_sum_rms", "zero_sum_coherence",
                                       "repeated_max_fraction", "rounded_to_one_fraction"});
        // The truth is inside its own bounds.
        EXPECT_GT(layer["truth_verified"]["checked"], 0);
        EXPECT_EQ(layer["truth_verified"]["outside"], 0);
    }
}

TEST(Json, ContentsFollowTheOptions) {
    const Folder folder;
    const Outcome run =
        run_program({"attribute", small_capture(folder), "--json", "--quiet", "--layers", "layer1", "--outputs", "dv,o",
                     "--sites", "o_cast,dv_cast", "--correction", "two_sum", "--correction", "qk_norm"});
    ASSERT_EQ(run.status, 0) << run.err;
    const json object = json::parse(run.out);
    ASSERT_EQ(object["layers"].size(), 1u);
    const json& outputs = object["layers"][0]["outputs"];
    EXPECT_EQ(keys_of(outputs), (std::vector<std::string>{"dv", "o"}));
    EXPECT_EQ(keys_of(outputs["o"]["sites"]), (std::vector<std::string>{"dv_cast", "o_cast"}));
    EXPECT_EQ(keys_of(outputs["o"]["corrections"]), (std::vector<std::string>{"qk_norm", "two_sum"}));
    EXPECT_EQ(outputs["o"]["corrections"]["qk_norm"]["changes_function"], true);
    // The cast of dv does nothing to o: alone it leaves what binary64 leaves, repaired it leaves the plan's error.
    EXPECT_EQ(outputs["o"]["sites"]["dv_cast"]["repaired"], outputs["o"]["plan"]["rel_error"]);
    EXPECT_EQ(outputs["o"]["sites"]["dv_cast"]["alone_below_floor"], true);
    EXPECT_EQ(outputs["o"]["sites"]["dv_cast"]["share"], 0);
    EXPECT_TRUE(outputs["o"]["unexplained"].is_null()) << "the effects of two sites do not add up to anything";
}

// The exact plan is the mathematical function in binary64. With the error analysis of tests/kernels/cpu/binary64_bound.hpp,
// u = 2^-53, n = 24, d = 16, and operands of small_capture: |q|, |k| rows below 4 * 1.6 sqrt(d) (their squares' sum is 16
// chi-squared of 16, above 2.56 * 16 once in 2000), so that a logit's terms sum to at most 26^2 / 4 = 169, and its error e =
// u (d + 16) (169 + log n) = 2^12.4 u; one key tile: eps = 4 e = 2^14.4 u, eta = 4 eps = 2^16.4 u. Relative to an output's norm,
// the scale of its terms (D_i |k| of the largest row) is no more than 2^4 times as large, as elements of a row that sees
// few keys are no smaller than that. 2^20.4 u < 2^-32: a rounding to fp32 (2^-24) at any site would be seen.
TEST(Json, ExactPlanIsExact) {
    const Folder folder;
    const Outcome run = run_program(
        {"attribute", small_capture(folder), "--json", "--quiet", "--plan", "exact", "--correction", "none"});
    ASSERT_EQ(run.status, 0) << run.err;
    constexpr double binary64_bound = 0x1p-32;
    const json object = json::parse(run.out);
    for (const json& layer : object["layers"])
        for (const auto& [name, output] : layer["outputs"].items())
            EXPECT_LT(output["plan"]["rel_error"].get<double>(), binary64_bound) << name;
}

TEST(Json, ForwardAloneNeedsNoGradient) {
    const Folder folder;
    TensorSet set = read_safetensors(small_capture(folder));
    for (const char* name : {"layer0.do", "layer1.do", "layer0.toy.dq", "layer1.toy.dq"})
        set.tensors.erase(set.tensors.find(std::string_view(name)));
    write_safetensors(folder / "forward.safetensors", set);
    const std::vector<std::string> options{"--outputs", "o", "--json", "--quiet", "--correction", "none"};
    std::vector<std::string> with{"attribute", small_capture(folder)},
        without{"attribute", folder / "forward.safetensors"};
    with.insert(with.end(), options.begin(), options.end());
    without.insert(without.end(), options.begin(), options.end());
    const Outcome whole = run_program(with), forward = run_program(without);
    ASSERT_EQ(whole.status, 0) << whole.err;
    ASSERT_EQ(forward.status, 0) << forward.err;
    EXPECT_EQ(json::parse(whole.out)["layers"][0]["outputs"]["o"]["plan"],
              json::parse(forward.out)["layers"][0]["outputs"]["o"]["plan"]);
    // Without --outputs too, with a line that says so; where a gradient is asked for, it is missed.
    const std::string file = folder / "forward.safetensors";
    const Outcome asked_for_all = run_program({"attribute", file, "--json", "--correction", "none", "--plan", "fa2"});
    ASSERT_EQ(asked_for_all.status, 0) << asked_for_all.err;
    EXPECT_THAT(asked_for_all.err, ::testing::HasSubstr("\"layer0.do\": of layer0 the forward alone is attributed"));
    EXPECT_EQ(json::parse(asked_for_all.out)["layers"][0]["outputs"].size(), 1u);
    const Outcome gradient = run_program({"attribute", file, "--outputs", "dq"});
    EXPECT_EQ(gradient.status, 2);
    EXPECT_THAT(gradient.err, ::testing::HasSubstr("--outputs o,lse attributes the forward alone"));
}

// pytorch/pytorch#121558 through the program: with q = k = 133120 the fused exponent overflows and O is NaN. An output of
// NaN has no finite error, and the correction that removes it is the best one.
TEST(Json, NanIsNoSmallError) {
    const Folder folder;
    TensorSet set;
    const std::vector<float> large(64, 133120.0F);
    for (const char* name : {"layer0.q", "layer0.k", "layer0.v", "layer0.do"})
        set.add(make_tensor<float>(name, {1, 1, 1, 64}, large, Dtype::f32));
    write_safetensors(folder / "large.safetensors", set);
    const Outcome run = run_program({"attribute", folder / "large.safetensors", "--json", "--quiet", "--plan", "fa2",
                                     "--allow", "single-key", "--correction", "unfused"});
    ASSERT_EQ(run.status, 0) << run.err;
    const json o = json::parse(run.out)["layers"][0]["outputs"]["o"];
    EXPECT_EQ(o["plan"]["rel_error"], "inf");
    EXPECT_EQ(o["corrections"]["unfused"]["rel_error"], 0.0);
    EXPECT_EQ(o["best_correction"], "unfused");
}

// --- forms of a capture ---------------------------------------------------------------------------------------------

TEST(Captures, AreTheSameInEveryForm) {
    const Folder folder;
    TensorSet set = read_safetensors(small_capture(folder));
    std::filesystem::create_directory(folder / "npy");
    for (const auto& [name, tensor] : set.tensors) write_npy(folder / ("npy/" + name + ".npy"), tensor);
    write_hdf5_capture(folder / "capture.h5", set, make_manifest("capture", "", "", 0));
    const auto of = [&](const std::string& path) {
        const Outcome run =
            run_program({"attribute", path, "--json", "--quiet", "--correction", "none", "--sites", "delta"});
        EXPECT_EQ(run.status, 0) << run.err;
        json object = json::parse(run.out);
        object.erase("input");
        return object;
    };
    const json reference = of(folder / "capture.safetensors");
    EXPECT_EQ(of(folder / "npy"), reference);
    EXPECT_EQ(of(folder / "capture.h5"), reference);
}

// --- threads --------------------------------------------------------------------------------------------------------

/// Every dataset of the file as its bytes.
std::map<std::string, std::string> contents(const std::string& path) {
    const RecordReader file(path);
    std::map<std::string, std::string> all;
    for (const std::string& name : file.datasets()) {
        try {
            const Tensor tensor = file.read(name);
            all[name] = std::string(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
        } catch (const std::exception&) {
            for (const std::string& label : file.read_strings(name)) all[name] += label + "\n";
        }
    }
    return all;
}

TEST(Threads, OneTwoAndEightGiveTheSameBytes) {
    const Folder folder;
    const std::string file = small_capture(folder);
    std::vector<std::string> objects;
    std::vector<std::map<std::string, std::string>> records;
    for (const char* threads : {"1", "2", "8"}) {
        const std::string out = folder / (std::string(threads) + ".h5");
        const Outcome run =
            run_program({"attribute", file, "--json", "--quiet", "--threads", threads, "--seed", "3", "-o", out});
        ASSERT_EQ(run.status, 0) << run.err;
        objects.push_back(run.out);
        records.push_back(contents(out));
    }
    EXPECT_EQ(objects[1], objects[0]);
    EXPECT_EQ(objects[2], objects[0]);
    EXPECT_GT(records[0].size(), 200u);
    EXPECT_TRUE(records[1] == records[0]);
    EXPECT_TRUE(records[2] == records[0]);
}

// --- the file -------------------------------------------------------------------------------------------------------

TEST(File, HoldsWhatTheObjectSays) {
    const Folder folder;
    const Outcome run = run_program({"attribute", small_capture(folder), "--json", "--quiet", "-o", folder / "out.h5"});
    ASSERT_EQ(run.status, 0) << run.err;
    const json layer = json::parse(run.out)["layers"][1];
    const RecordReader file(folder / "out.h5");
    const std::vector<std::string> site_names = file.read_strings("layer1/counterfactual/site"),
                                   output_names = file.read_strings("layer1/counterfactual/output");
    const std::vector<double> alone = file.read("layer1/counterfactual/alone").to_double(),
                              share = file.read("layer1/counterfactual/share").to_double();
    for (std::size_t s = 0; s < site_names.size(); ++s)
        for (std::size_t o = 0; o < output_names.size(); ++o) {
            const json& effect = layer["outputs"][output_names[o]]["sites"][site_names[s]];
            EXPECT_EQ(effect["alone"].get<double>(), alone[s * output_names.size() + o]);
            EXPECT_EQ(effect["share"].get<double>(), share[s * output_names.size() + o]);
        }
    EXPECT_EQ(file.read("layer1/outputs/dq/truth_norm").to_double().at(0),
              layer["outputs"]["dq"]["truth_norm"].get<double>());
    // What marks an error in the table is in the file for every column and every correction.
    const json& dq = layer["outputs"]["dq"];
    EXPECT_EQ(file.read_strings("layer1/outputs/dq/type"), (std::vector<std::string>{"bf16", "exact", "bf16"}));
    EXPECT_EQ(file.read("layer1/outputs/dq/source_level").to_double().at(0), dq["format_level"].get<double>());
    const std::vector<double> at_level = file.read("layer1/corrections/at_level").to_double();
    const std::vector<std::string> corrections = file.read_strings("layer1/corrections/correction");
    const auto dq_at = std::find(output_names.begin(), output_names.end(), "dq") - output_names.begin();
    for (std::size_t c = 0; c < corrections.size(); ++c)
        EXPECT_EQ(at_level[c * output_names.size() + static_cast<std::size_t>(dq_at)] == 1,
                  dq["corrections"][corrections[c]]["at_level"].get<bool>())
            << corrections[c];
    const std::vector<Axis> axes = file.axes("layer1/tiles/p_cast/rms");
    ASSERT_EQ(axes.size(), 3u);
    EXPECT_EQ(axes[0].name, "head");
    EXPECT_EQ(axes[1].name, "q_tile");
    EXPECT_EQ(axes[2].name, "k_tile");
    for (const std::string& dataset : file.datasets()) {
        const std::string last = dataset.substr(dataset.rfind('/') + 1);
        const bool labels =
            last == "site" || last == "output" || last == "correction" || last == "source" || last == "type";
        EXPECT_EQ(file.attribute(dataset, "units").has_value(), !labels) << dataset;
        EXPECT_TRUE(file.attribute(dataset, "long_name")) << dataset;
    }
}

TEST(File, OpensInXarrayWithNamedDimensions) {
    const char* named = std::getenv("FAULTLINE_PYTHON");
    const std::string python = named != nullptr && *named != '\0' ? named : "python3";
    if (std::system(("'" + python + "' -c 'import h5py, xarray, h5netcdf' 2> /dev/null").c_str()) != 0)
        GTEST_SKIP() << python << " has not h5py, xarray and h5netcdf (tests/run makes one that has)";
    const Folder folder;
    ASSERT_EQ(run_program({"attribute", small_capture(folder), "--quiet", "-o", folder / "out.h5"}).status, 0);
    folder.write("check.py", R"(
import sys, h5py, xarray
path = sys.argv[1]
with h5py.File(path) as f:
    assert f.attrs["kind"] == "attribution" and f.attrs["complete"] == 1, dict(f.attrs)
    assert f["layer1/counterfactual/alone"].shape == (f["layer1/counterfactual/site"].shape[0], 4)
    assert f["layer1/rows/p_max"].shape == (2, 24)
tree = xarray.open_dataset(path, group="layer1/counterfactual", engine="h5netcdf")
assert tree["alone"].dims == ("site", "output"), tree["alone"].dims
assert list(tree["output"].values) == ["o", "dq", "dk", "dv"], tree["output"].values
assert float(tree["alone"].sel(site="dq_cast", output="dq")) > 0
rows = xarray.open_dataset(path, group="layer1/rows", engine="h5netcdf")
assert rows["p_max"].dims == ("head", "row") and float(rows["p_max"].max()) <= 1
tiles = xarray.open_dataset(path, group="layer1/tiles/p_cast", engine="h5netcdf")
assert tiles["rms"].dims == ("head", "q_tile", "k_tile") and tiles["rms"].attrs["long_name"]
errors = xarray.open_dataset(path, group="layer1/outputs/dq", engine="h5netcdf")
assert list(errors["source"].values) == ["plan", "floor", "toy"] and errors["rel_error"].dims == ("source",)
)");
    EXPECT_EQ(std::system(("'" + python + "' '" + (folder / "check.py") + "' '" + (folder / "out.h5") + "'").c_str()),
              0);
}

// --- the table ------------------------------------------------------------------------------------------------------

TEST(Table, KeepsWithinALine) {
    const Folder folder;
    for (const char* plan : {"fa2", "fa3", "exact", "standard-bf16"}) {
        const Outcome run = run_program({"attribute", small_capture(folder), "--quiet", "--full", "--plan", plan});
        EXPECT_EQ(run.status, 0) << run.err;
        for (const std::string& line : lines(run.out)) {
            if (line.find(folder / "") == std::string::npos) {
                EXPECT_LE(line.size(), 110u) << line;
            }
        }
    }
}

}  // namespace
}  // namespace faultline::test
