// SPDX-License-Identifier: Apache-2.0
// The page is whole, says what the attribution says, and loads nothing.
#include <regex>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/report.hpp>
#include <faultline/attribution/svg.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/plan/presets.hpp>

#include "paths.hpp"

namespace faultline {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string shipped() { return (test::source_dir() / "tests/data/collapsed-layer.safetensors").string(); }

const Attribution& attribution() {
    static const Attribution result = [] {
        AttributionOptions options;
        options.sites = {Site::p_cast, Site::o_cast, Site::ds_cast};
        options.corrections = {parse_correction("zero_sum_weighted")};
        return attribute(read_capture(shipped()), plan("fa2"), options);
    }();
    return result;
}

/// The element that is closed wrongly first, or empty.
std::string unbalanced(const std::string& page) {
    std::vector<std::string> open;
    const std::regex tag("<(/?)([a-zA-Z0-9]+)([^>]*)>");
    for (auto it = std::sregex_iterator(page.begin(), page.end(), tag); it != std::sregex_iterator(); ++it) {
        const std::string name = (*it)[2];
        if (name == "style") continue;
        if ((*it)[3].str().ends_with('/') || name == "meta" || name == "br") continue;
        if ((*it)[1].length() == 0)
            open.push_back(name);
        else if (open.empty() || open.back() != name)
            return name;
        else
            open.pop_back();
    }
    return open.empty() ? "" : open.back();
}

TEST(Report, IsOnePageThatLoadsNothing) {
    const std::string page = html_report(attribution(), {.title = "", .command_line = "faultline attribute x"});
    EXPECT_THAT(page, ::testing::StartsWith("<!DOCTYPE html>"));
    EXPECT_EQ(unbalanced(page), "");
    for (const char* loads : {"<script", "<link", "<img", "src=", "href=", "@import", "url(", "http:"})
        EXPECT_THAT(page, Not(HasSubstr(loads)));
    EXPECT_EQ(page, html_report(attribution(), {.title = "", .command_line = "faultline attribute x"}));
}

TEST(Report, SaysWhatTheAttributionSays) {
    const std::string page = html_report(attribution());
    const OutputAttribution& dq = attribution().layers[0].outputs[1];
    ASSERT_EQ(dq.output, Output::dq);
    EXPECT_THAT(page, HasSubstr("dq: " + error_text(dq.plan.rel_error) + " wrong under the plan"));
    EXPECT_THAT(page, HasSubstr("<td>o_cast</td>"));
    EXPECT_THAT(page, HasSubstr("zero_sum_weighted"));
    for (const ObservedOutput& seen : dq.observed)
        EXPECT_THAT(page, HasSubstr(">" + error_text(seen.error.rel_error) + "</td>"));
    EXPECT_THAT(page, HasSubstr("p_cast, head 0"));  // its map
}

/// The text of the page's first element of this kind.
std::string first_of(const std::string& page, const std::string& tag) {
    const std::size_t begin = page.find("<" + tag + ">") + tag.size() + 2;
    return page.substr(begin, page.find("</" + tag + ">") - begin);
}

// The finding, what the plan is nearest to, a planted fault, and that an output has no more than its storing costs stand where
// they are read, not only in the printed table at the end.
TEST(Report, SaysWhatIsToBeKnownFirst) {
    Attribution planted = attribution();
    planted.faults = {parse_fault("lse:fixed:0.03")};
    planted.layers[0].faults.resize(1);
    planted.layers[0].fault_sites = {Site::lse};
    planted.origin.nearer = {{"flash", "fa3", 0.9, 0.5, {}, {"layer1"}}};
    OutputAttribution& o = planted.layers[0].outputs[0];
    o.best_correction = "zero_sum_weighted";
    o.plan.rel_error = *o.level;
    const std::string page = html_report(planted), start = page.substr(0, page.find("<h2>Everything"));
    EXPECT_THAT(first_of(page, "h1"), HasSubstr("with the fault lse:fixed:0.03"));
    EXPECT_THAT(start, HasSubstr("fault at lse"));
    EXPECT_THAT(start, HasSubstr("flash is nearer to --plan fa3"));
    EXPECT_THAT(start, HasSubstr(", of the 3 sites tried by o_cast ("));
    EXPECT_THAT(start, HasSubstr("No block of their own: o, dv, lse ("));
    EXPECT_THAT(start, Not(HasSubstr("<h3>o: ")));
    for (const char* column : {"storing the truth", "= plan", "along mean key", "sign"})
        EXPECT_THAT(start, HasSubstr(fmt::format("<b>{}</b>: ", column)));
    EXPECT_EQ(unbalanced(page), "");
    EXPECT_THAT(html_report(attribution()), Not(HasSubstr("fault")));
}

TEST(Report, NamesFromFilesAreText) {
    Attribution hostile = attribution();
    hostile.input = "<script>alert(1)</script>\x1b[31m";
    hostile.layers[0].name = "\"><svg onload=x>";
    const std::string page = html_report(hostile);
    EXPECT_THAT(page, Not(HasSubstr("<script")));
    EXPECT_THAT(page, Not(HasSubstr("<svg onload")));
    EXPECT_THAT(page, Not(HasSubstr("\x1b")));
    EXPECT_EQ(unbalanced(page), "");
}

TEST(Svg, ColoursRunFromBlueOverWhiteToRed) {
    using attribution::signed_color;
    EXPECT_EQ(signed_color(0), "#ffffff");
    EXPECT_EQ(signed_color(1), "#ca3c28");
    EXPECT_EQ(signed_color(-1), "#1950a0");
    EXPECT_EQ(signed_color(5), signed_color(1));
    EXPECT_EQ(signed_color(std::nan("")), "#dddddd");
}

}  // namespace
}  // namespace faultline
