// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/report.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/record/record_reader.hpp>

#include "matrix_support.hpp"

namespace faultline {
namespace {

using test::Folder;
using test::run;
using test::small;
using ::testing::HasSubstr;

TEST(Report, SaysTheSameThreeTimes) {
    const Folder folder;
    const RunMatrix matrix = run(small(), folder / "m.runs");
    const nlohmann::json json = nlohmann::json::parse(to_json(matrix));
    EXPECT_EQ(json["schema"], "faultline.dissociation/1");
    EXPECT_EQ(json["runs"].size(), matrix.runs.size());
    EXPECT_EQ(json["table"].size(), 8U);
    EXPECT_EQ(json["runs"][2]["verdict"]["sigma_ratio"].get<double>(),
              matrix.runs[2].last_sigma_q() / matrix.runs[0].last_sigma_q());
    const std::string shown = table(matrix);
    for (const char* wanted :
         {"no fault", "delta:multiplicative:0.5   (50% of the rms, 50% asked", "project", "% of energy"})
        EXPECT_THAT(shown, HasSubstr(wanted));

    RecordFile file = RecordFile::create(folder / "m.h5", make_manifest("dissociation", "", "", 0));
    write(matrix, file, "m.runs");
    file.commit();
    const RecordReader reader(folder / "m.h5");
    const Tensor sigma = reader.read("outcome/sigma_q");
    EXPECT_EQ(sigma.shape, (std::vector<std::int64_t>{3, 3, 2}));
    EXPECT_EQ(sigma.to_double()[0], matrix.runs[0].last_sigma_q());  // none, none, seed 0
    EXPECT_EQ(sigma.to_double()[1], matrix.runs[8].last_sigma_q());  // none, none, seed 1
    EXPECT_TRUE(std::isnan(sigma.to_double()[4]));                   // no guard without a fault
    EXPECT_EQ(reader.read_strings("outcome/source")[1], "delta:multiplicative:0.5");
    EXPECT_EQ(reader.read("series/loss").shape, (std::vector<std::int64_t>{16, 6}));
    EXPECT_EQ(RecordReader(folder / ("m.runs/" + matrix.runs[3].file)).manifest().kind, "run");
}

}  // namespace
}  // namespace faultline
