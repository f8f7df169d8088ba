// SPDX-License-Identifier: Apache-2.0
// Names, and requests that make no sense.
#include <cmath>
#include <sstream>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

TEST(AccumulationNames, EveryNameFindsItsValueAndIsUnique) {
    std::vector<std::string_view> seen;
    for (const NamedAccumulation& entry : accumulations()) {
        EXPECT_EQ(find_accumulation(entry.name), entry.accumulation) << entry.name;
        EXPECT_THAT(seen, ::testing::Not(::testing::Contains(entry.name)));
        EXPECT_FALSE(entry.description.empty());
        EXPECT_FALSE(entry.source.empty());
        EXPECT_NO_THROW(validate(entry.accumulation)) << entry.name;
        seen.push_back(entry.name);
    }
    EXPECT_EQ(find_accumulation("hopper-mma-int8"), std::nullopt);
}

TEST(AccumulationNames, ANameStandsForItsValue) {
    for (const NamedAccumulation& entry : accumulations())
        EXPECT_EQ(find_accumulation(name(entry.accumulation)), entry.accumulation) << entry.name;
    Accumulation own{Accumulation::Kind::fused, {.terms = 4, .fraction_bits = 11}};
    std::ostringstream out;
    out << own;
    EXPECT_EQ(out.str(),
              "fused(terms=4, fraction_bits=11, output=f32_rz, a_min=-126, b_min=-126, input_bits=0, "
              "zero=ignored)");
}

// The table of FACTS section 11 (arXiv:2511.10909): fraction bits by architecture.
TEST(AccumulationNames, FractionBitsByArchitecture) {
    const auto bits = [](const char* wanted) { return find_accumulation(wanted).value().unit.fraction_bits; };
    EXPECT_EQ(bits("volta-mma-fp16"), 23);
    EXPECT_EQ(bits("turing-mma-fp16"), 24);
    EXPECT_EQ(bits("ampere-mma-bf16"), 24);
    EXPECT_EQ(bits("ada-mma-tf32"), 24);
    EXPECT_EQ(bits("ada-mma-e4m3"), 13);
    EXPECT_EQ(bits("hopper-mma-bf16"), 25);
    EXPECT_EQ(bits("hopper-wgmma-e5m2"), 13);
    EXPECT_EQ(bits("blackwell-tcgen05-e4m3"), 25);
}

std::string complaint(const Accumulation& accumulation, MatrixView<const double> a, MatrixView<const double> b,
                      MatrixView<double> c) {
    try {
        multiply_accumulate(accumulation, a, b, c);
    } catch (const RequestError& error) {
        return error.what();
    }
    return "no complaint";
}

TEST(AccumulationErrors, OneSentenceNamesTheFieldAndWhatWasExpected) {
    double one[6] = {1, 1, 1, 1, 1, 1}, sum[6] = {};
    Accumulation unit = *find_accumulation("hopper-mma-bf16");
    unit.unit.terms = 0;
    EXPECT_EQ(complaint(unit, {one, 1, 1}, {one, 1, 1}, {sum, 1, 1}),
              "matrix unit: terms is 0: expected 1 to 1024 products per fused add");
    unit = *find_accumulation("hopper-mma-bf16");
    unit.unit.fraction_bits = 41;
    EXPECT_THAT(complaint(unit, {one, 1, 1}, {one, 1, 1}, {sum, 1, 1}), HasSubstr("fraction_bits is 41"));
    EXPECT_EQ(
        complaint({}, {one, 2, 3}, {one, 2, 3}, {sum, 2, 3}),
        "multiply_accumulate: A [2, 3] times B [2, 3] does not give C [2, 3]: expected [m, k], [k, n] and [m, n]");
}

TEST(AccumulationErrors, EmptyShapesChangeNothing) {
    double x[4] = {1, 2, 3, 4}, c[4] = {-0.0, 1.25, 3, 4};
    for (const NamedAccumulation& entry : accumulations()) {
        multiply_accumulate(entry.accumulation, {x, 2, 0}, {x, 0, 2}, {c, 2, 2});
        EXPECT_TRUE(std::signbit(c[0]));
        EXPECT_EQ(c[1], 1.25);
        multiply_accumulate(entry.accumulation, {x, 0, 2}, {x, 2, 2}, {c, 0, 2});
        multiply_accumulate(entry.accumulation, {x, 2, 2}, {x, 2, 0}, {c, 2, 0});
    }
}

}  // namespace
}  // namespace faultline
