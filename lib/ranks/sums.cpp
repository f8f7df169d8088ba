// SPDX-License-Identifier: Apache-2.0
#include <faultline/ranks/sums.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>

#include <faultline/ranks/errors.hpp>

namespace faultline {
namespace {

/// A piece of an array on its way: small enough that the ranks of a chain work at once and that it stays in the cache.
constexpr std::size_t piece_bytes = std::size_t{256} << 10;

template <class T, class F>
void for_pieces(std::span<T> values, F&& f) {
    constexpr std::size_t most = piece_bytes / sizeof(T);
    for (std::size_t at = 0; at < values.size(); at += most) f(at, std::min(most, values.size() - at));
}

/// Up the chain, then down it.
template <class T, class Join>
void chain(Ranks* ranks, std::span<T> total, std::span<const std::span<const T>> parts, Join&& join) {
    const auto own = [&](std::size_t at, std::size_t count) {
        for (const std::span<const T> part : parts)
            for (std::size_t i = at; i < at + count; ++i) total[i] = join(total[i], part[i]);
    };
    if (ranks == nullptr) return own(0, total.size());
    const int rank = ranks->rank(), last = ranks->size() - 1;
    for_pieces(total, [&](std::size_t at, std::size_t count) {
        const std::span<T> piece = total.subspan(at, count);
        if (rank > 0) ranks->receive(rank - 1, std::as_writable_bytes(piece));
        own(at, count);
        if (rank < last) ranks->send(rank + 1, std::as_bytes(piece));
    });
    for_pieces(total, [&](std::size_t at, std::size_t count) {
        const std::span<T> piece = total.subspan(at, count);
        if (rank < last) ranks->receive(rank + 1, std::as_writable_bytes(piece));
        if (rank > 0) ranks->send(rank - 1, std::as_bytes(piece));
    });
}

void send_text(Ranks& ranks, int to, const std::string& text) {
    const std::uint64_t size = text.size();
    ranks.send(to, std::as_bytes(std::span(&size, 1)));
    if (size > 0) ranks.send(to, std::as_bytes(std::span(text)));
}

std::string receive_text(Ranks& ranks, int from) {
    std::uint64_t size = 0;
    ranks.receive(from, std::as_writable_bytes(std::span(&size, 1)));
    std::string text(size, '\0');
    if (size > 0) ranks.receive(from, std::as_writable_bytes(std::span(text)));
    return text;
}

/// 'r' and the sentence of a RequestError, 'w' of anything else; empty where nothing went wrong.
std::string word_of(const std::exception_ptr& failed) {
    if (!failed) return {};
    try {
        std::rethrow_exception(failed);
    } catch (const RequestError& error) {
        return std::string("r") + error.what();
    } catch (const std::exception& error) {
        return std::string("w") + error.what();
    }
}

}  // namespace

template <class T>
void add_in_rank_order(Ranks* ranks, std::span<T> total, std::span<const std::span<const T>> parts) {
    chain(ranks, total, parts, [](T a, T b) { return a + b; });
}
template void add_in_rank_order(Ranks*, std::span<float>, std::span<const std::span<const float>>);
template void add_in_rank_order(Ranks*, std::span<double>, std::span<const std::span<const double>>);

void largest_in_rank_order(Ranks* ranks, std::span<double> total, std::span<const std::span<const double>> parts) {
    chain(ranks, total, parts, [](double a, double b) { return std::max(a, b); });
}

std::vector<std::string> all_texts(Ranks* ranks, std::string mine) {
    std::vector<std::string> all;
    if (ranks == nullptr) {
        all.push_back(std::move(mine));
        return all;
    }
    all.resize(static_cast<std::size_t>(ranks->size()));
    if (!ranks->first()) {
        send_text(*ranks, 0, mine);
        const std::string message = receive_text(*ranks, 0);
        std::size_t at = all.size() * sizeof(std::uint64_t);
        for (std::size_t r = 0; r < all.size(); ++r) {
            std::uint64_t size = 0;
            std::memcpy(&size, message.data() + r * sizeof size, sizeof size);
            all[r] = message.substr(at, size);
            at += size;
        }
        return all;
    }
    all[0] = std::move(mine);
    for (int from = 1; from < ranks->size(); ++from) all[static_cast<std::size_t>(from)] = receive_text(*ranks, from);
    // One message each: sizes, then the texts.
    std::string message;
    for (const std::string& text : all) {
        const std::uint64_t size = text.size();
        message.append(reinterpret_cast<const char*>(&size), sizeof size);
    }
    for (const std::string& text : all) message += text;
    for (int to = 1; to < ranks->size(); ++to) send_text(*ranks, to, message);
    return all;
}

void from_first(Ranks* ranks, std::span<std::byte> bytes) {
    if (ranks == nullptr) return;
    if (!ranks->first()) return ranks->receive(0, bytes);
    for (int to = 1; to < ranks->size(); ++to) ranks->send(to, bytes);
}

bool settle_any(Ranks* ranks, std::exception_ptr failed, bool here) {
    if (ranks == nullptr) {
        if (failed) std::rethrow_exception(failed);
        return here;
    }
    constexpr const char* yes = "y";
    const std::vector<std::string> words = all_texts(ranks, failed ? word_of(failed) : here ? yes : "");
    const auto bad = std::ranges::find_if(words, [](const std::string& word) { return !word.empty() && word != yes; });
    if (bad == words.end()) return std::ranges::find(words, yes) != words.end();
    const auto rank = bad - words.begin();
    throw SharedFailure((rank == 0 ? std::string() : "rank " + std::to_string(rank) + ": ") + bad->substr(1),
                        bad->front() == 'r', !ranks->first());
}

void settle(Ranks* ranks, std::exception_ptr failed) { (void)settle_any(ranks, failed, false); }

}  // namespace faultline
