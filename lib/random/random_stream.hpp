// SPDX-License-Identifier: Apache-2.0
// RandomStream: a named, stateless sequence of random numbers. The name is (seed, ids...), e.g. (seed, step, layer, head,
// tile, site); the n-th number of a stream is a pure function of its name and n, the same on host and device.
#pragma once

#include <faultline/base/host_device.hpp>
#include <faultline/random/normal_quantile.hpp>
#include <faultline/random/philox.hpp>

#include <concepts>
#include <cstdint>

namespace faultline {

/// A stream of random numbers addressed by counter. Copy freely: it is a key and nothing else.
struct RandomStream {
    std::uint64_t key = 0;

    constexpr RandomStream() = default;

    /// The stream named (seed, ids...). The order and the number of ids count: (s, 1, 2), (s, 2, 1) and (s, 1, 2, 0) are
    /// three unrelated streams. Each id goes through one Philox block keyed by what came before, so near ids (step and
    /// step + 1) give unrelated keys; two names share a key with probability 2^-64.
    template <std::integral... Ids>
    FAULTLINE_HD explicit constexpr RandomStream(std::uint64_t seed, Ids... ids) : key(absorb(0, seed, 0)) {
        std::uint32_t position = 1;
        ((key = absorb(key, static_cast<std::uint64_t>(ids), position++)), ...);
        (void)position;
    }

    /// The stream named (seed, ids..., more...) where this one's name (seed, ids...) has `named` numbers: a part that many
    /// names begin with is absorbed once.
    template <std::integral... Ids>
    [[nodiscard]] FAULTLINE_HD constexpr RandomStream with(std::uint32_t named, Ids... more) const {
        RandomStream result;
        result.key = key;
        ((result.key = absorb(result.key, static_cast<std::uint64_t>(more), named++)), ...);
        return result;
    }

    /// A stream derived from this one, e.g. stream.child(tile).
    [[nodiscard]] FAULTLINE_HD constexpr RandomStream child(std::uint64_t id) const {
        RandomStream result;
        result.key = absorb(key, id, child_position);
        return result;
    }

    /// 64 random bits. Two counters share one Philox4x32-10 block.
    [[nodiscard]] FAULTLINE_HD constexpr std::uint64_t bits(std::uint64_t counter) const {
        const std::uint64_t block_index = counter >> 1;
        const Block4x32 block = philox4x32(
            {static_cast<std::uint32_t>(block_index), static_cast<std::uint32_t>(block_index >> 32), 0, 0}, key);
        return counter % 2 == 0 ? join(block.word[0], block.word[1]) : join(block.word[2], block.word[3]);
    }

    /// Uniform on [0, 1), a multiple of 2^-53.
    [[nodiscard]] FAULTLINE_HD constexpr double uniform(std::uint64_t counter) const {
        return static_cast<double>(bits(counter) >> 11) * 0x1p-53;
    }

    /// Standard normal, by inversion of a uniform on the midpoints (k + 1/2) 2^-52; |value| < 8.3. Inversion rather than
    /// Box-Muller: one counter gives one number, and no call to a mathematical library that differs between machines.
    [[nodiscard]] FAULTLINE_HD double normal(std::uint64_t counter) const {
        return normal_quantile((static_cast<double>(bits(counter) >> 12) + 0.5) * 0x1p-52);
    }

    friend constexpr bool operator==(const RandomStream&, const RandomStream&) = default;

  private:
    // Third counter word: keeps the absorbing blocks apart from those of bits(), whose third and fourth words are 0.
    static constexpr std::uint32_t absorbing = 0x61627362u;
    static constexpr std::uint32_t child_position = 0xFFFFFFFFu;

    FAULTLINE_HD static constexpr std::uint64_t join(std::uint32_t low, std::uint32_t high) {
        return (static_cast<std::uint64_t>(high) << 32) | low;
    }
    FAULTLINE_HD static constexpr std::uint64_t absorb(std::uint64_t key, std::uint64_t id, std::uint32_t position) {
        const Block4x32 block = philox4x32(
            {static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32), absorbing, position}, key);
        return join(block.word[0], block.word[1]);
    }
};

}  // namespace faultline
