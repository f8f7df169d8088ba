// SPDX-License-Identifier: Apache-2.0
// Wrong plans, settings, options and commands to the real program: exit status 2, one sentence on standard error that names
// what was wrong, where it came from and what was expected, and no file left under or beside the name of the output.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include <faultline/tensor/safetensors.hpp>

#include "bad_input.hpp"
#include "paths.hpp"

namespace faultline::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(BadRequest, NamesThePlan) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, file, {"--plan", "fa22"}),
                ::testing::AllOf(HasSubstr("--plan"), HasSubstr("\"fa22\""), HasSubstr("did you mean \"fa2\"?")));
    folder.write("mine.toml", "name = \"mine\"\n[sites.p_cast]\nformat = 7\n");
    EXPECT_THAT(refusal(folder, file, {"--plan", folder / "mine.toml"}),
                ::testing::AllOf(HasSubstr("mine.toml"), HasSubstr("p_cast"), HasSubstr("expected")));
    folder.write("mine.toml", "name = \"mine\"\n[sites.p_kast]\nformat = \"bf16\"\n");
    EXPECT_THAT(refusal(folder, file, {"--plan", folder / "mine.toml"}),
                ::testing::AllOf(HasSubstr("mine.toml"), HasSubstr("p_kast"), HasSubstr("p_cast")));
    EXPECT_THAT(refusal(folder, file, {"--plan", folder / "absent.toml"}), HasSubstr("absent.toml"));
}

TEST(BadRequest, NamesTheSettingAndWhereItCameFrom) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, file, {"--sites", "dqcast"}),
                ::testing::AllOf(HasSubstr("--sites: \"dqcast\""), HasSubstr("did you mean \"dq_cast\"?")));
    EXPECT_THAT(refusal(folder, file, {"--outputs", "dz"}),
                HasSubstr("--outputs: \"dz\": expected one of o, dq, dk, dv"));
    EXPECT_THAT(refusal(folder, file, {"--correction", "zero_sum_unifrm"}),
                ::testing::AllOf(HasSubstr("--correction"), HasSubstr("zero_sum_uniform")));
    EXPECT_THAT(refusal(folder, file, {"--correction", "fp32_backward:layer9"}),
                ::testing::AllOf(HasSubstr("\"layer9\""), HasSubstr("layer0, layer1")));
    EXPECT_THAT(refusal(folder, file, {"--report", folder / "r.txt"}), HasSubstr("expected a name for an HTML page"));
    // A value that was forgotten is not the next option.
    EXPECT_THAT(refusal(folder, file, {"--report", "--quiet"}),
                HasSubstr("--report: \"--quiet\": begins with \"--\" as an option: expected a value (\"./--quiet\""));
    EXPECT_THAT(refusal(folder, file, {"-o", "--json"}), HasSubstr("--output: \"--json\": begins with"));
    EXPECT_THAT(refusal(folder, file, {"--allow", "nan"}),
                HasSubstr("--allow: \"nan\": expected one of single-key, masked-rows, mask-min"));
    EXPECT_THAT(refusal(folder, file, {"--threads", "two"}),
                HasSubstr("--threads: \"two\": expected an integer from 0 to 4096"));
    EXPECT_THAT(refusal(folder, file, {"--threads", "4294967297"}), HasSubstr("expected an integer from 0 to 4096"));
    EXPECT_THAT(refusal(folder, file, {"--seed", "9223372036854775808"}),
                HasSubstr("--seed: \"9223372036854775808\": expected an integer of 0 or more, below 2^63"));
    EXPECT_THAT(refusal(folder, file, {"--heads", "4294967297"}),
                HasSubstr("--heads: \"4294967297\": expected a list of integers from 0 to 2147483647"));
    EXPECT_THAT(refusal(folder, file, {"--heads", "7"}),
                HasSubstr("--heads: 7: expected 0 to 1, the heads of layer0 in "));
    EXPECT_THAT(refusal(folder, file, {"--plan", ""}), HasSubstr("--plan: \"\": expected a string that is not empty"));
    EXPECT_THAT(refusal(folder, file, {"--config", ""}), HasSubstr("--config: \"\": expected the name of a TOML file"));
    EXPECT_THAT(refusal(folder, file, {"--config", "a.toml", "--config", "b.toml"}),
                HasSubstr("--config: is given 2 times: expected one file"));
    EXPECT_THAT(refusal(folder, file, {"--correction", "none", "--correction", "all"}),
                HasSubstr("--correction: \"none\": expected no other correction beside it"));
    EXPECT_THAT(refusal(folder, file, {"--inject", ""}),
                HasSubstr("--inject: \"\": expected SITE:LAW:MAGNITUDE, not empty"));
    EXPECT_THAT(refusal(folder, file, {"--scale"}), HasSubstr("--scale: has no value: expected X"));
    EXPECT_EQ(run_program({"attribute", file, "-o", ""}).status, 2);
    EXPECT_THAT(refusal(folder, file, {"--threads", "-1"}), HasSubstr("--threads"));
    EXPECT_THAT(refusal(folder, file, {"--scale", "0"}), HasSubstr("--scale: \"0\": expected a positive number"));
    const Outcome no_device = run_program({"attribute", file, "--device", "cuda"});  // no card where the tests run
    EXPECT_EQ(no_device.status, 1);
    EXPECT_THAT(no_device.err, HasSubstr("faultline attribute: device cuda: "));
    EXPECT_THAT(no_device.err, HasSubstr(": expected "));
    const Outcome only_cpu = run_program({"generate", "--device", "cuda"});
    EXPECT_EQ(only_cpu.status, 2);
    EXPECT_THAT(only_cpu.err, HasSubstr("--device: generate runs on the CPU alone: expected cpu"));
    EXPECT_THAT(refusal(folder, file, {"--device", "tpu"}), HasSubstr("--device: \"tpu\": expected one of cpu, cuda"));
    EXPECT_THAT(refusal(folder, file, {"--plna", "fa2"}),
                HasSubstr("\"--plna\": unknown option: expected one that --help lists (did you mean \"--plan\"?)"));
    EXPECT_THAT(refusal(folder, file, {"--set", "plna=fa2"}),
                ::testing::AllOf(HasSubstr("--set: \"plna\": unknown key"), HasSubstr("plan")));
    EXPECT_THAT(refusal(folder, file, {"--set", "threads=many"}),
                HasSubstr("--set threads: \"many\": expected an integer"));
    EXPECT_THAT(refusal(folder, file, {"--set", "threads"}), HasSubstr("expected KEY=VALUE"));
    EXPECT_THAT(refusal(folder, file, {"other.safetensors"}),
                HasSubstr("\"other.safetensors\": one argument too many"));
}

// Neither one of two contraries nor one of two that are the same is what was meant for certain.
TEST(BadRequest, WhatIsGivenTwice) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, file, {"--causal", "--no-causal"}),
                HasSubstr("--causal and --no-causal: are both given: expected one of them"));
    EXPECT_THAT(refusal(folder, file, {"--outputs", "o,o"}),
                HasSubstr("--outputs: \"o\": is there twice: expected it once"));
    EXPECT_THAT(refusal(folder, file, {"--sites", "p_cast", "--sites", "o_cast,p_cast"}),
                HasSubstr("--sites: \"p_cast\": is there twice"));
    EXPECT_THAT(refusal(folder, file, {"--heads", "1,0,01"}), HasSubstr("--heads: 1: is there twice"));
    EXPECT_THAT(refusal(folder, file, {"--correction", "all", "--correction", "all"}),
                HasSubstr("\"all\": is there twice"));
    EXPECT_THAT(refusal(folder, file, {"--set", "outputs=[\"o\", \"o\"]"}),
                HasSubstr("--set outputs: \"o\": is there twice"));
    folder.write("run.toml", "[attribute]\nheads = [0, 0]\n");
    EXPECT_THAT(refusal(folder, file, {"--config", folder / "run.toml"}),
                HasSubstr("run.toml: attribute.heads: 0: is there twice"));
    // A flag says the same twice, two faults that are alike are two, and of a value that is given again the last counts.
    const Outcome same = run_program({"attribute", file, "--outputs", "o", "--correction", "none", "--causal",
                                      "--causal", "--quiet", "--quiet", "--inject", "o_cast:fixed:0.5", "--inject",
                                      "o_cast:fixed:0.5", "--scale", "3", "--scale", "0.25"});
    EXPECT_EQ(same.status, 0) << same.err;
}

TEST(BadRequest, WhatMeansNothing) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, file, {"--correction", "none", "--seed", "4"}),
                HasSubstr("--seed: means nothing where nothing is rounded stochastically and --verify-truth samples"));
    const std::string target = "layer0.o.rel_error < 1e-3";
    EXPECT_THAT(refused("bisect", {file, "--until", target, "--plan", "fa2", "--seed", "5"}),
                HasSubstr("--seed: means nothing where the plan rounds nothing stochastically"));
    // These have something to draw.
    folder.write("drawn.toml", "base = \"fa2\"\n[sites.o_cast]\nformat = \"bf16\"\nrounding = \"stochastic\"\n");
    EXPECT_THAT(refused("bisect", {file, "--until", target, "--plan", folder / "drawn.toml", "--seed", "5", "-o",
                                   folder / "no/x.h5"}),
                testing::Not(HasSubstr("--seed")));
    const Outcome drawn =
        run_program({"attribute", file, "--plan", "fa2", "--outputs", "o", "--sites", "o_cast", "--seed", "4",
                     "--correction", "stochastic_rounding:o_cast", "--layers", "layer0"});
    EXPECT_EQ(drawn.status, 0) << drawn.err;
    EXPECT_THAT(refused("plans", {"--force"}), HasSubstr("--force: means nothing without a file to write"));
    EXPECT_THAT(refused("check", {file, "--force"}), HasSubstr("--force: means nothing without a file to write"));
    EXPECT_THAT(refused("generate", {"--list", "--force"}), HasSubstr("--force: means nothing"));
    EXPECT_THAT(refused("generate", {"--list", "-o", folder / "q.safetensors"}, &folder),
                HasSubstr("with --list expected a name that ends in .h5"));
    EXPECT_THAT(refused("generate", {"--maximize", "o_cast", "--dtype", "float16"}),
                HasSubstr("--dtype: means nothing without -o"));
    for (const auto& [option, value, probe] : {std::tuple("--terms", "8", "similarity"),
                                               {"--directions", "2", "similarity, directions"},
                                               {"--row", "1", "output-error"},
                                               {"--tolerance", "0.1", "saturation"},
                                               {"--window", "3", "coherence"}})
        EXPECT_THAT(
            refused("probe", {file, "--probe", "conservation,invariance", option, value}),
            HasSubstr(std::string(option) +
                      ": means nothing with --probe conservation,invariance: expected it with the probe " + probe));
    const Outcome read = run_program({"probe", file, "--probe", "conservation,saturation", "--tolerance", "0.1"});
    EXPECT_EQ(read.status, 0) << read.err;
    // A file of settings may be meant for other calls too.
    folder.write("run.toml", "[plans]\nforce = true\n");
    EXPECT_EQ(run_program({"plans", "--config", folder / "run.toml"}).status, 0);
}

TEST(BadRequest, NamesOptionsAsTheyWereGiven) {
    const Folder folder;
    const std::string file = small_capture(folder), out = folder / "x.safetensors";
    EXPECT_THAT(refusal(folder, file, {"--softcap", "-1"}), HasSubstr("attribute: --softcap: -1: expected 0 for none"));
    EXPECT_THAT(refused("generate", {"benign", "--seq", "1", "-o", out}),
                HasSubstr("--seq: 1: expected 8 keys or more"));
    EXPECT_THAT(refused("generate", {"benign", "--keys", "7", "-o", out}),
                HasSubstr("--keys: 7: expected 8 keys or more"));
    EXPECT_THAT(refused("plans", {"fa2", "--diff", "fa2,fa3"}),
                HasSubstr("--diff: 3 plans, with \"fa2\" that stands alone: expected two"));
}

// What is in a file may be any text; a message is one line.
TEST(BadRequest, NamesOfFilesAreEscaped) {
    const Folder folder;
    const std::string file = folder / "nl.safetensors";
    TensorSet set;
    add_layer(set, "x\ny");
    for (const char* kernel : {"k 1\n", "k 2\n"}) {
        Tensor tensor = set.tensors.at("x\ny.toy.o");
        tensor.name = std::string("x\ny.") + kernel + ".o";
        set.add(std::move(tensor));
    }
    write_safetensors(file, set);
    EXPECT_THAT(refused("check", {file}), HasSubstr("chosen with --kernel: expected one of k 1\\n, k 2\\n, toy"));
    EXPECT_THAT(refused("identify", {file, "--kernel", "k 1"}), HasSubstr("(did you mean \"k 1\\n\"?)"));
    EXPECT_THAT(refused("attribute", {file, "--layers", "x"}), HasSubstr("expected x\\ny"));
    EXPECT_THAT(refused("bisect", {file, "--until", "z.dq.rel_error < 1"}), HasSubstr("expected x\\ny"));
}

TEST(Remark, SaysWhatCannotReachAnOutput) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const auto said = [&](const std::string& outputs) {
        const Outcome run =
            run_program({"attribute", file, "--plan", "fa2", "--layers", "layer0", "--outputs", outputs, "--sites",
                         "dq_cast,o_cast", "--correction", "delta_exact", "--correction", "fp32_forward_o"});
        EXPECT_EQ(run.status, 0) << run.err;
        return run.err;
    };
    EXPECT_THAT(said("o"),
                ::testing::AllOf(HasSubstr("--sites: no data flows from dq_cast to o\n"),
                                 HasSubstr("--correction: no data flows from what delta_exact changes to o\n"),
                                 testing::Not(HasSubstr("from o_cast")), testing::Not(HasSubstr("fp32_forward_o"))));
    EXPECT_THAT(said("o,dq"), testing::Not(HasSubstr("no data flows")));
}

TEST(BadRequest, NamesFileTableAndKeyOfAConfiguration) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const auto with = [&](const std::string& toml) {
        folder.write("run.toml", toml);
        const std::string sentence = refusal(folder, file, {"--config", folder / "run.toml"});
        EXPECT_THAT(sentence, HasSubstr("run.toml"));
        return sentence;
    };
    EXPECT_THAT(with("[attribute]\nthreads = \"2\"\n"),
                HasSubstr("attribute.threads: is a string (\"2\"): expected an integer from 0 to 4096"));
    EXPECT_THAT(with("[attribute]\nthreads = -2\n"),
                HasSubstr("attribute.threads: is an integer (-2): expected an integer from 0 to 4096"));
    EXPECT_THAT(with("[attribute]\nthreads = 4294967297\n"),
                HasSubstr("attribute.threads: is an integer (4294967297): expected an integer from 0 to 4096"));
    EXPECT_THAT(with("[attribute]\nlayers = \"layer0\"\n"),
                HasSubstr("attribute.layers: is a string (\"layer0\"): expected a list of strings"));
    EXPECT_THAT(with("[attribute]\nheads = [0.5]\n"),
                HasSubstr("attribute.heads: item 1 is a number (0.5): expected a list of integers"));
    EXPECT_THAT(with("[attribute]\nscale = inf\n"),
                HasSubstr("attribute.scale: is a number that is not finite: expected a positive number"));
    EXPECT_THAT(with("[attribute]\njson = 1\n"),
                HasSubstr("attribute.json: is an integer (1): expected true or false"));
    EXPECT_THAT(with("[attribute]\nplna = \"fa2\"\n"), HasSubstr("attribute.plna: unknown key"));
    EXPECT_THAT(with("[atribute]\n"),
                ::testing::AllOf(HasSubstr("\"atribute\""), HasSubstr("did you mean \"attribute\"?")));
    EXPECT_THAT(with("attribute = 3\n"), HasSubstr("attribute: is an integer: expected a table"));
    EXPECT_THAT(with("[attribute\n"), HasSubstr("line 1"));
    EXPECT_THAT(with("[attribute]\noutputs = [\"dz\"]\n"),
                HasSubstr("attribute.outputs: \"dz\": expected one of o, dq, dk, dv"));
    EXPECT_THAT(with("[identify]\nthreads = 2\n"),
                HasSubstr("has no table [attribute]: expected the settings of this command"));
    EXPECT_THAT(refusal(folder, file, {"--config", folder / "absent.toml"}),
                HasSubstr("absent.toml: cannot be opened"));
}

TEST(BadRequest, OutputThatIsThereIsNotReplaced) {
    const Folder folder;
    const std::string file = small_capture(folder);
    folder.write("out.h5", "mine");
    EXPECT_THAT(refusal(folder, file),
                ::testing::AllOf(HasSubstr("--output"), HasSubstr("exists already"), HasSubstr("--force")));
    const Outcome folderless = run_program({"attribute", file, "-o", folder / "no/out.h5"});
    EXPECT_EQ(folderless.status, 2);
    EXPECT_THAT(folderless.err, HasSubstr("no"));
}

TEST(BadRequest, CommandsThemselves) {
    EXPECT_EQ(run_program({}).status, 2);
    const Outcome unknown = run_program({"atribute"});
    EXPECT_EQ(unknown.status, 2);
    EXPECT_THAT(unknown.err, ::testing::AllOf(StartsWith("faultline: \"atribute\": expected a known name"),
                                              HasSubstr("did you mean \"attribute\"?")));
    EXPECT_THAT(lines(unknown.err), ::testing::SizeIs(1));
    EXPECT_EQ(run_program({"attribute"}).status, 2);
    EXPECT_EQ(run_program({"plans", "fa22"}).status, 2);
    EXPECT_EQ(run_program({"plans", "--diff", "fa2"}).status, 2);
}

// A full disk is not the request's fault.
TEST(FailedWork, StandardOutputThatCannotBeWritten) {
    if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
    const std::string command = program() + " sites > /dev/full 2> /dev/null";
    const int status = std::system(command.c_str());
    EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace faultline::test
