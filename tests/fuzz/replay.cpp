// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target, without a fuzzer, on every file of a folder, on every truncation of it, and on each of its bytes
// changed: what any compiler can check in every test build. Prints the number of inputs; fails when there is no seed.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzz.hpp"

namespace {

std::size_t replay(std::vector<std::uint8_t> bytes) {
    std::size_t inputs = 0;
    const auto run = [&](std::size_t size) {
        // A copy of exactly that size, so that a sanitizer sees a read past its end.
        const std::vector<std::uint8_t> input(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
        LLVMFuzzerTestOneInput(input.data(), input.size());
        ++inputs;
    };
    run(bytes.size());
    constexpr std::size_t most = 256;  // places changed per seed; longer seeds are sampled
    const std::size_t step = std::max<std::size_t>(bytes.size() / most, 1);
    for (std::size_t at = 0; at < bytes.size(); at += step) {
        run(at);
        const std::uint8_t was = bytes[at];
        // Zero, all ones, a control character, and of what JSON, TOML and Python are made of: " { ] 9 -
        for (const int value : {0x00, 0xFF, 0x1B, 0x22, 0x7B, 0x5D, 0x39, 0x2D, was ^ 0x80}) {
            bytes[at] = static_cast<std::uint8_t>(value);
            run(bytes.size());
        }
        bytes[at] = was;
    }
    return inputs;
}

}  // namespace

int main(int argc, char** argv) {
    std::size_t seeds = 0, inputs = 0;
    for (int i = 1; i < argc; ++i) {
        std::vector<std::filesystem::path> files;
        for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
        std::sort(files.begin(), files.end());
        for (const auto& path : files) {
            std::ifstream in(path, std::ios::binary);
            inputs += replay({std::istreambuf_iterator<char>(in), {}});
            ++seeds;
        }
    }
    std::printf("%zu inputs from %zu seeds\n", inputs, seeds);
    return seeds > 0 ? 0 : 1;
}
