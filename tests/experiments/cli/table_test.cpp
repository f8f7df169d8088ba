// SPDX-License-Identifier: Apache-2.0
// What the table says where numbers are undefined, enormous, or of some heads only; the same in JSON and in the file.
#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// One layer of four query heads on two key heads, its inputs times `size`.
std::string grouped_capture(const Folder& folder, double size = 1) {
    TensorSet set;
    add_layer(set, "layer0", {.heads = 4, .kv_heads = 2}, size);
    write_safetensors(folder / "grouped.safetensors", set);
    return folder / "grouped.safetensors";
}

TEST(Heads, AreNamedWhereOnlySomeAreIncluded) {
    const Folder folder;
    const std::string file = grouped_capture(folder);
    const std::vector<std::string> call{"attribute", file, "--heads", "3", "--correction", "none", "--sites", "p_cast"};
    const auto with = [&](const std::vector<std::string>& more) {
        std::vector<std::string> all = call;
        all.insert(all.end(), more.begin(), more.end());
        const Outcome run = run_program(all);
        EXPECT_EQ(run.status, 0) << run.err;
        return run.out;
    };
    EXPECT_THAT(with({"-o", folder / "out.h5"}),
                HasSubstr("heads 2, 3 of 4 on 2 of keys (those that share keys go together)"));
    EXPECT_EQ(json::parse(with({"--json"}))["layers"][0]["head_indices"], json::parse("[2, 3]"));
    const RecordReader record(folder / "out.h5");
    for (const char* path : {"layer0/head", "layer0/rows/head"})
        EXPECT_EQ(record.read(path).to_double(), (std::vector<double>{2, 3})) << path;
    EXPECT_EQ(record.axes("layer0/rows/p_max")[0].name, "head");
    EXPECT_EQ(record.axes("layer0/tiles/p_cast/rms")[0].name, "head");
    EXPECT_FALSE(record.contains("layer0/tiles/p_cast/head"));  // it is the layer's
}

// Inputs of 2^60: the products overflow float, and what is made of infinity less infinity is no number.
TEST(Undefined, IsSaidAndIsNullInJson) {
    const Folder folder;
    const std::string file = grouped_capture(folder, 0x1p60);
    const std::vector<std::string> call{"attribute", file, "--correction", "none", "--sites", "p_cast", "--quiet"};
    const std::string text = run_program(call).out;
    EXPECT_THAT(text, HasSubstr("sum of ds undefined: the plan's score gradient is not finite"));
    EXPECT_THAT(text, ::testing::Not(HasSubstr("nan")));
    EXPECT_THAT(text, HasSubstr("o: fa2 is not finite in "));
    EXPECT_THAT(text, ::testing::Not(HasSubstr("inf wrong")));
    std::vector<std::string> as_json = call;
    as_json.push_back("--json");
    EXPECT_TRUE(json::parse(run_program(as_json).out)["layers"][0]["rows"]["zero_sum_rms"].is_null());
}

// Logits 0 and 20000: the true dq is about e^-20000, so errors relative to it have exponents of four digits.
TEST(Table, ColumnsStayApartWhateverTheNumbers) {
    const Folder folder;
    TensorSet set;
    const auto add = [&](const std::string& name, float first, float second) {
        std::vector<float> values;
        for (int i = 0; i < 32; ++i) values.push_back((i < 16 ? first : second) * (1 + static_cast<float>(i % 5)));
        set.add(make_tensor<float>("layer0." + name, {1, 1, 2, 16}, values));
    };
    add("q", 30, 30), add("k", 0, 30), add("v", 0.375f, 0.328125f), add("do", 0.8125f, 0.71875f);
    const std::string file = folder / "saturated.safetensors";
    write_safetensors(file, set);
    const Outcome run = run_program({"attribute", file, "--correction", "none", "--full", "--quiet"});
    std::size_t long_numbers = 0;
    for (const std::string& line : lines(run.out)) {
        const bool is_row = line.starts_with("    ") && line.size() > 60 && line[4] != ' ';
        if (!is_row) continue;
        for (std::size_t at = line.find("e+"); at != std::string::npos; at = line.find("e+", at + 1)) {
            const std::size_t end = std::min(line.find(' ', at), line.size()), begin = line.rfind(' ', at);
            long_numbers += end - at > 5;
            EXPECT_EQ(line[begin - 1], ' ') << line;
            // Between two blanks stands one number and not two.
            EXPECT_EQ(std::count(line.begin() + static_cast<std::ptrdiff_t>(begin),
                                 line.begin() + static_cast<std::ptrdiff_t>(end), '.'),
                      1)
                << line;
        }
    }
    EXPECT_GT(long_numbers, 0u) << run.out << run.err;
}

}  // namespace
}  // namespace faultline::test
