// SPDX-License-Identifier: Apache-2.0
// What --help says, and who looks for an option where it is not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.hpp"

namespace faultline::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::vector<std::string> commands{"attribute", "inspect", "plans", "sites", "formats"};

TEST(Help, OfEveryCommandHasAnExampleAndTheSharedOptions) {
    const Outcome all = run_program({"--help"});
    EXPECT_EQ(all.status, 0);
    for (const std::string& command : commands) {
        SCOPED_TRACE(command);
        EXPECT_THAT(all.out, HasSubstr(command));
        const Outcome help = run_program({command, "--help"});
        EXPECT_EQ(help.status, 0);
        EXPECT_THAT(help.err, IsEmpty());
        EXPECT_THAT(help.out, HasSubstr("Example:\n  faultline " + command));
        for (const char* option : {"--config FILE.toml", "--set KEY=VALUE", "--print-config", "--json",
                                   "-o,--output FILE.h5", "--threads N", "--device cpu|cuda", "--quiet"})
            EXPECT_THAT(help.out, HasSubstr(option));
    }
    EXPECT_THAT(run_program({"--version"}).out, ::testing::MatchesRegex("faultline [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

// Help texts begin in one column, also behind --no-NAME; what a command cannot do without is not in brackets.
TEST(Help, ColumnsAndPositionals) {
    const std::string check = run_program({"check", "--help"}).out;
    std::size_t column = 0;
    for (const std::string& line : lines(check)) {
        if (!line.starts_with("  --") && !line.starts_with("  -o")) continue;
        const std::size_t text = line.find_first_not_of(' ', line.find("  ", 4));
        if (column == 0) column = text;
        EXPECT_EQ(text, column) << line;
    }
    EXPECT_EQ(column, 34U);
    EXPECT_THAT(check, HasSubstr("Usage: faultline check [OPTIONS] capture\n"));
    EXPECT_THAT(run_program({"plans", "--help"}).out, HasSubstr("Usage: faultline plans [OPTIONS] [name]\n"));
}

/// What --help says of an option, in one line.
std::string help_of(const std::vector<std::string>& help, const std::string& key) {
    for (std::size_t i = 0; i < help.size(); ++i) {
        const std::size_t at = help[i].find("--" + key);
        if (at == std::string::npos || at > 6 || help[i].find_first_of(" ,", at) != at + key.size() + 2) continue;
        const bool below = i + 1 < help.size() && help[i + 1].starts_with(std::string(34, ' '));
        return below ? help[i] + help[i + 1] : help[i];
    }
    return "";
}

// The values that --print-config has where nobody gave any are those that --help calls the defaults.
TEST(Help, SaysEveryDefault) {
    for (const std::string command : {"train", "dissociate", "sweep", "probe", "attribute"}) {
        const bool in_words =
            command == "probe" || command == "attribute";  // of some of their options: "auto (the default)"
        const std::vector<std::string> help = lines(run_program({command, "--help"}).out);
        int found = 0;
        for (const std::string& line : lines(run_program({command, "--print-config"}).out)) {
            const std::size_t equals = line.find(" = ");
            if (equals == std::string::npos) continue;
            const std::string key = line.substr(0, equals);
            std::string value = line.substr(equals + 3);
            if (value == "true" || value == "false" || value == "[]") continue;
            std::erase_if(value, [](char c) { return c == '"' || c == '[' || c == ']'; });
            if (value.ends_with(".0")) value.resize(value.size() - 2);
            EXPECT_THAT(help_of(help, key), HasSubstr(in_words ? "default" : "; default " + value))
                << command << " --" << key;
            ++found;
        }
        EXPECT_GE(found, 2) << command;
    }
    const std::vector<std::string> dissociate = lines(run_program({"dissociate", "--help"}).out);
    EXPECT_THAT(help_of(dissociate, "warmup"), HasSubstr("; default 500"));
    EXPECT_THAT(help_of(dissociate, "checkpoint-every"), HasSubstr("; default 100"));
    EXPECT_THAT(help_of(dissociate, "validate-every"), HasSubstr("; default 0"));  // of train 250
    EXPECT_THAT(help_of(lines(run_program({"train", "--help"}).out), "validate-every"), HasSubstr("; default 250"));
}

// Who looks for a guard in train is told where it is; of an option that several have, the nearest name is of more use.
TEST(Help, AnOptionOfAnotherCommandIsSaid) {
    const Outcome guard = run_program({"train", "--intervention", "guard"});
    EXPECT_EQ(guard.status, 2);
    EXPECT_THAT(guard.err, HasSubstr("\"--intervention\": unknown option: expected one that --help lists, or faultline "
                                     "dissociate, which has it"));
    EXPECT_THAT(run_program({"dissociate", "--gres=gpu:1"}).err, HasSubstr("or faultline sweep, which has it"));
    EXPECT_THAT(run_program({"train", "--plan", "fa2"}).err, Not(HasSubstr("which has it")));
}

}  // namespace
}  // namespace faultline::test
