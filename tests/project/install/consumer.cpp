// SPDX-License-Identifier: Apache-2.0
// A small program of somebody else's, built against the installed package: it rounds a number, and asks which share of a
// real kernel's error one rounding has. consumer CAPTURE, with tests/data/collapsed-layer.safetensors.
#include <cmath>
#include <cstdio>
#include <exception>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/format/format.hpp>
#include <faultline/plan/presets.hpp>

namespace {

namespace fl = faultline;

// tests/data/README.md: flash's dQ is 154% wrong, by a float64 evaluation that knows nothing of this project. The figure
// has three digits, so half a unit of the third is what it leaves open.
constexpr double flash_dq_error = 1.54;
constexpr double half_a_digit = 0.005;

bool check(bool holds, const char* what) {
    if (!holds) std::printf("wrong: %s\n", what);
    return holds;
}

}  // namespace

int main(int count, char** arguments) try {
    if (count != 2) {
        std::puts("usage: consumer CAPTURE");
        return 2;
    }
    // bf16 has 8 bits of precision: neighbours in [1, 2) are 2^-7 apart, and the tie 1 + 2^-8 goes to the even one, 1.
    bool good = check(fl::round(1.0 + 0x1p-8, fl::bf16) == 1.0, "the tie 1 + 2^-8 in bf16");
    good &= check(fl::round(1.0 + 0x1.8p-8, fl::bf16) == 1.0 + 0x1p-7, "1 + 1.5 2^-8 in bf16");

    const fl::Capture capture = fl::read_capture(arguments[1]);
    fl::AttributionOptions options;
    options.outputs = {fl::Output::dq};
    options.sites = {fl::Site::o_cast};
    const fl::Attribution result = fl::attribute(capture, fl::plan("fa2"), options);
    std::fputs(fl::table(result).c_str(), stdout);

    const fl::OutputAttribution& dq = result.layers.at(0).outputs.at(0);
    const auto& flash = dq.observed.at(0);
    good &= check(flash.kernel == "flash", "the first kernel's name");
    good &= check(std::abs(flash.error.rel_error.to_double() - flash_dq_error) <= half_a_digit, "flash's dQ error");
    return good ? 0 : 1;
} catch (const std::exception& error) {
    std::puts(error.what());
    return 1;
}
