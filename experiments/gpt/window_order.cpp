// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/data.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

namespace fs = std::filesystem;

using Steps = std::vector<std::vector<std::int64_t>>;

std::string text_of(const std::string& path) {
    const FileInput input(path);
    std::string text(static_cast<std::size_t>(input.size()), '\0');
    input.read(0, std::as_writable_bytes(std::span(text.data(), text.size())));
    return text;
}

Steps read_steps(const std::string& path) {
    const std::string text = text_of(path);
    Steps steps;
    const char* at = text.data();
    const char* const end = at + text.size();
    while (at < end) {
        std::vector<std::int64_t> offsets;
        for (; at < end && *at != '\n';) {
            if (*at == ',' || *at == ' ' || *at == '\t' || *at == '\r') {
                ++at;
                continue;
            }
            std::int64_t value = 0;
            const auto [next, error] = std::from_chars(at, end, value);
            if (error != std::errc() || value < 0)
                throw RequestError(fmt::format(
                    "{}: line {}: {}: expected token offsets separated by commas", escaped(path, path.size()),
                    steps.size() + 1, in_quotes(std::string_view(at, std::find(at, end, '\n')).substr(0, 40))));
            offsets.push_back(value);
            at = next;
        }
        ++at;
        if (!offsets.empty()) steps.push_back(std::move(offsets));
    }
    if (steps.empty())
        throw RequestError(
            fmt::format("{}: holds no step: expected a line of token offsets for each", escaped(path, path.size())));
    return steps;
}

}  // namespace

WindowOrder WindowOrder::replay(const std::string& path) {
    WindowOrder order(0);
    order.source_ = path;
    std::error_code error;
    if (!fs::is_directory(path, error)) {
        order.steps_ = read_steps(path);
        order.inputs_.push_back({path, hash_file(path)});
        return order;
    }
    const auto rank_file = [&](int rank) {
        return (fs::path(path) / fmt::format("generated_indices_rank_{}.txt", rank)).string();
    };
    if (!fs::exists(rank_file(0)))
        throw RequestError(
            fmt::format("{}: holds no generated_indices_rank_0.txt: expected the folder of a run of arXiv "
                        "2510.04212's code",
                        escaped(path, path.size())));
    Steps all = read_steps(rank_file(0));
    order.inputs_.push_back({rank_file(0), hash_file(rank_file(0))});
    for (int rank = 1; fs::exists(rank_file(rank)); ++rank) {
        const Steps more = read_steps(rank_file(rank));
        order.inputs_.push_back({rank_file(rank), hash_file(rank_file(rank))});
        // A killed run leaves ranks that are a step apart: the steps that all of them have.
        all.resize(std::min(all.size(), more.size()));
        for (std::size_t s = 0; s < all.size(); ++s) all[s].insert(all[s].end(), more[s].begin(), more[s].end());
    }
    order.steps_ = std::move(all);
    return order;
}

std::vector<std::int64_t> WindowOrder::offsets(std::int64_t step, std::size_t windows, std::size_t tokens,
                                               int length) const {
    const auto last = static_cast<std::int64_t>(tokens) - length - 1;
    std::vector<std::int64_t> result;
    if (!steps_) {
        const RandomStream stream(seed_, step);
        for (std::size_t i = 0; i < windows; ++i)
            result.push_back(static_cast<std::int64_t>(stream.uniform(i) * static_cast<double>(last + 1)));
        return result;
    }
    const std::string name = escaped(source_, source_.size());
    if (step >= static_cast<std::int64_t>(steps_->size()))
        throw RequestError(fmt::format("{}: step {}: expected a replay of at least {} steps and it has {}", name, step,
                                       step + 1, steps_->size()));
    result = (*steps_)[static_cast<std::size_t>(step)];
    if (result.size() != windows)
        throw RequestError(fmt::format("{}: step {}: {} offsets: expected batch times accumulation, {}", name, step,
                                       result.size(), windows));
    for (const std::int64_t offset : result)
        if (offset > last)
            throw RequestError(
                fmt::format("{}: step {}: offset {}: expected at most {}, a context before the end of {} "
                            "tokens",
                            name, step, offset, last, tokens));
    return result;
}

void WindowOrder::check(std::int64_t steps, std::size_t windows, std::size_t tokens, int length) const {
    if (!steps_) return;  // what is drawn fits
    for (std::int64_t step = 0; step < steps; ++step) (void)offsets(step, windows, tokens, length);
}

std::string WindowOrder::line(std::span<const std::int64_t> offsets) {
    return fmt::format("{}\n", fmt::join(offsets, ","));
}

}  // namespace faultline::gpt
