// SPDX-License-Identifier: Apache-2.0
// attribute --inject: a fault planted in a kernel is found by attribution, at its site and with its sign.
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "paths.hpp"
#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json attributed(const std::string& file, const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"attribute",    file,   "--layers", "layer0",
                                       "--correction", "none", "--json",   "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome run = run_program(arguments);
    EXPECT_EQ(run.status, 0) << run.err;
    return json::parse(run.out);
}

struct Planted {
    const char* fault;
    const char* output;
};

// Each fault is some ten times the roundings of fa2, so its site must have nearly all of the error.
class Injected : public ::testing::TestWithParam<Planted> {};

TEST_P(Injected, IsFoundAtItsSite) {
    const Folder folder;
    const std::string file = small_capture(folder), fault = GetParam().fault;
    const json result = attributed(file, {"--inject", fault, "--plan", "fa2"});
    EXPECT_EQ(result["faults"][0], fault);
    const json& layer = result["layers"][0];
    EXPECT_GT(layer["faults"][0]["rms"], 0.0);
    const std::string wanted = fault.substr(0, fault.find(':'));
    const json& sites = layer["outputs"][GetParam().output]["sites"];
    std::string largest;
    for (const auto& [site, effect] : sites.items())
        if (largest.empty() || effect["share"] > sites[largest]["share"]) largest = site;
    EXPECT_EQ(largest, wanted);
    // What its repair leaves are fa2's own roundings: a tenth of the error or less.
    EXPECT_GT(sites[wanted]["share"], 0.9);
    EXPECT_LT(sites[wanted]["repaired"], 0.1 * sites[wanted]["alone"].get<double>());
}

INSTANTIATE_TEST_SUITE_P(Sites, Injected,
                         ::testing::Values(Planted{"row_sum:multiplicative:0.05", "o"},
                                           Planted{"p_cast:operand:0.1", "o"}, Planted{"pv_accumulate:fixed:0.1", "o"},
                                           Planted{"o_cast:operand:0.3", "dq"}, Planted{"lse:fixed:0.1", "dv"},
                                           Planted{"delta:multiplicative:0.3", "dq"},
                                           Planted{"dp_accumulate:fixed:0.2", "dq"}, Planted{"ds:random:0.2", "dk"},
                                           Planted{"ds_cast:fixed:0.2", "dq"}, Planted{"dv_cast:per_column:0.1", "dv"},
                                           Planted{"dk_accumulate:flip@2:0.1", "dk"}));

// A site that the plan leaves exact is attributed all the same when a fault stands there.
TEST(Inject, AnExactSiteCanBeAtFault) {
    const Folder folder;
    const json result = attributed(small_capture(folder), {"--inject", "delta:multiplicative:0.1", "--plan", "exact"});
    const json& dq = result["layers"][0]["outputs"]["dq"];
    EXPECT_NEAR(dq["sites"]["delta"]["share"].get<double>(), 1.0, 1e-9);
    EXPECT_LT(dq["sites"]["delta"]["repaired"], 1e-12);
    EXPECT_GT(dq["sites"]["delta"]["mean_key_share"], 0.0);
    EXPECT_NEAR(result["layers"][0]["faults"][0]["relative_rms"].get<double>(), 0.1, 1e-15);
}

/// Words one blank apart, whatever the lines.
std::string flat(const std::string& text) {
    std::string line;
    for (const char c : text)
        if (c != ' ' && c != '\n')
            line += c;
        else if (!line.ends_with(' '))
            line += ' ';
    return line;
}

/// The first 128 queries and keys of the collapsed head: under the causal mask they are a problem of their own, as collapsed as
/// the whole and a sixteenth of its work.
std::string first_rows(const Folder& folder) {
    constexpr std::int64_t rows = 128;
    TensorSet set = read_safetensors((source_dir() / "tests/data/collapsed-layer.safetensors").string());
    for (auto& [name, tensor] : set.tensors) {  // [1, 1, rows, columns], lse [1, 1, rows]
        const std::size_t row_bytes = tensor.bytes.size() / static_cast<std::size_t>(tensor.shape.at(2));
        tensor.shape[2] = rows;
        tensor.bytes.resize(rows * row_bytes);
    }
    std::string path = folder / "first-rows.safetensors";
    write_safetensors(path, set);
    return path;
}

// In a collapsed head a fault of the exponent makes every probability of the backward nearly 0, so that dq is 100% wrong where
// the roundings of O alone make it 160%: repairing the fault makes the error larger, repairing O's cast does nothing. The fault
// has the output, so it is the one to name.
TEST(Inject, AFaultThatHidesTheRoundingsIsNamed) {
    const Folder folder;
    const std::string file = first_rows(folder);
    for (const auto& [plan, fault, site] :
         {std::tuple{"fa2", "lse:fixed:0.03", "lse"},
          std::tuple{"fa2-unfused-splitkv", "lse_scale:multiplicative:0.01", "lse_scale"}}) {
        const std::vector<std::string> request{"attribute",
                                               file,
                                               "--plan",
                                               plan,
                                               "--outputs",
                                               "dq",
                                               "--correction",
                                               "none",
                                               "--quiet",
                                               "--inject",
                                               fault,
                                               "--sites",
                                               std::string("o_cast,p_cast,") + site};
        const Outcome run = run_program(request);
        ASSERT_EQ(run.status, 0) << run.err;
        EXPECT_THAT(flat(run.out),
                    HasSubstr(fmt::format(", of the 3 sites tried by {} (its repair moves it by ", site)))
            << run.out;
        const std::vector<std::string> all = lines(run.out);
        const auto head =
            std::find_if(all.begin(), all.end(), [](const std::string& l) { return l.starts_with("    site "); });
        ASSERT_LT(head + 1, all.end());
        EXPECT_TRUE((head + 1)->starts_with(fmt::format("    {} ", site))) << *(head + 1);
    }
}

// A fault that is small beside the plan's own roundings is not the culprit: it is said what it does.
TEST(Inject, ASmallFaultIsSaidBesideTheCulprits) {
    const Folder folder;
    const Outcome run =
        run_program({"attribute", first_rows(folder), "--plan", "fa2", "--outputs", "dq", "--correction", "none",
                     "--quiet", "--inject", "dq_cast:operand:1ulp", "--sites", "o_cast,dq_cast"});
    ASSERT_EQ(run.status, 0) << run.err;
    EXPECT_THAT(flat(run.out), HasSubstr(", of the 2 sites tried by o_cast ("));
    EXPECT_THAT(flat(run.out), HasSubstr("planted at dq_cast: its repair"));
}

TEST(Inject, NothingIsNothing) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const json with = attributed(file, {"--inject", "delta:fixed:0"}), without = attributed(file, {});
    EXPECT_EQ(with["layers"][0]["outputs"], without["layers"][0]["outputs"]);
    EXPECT_EQ(with["layers"][0]["rows"], without["layers"][0]["rows"]);
}

TEST(Inject, DoesNotDependOnThreads) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const std::vector<std::string> fault{"--inject", "ds_cast:random:0.1"};
    auto one = fault, three = fault;
    one.insert(one.end(), {"--threads", "1"});
    three.insert(three.end(), {"--threads", "3"});
    EXPECT_EQ(attributed(file, one), attributed(file, three));
}

TEST(Inject, IsOnRecord) {
    const Folder folder;
    (void)attributed(small_capture(folder), {"--inject", "delta:multiplicative:0.1", "-o", folder / "out.h5"});
    const RecordReader reader(folder / "out.h5");
    EXPECT_EQ(reader.read("layer0/faults/rms").shape, (std::vector<std::int64_t>{1}));
    EXPECT_THAT(reader.manifest().config_toml, HasSubstr("delta:multiplicative:0.1"));
}

TEST(Inject, RefusesWhatCannotStandThere) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const auto said = [&](const std::string& fault, const std::string& plan) {
        const Outcome run = run_program({"attribute", file, "--inject", fault, "--plan", plan});
        EXPECT_EQ(run.status, 2);
        EXPECT_EQ(lines(run.err).size(), 1U);
        return run.err;
    };
    EXPECT_THAT(said("detla:fixed:0.1", "fa2"), HasSubstr("--inject: fault \"detla:fixed:0.1\": site \"detla\""));
    EXPECT_THAT(said("ffn_output:fixed:0.1", "fa2"), HasSubstr("expected a kernel site"));
    EXPECT_THAT(said("o_cast:fixed:1ulp", "exact"), HasSubstr("there is no ulp"));
    EXPECT_THAT(said("o_cast:fixed:0.1:layers=1", "fa2"), HasSubstr("--layers"));
    for (const char* site : {"merge", "partial_o_cast", "sink_exp", "p_normalize", "softcap"})
        EXPECT_THAT(said(std::string(site) + ":multiplicative:0.1", "fa2"),
                    HasSubstr(std::string(site) + " has nothing to do in layer0 under plan \"fa2\""));
    EXPECT_THAT(said("rescale_factor:fixed:0.1", "math"), HasSubstr("rescale_factor has nothing to do in layer0"));
}

// The same in a training run, of every site and whatever runs it: a site either is passed, and the fault is in the record, or the
// fault is refused and nothing is made.
TEST(Inject, TrainRefusesASiteThatItNeverPasses) {
    const Folder folder;
    folder.write("text", text_of_squares(200));
    const Outcome listed = run_program({"sites", "--json"});
    std::vector<std::string> sites;
    const json all = json::parse(listed.out);
    for (const json& site : all["sites"]) sites.push_back(site["name"]);
    ASSERT_GT(sites.size(), 40U);
    std::map<std::string, std::set<std::string>> refusals;
    for (const char* attention : {"fast", "fa2-unfused-splitkv"})
        for (const std::string& site : sites) {
            const std::vector<std::string> request{"train",
                                                   "--data",
                                                   folder / "text",
                                                   "--steps",
                                                   "1",
                                                   "--layers",
                                                   "1",
                                                   "--width",
                                                   "16",
                                                   "--heads",
                                                   "1",
                                                   "--context",
                                                   "16",
                                                   "--batch",
                                                   "1",
                                                   "--validate-every",
                                                   "0",
                                                   "--monitor-every",
                                                   "0",
                                                   "--attention",
                                                   attention,
                                                   "--inject",
                                                   site + ":multiplicative:0.1",
                                                   "--quiet",
                                                   "-o",
                                                   folder / "x.h5",
                                                   "--force"};
            const Outcome run = run_program(request);
            if (run.status == 2) {
                EXPECT_EQ(lines(run.err).size(), 1U) << run.err;
                EXPECT_EQ(folder.files(), std::vector<std::string>{"text"}) << site;
                if (site != "scale") {
                    EXPECT_THAT(run.err, HasSubstr(site + " has nothing to do in a context of 16"));
                }
                refusals[attention].insert(site);
                continue;
            }
            ASSERT_EQ(run.status, 0) << site << run.err;
            {
                const RecordReader reader(folder / "x.h5");
                EXPECT_GT(reader.read("steps/injected_rms").to_double().at(0), 0.05) << attention << ' ' << site;
            }
            for (const std::string& file : folder.files())
                if (file != "text") std::filesystem::remove(folder / file);
        }
    // What is passed by neither: what the model has not, and a second tile of keys.
    const std::set<std::string> never{"dp_dropout",       "dsink",          "kv_group_reduce", "o_rescale", "p_dropout",
                                      "rescale_argument", "rescale_factor", "sink_exp",        "sink_p",    "sink_sum",
                                      "softcap",          "ds_softcap",     "bwd_softcap"};
    for (const auto& [attention, refused_sites] : refusals)
        for (const std::string& site : never) EXPECT_TRUE(refused_sites.contains(site)) << attention << ' ' << site;
    EXPECT_TRUE(refusals["fast"].contains("merge"));
    EXPECT_FALSE(refusals["fa2-unfused-splitkv"].contains("merge"));
    const auto refused_by = [&](const std::string& command, std::vector<std::string> options) {
        options.insert(options.end(), {"--data", folder / "text", "--layers", "1", "--width", "16", "--heads", "1",
                                       "--context", "16", "--batch", "1", "--steps", "2", "--quiet"});
        return refused(command, options, &folder);
    };
    EXPECT_THAT(refused_by("dissociate", {"--source", "merge:fixed:0.1"}), HasSubstr("merge has nothing to do"));
    folder.write("sweep.toml", "[matrix]\nsource = [\"merge:fixed:0.1\"]\n[train]\ndata = \"text\"\nsteps = 2\n");
    EXPECT_THAT(refused("sweep", {folder / "sweep.toml", "-o", folder / "s"}, &folder),
                HasSubstr("merge has nothing to do"));
}

}  // namespace
}  // namespace faultline::test
