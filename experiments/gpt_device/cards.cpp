// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/cards.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/ranks/errors.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt::on_device {
namespace {

/// The name that a card has whatever CUDA_VISIBLE_DEVICES makes of its number.
std::string card() {
    int device = 0;
    cudaDeviceProp properties{};
    if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess)
        throw WorkError("device cuda: asking for the card's name failed: expected a device");
    return {properties.uuid.bytes, sizeof properties.uuid.bytes};
}

constexpr const char* gone = "another rank is gone: expected all of them to stay until the run ends";

/// A card whose peer's memory has gone from under a copy fails, perhaps before the sockets say why: some patience finds it out.
bool lost_soon(const Ranks& ranks) {
    using namespace std::chrono_literals;
    for (int i = 0; i < 20; ++i) {
        if (ranks.lost()) return true;
        std::this_thread::sleep_for(50ms);
    }
    return false;
}

}  // namespace

int cards_of(Ranks& ranks, bool may_share) {
    std::string mine;
    together(&ranks, [&] { mine = card(); });
    const std::vector<std::string> cards = all_texts(&ranks, mine);
    int different = 0;
    for (std::size_t rank = 0; rank < cards.size(); ++rank) {
        const auto other = static_cast<std::size_t>(std::ranges::find(cards, cards[rank]) - cards.begin());
        if (other == rank)
            ++different;
        else if (!may_share)
            throw RequestError(
                fmt::format("ranks: ranks {} and {} have the same card: expected one for each, {} on this machine "
                            "(CUDA_VISIBLE_DEVICES), or --share-card, to try a command",
                            other, rank, ranks.local_size()));
    }
    return different;
}

bool idle(Stream stream) noexcept { return cudaStreamQuery(stream) != cudaErrorNotReady; }

void wait(Stream stream, const Ranks& ranks, const std::function<void()>& look) {
    using Clock = std::chrono::steady_clock;
    Clock::time_point asked = Clock::now();
    while (true) {
        const cudaError_t done = cudaStreamQuery(stream);
        if (done == cudaSuccess) return;
        if (done != cudaErrorNotReady) {
            if (lost_soon(ranks)) throw PeerLost(gone);
            throw WorkError(fmt::format("device cuda: running on the device: {}", cudaGetErrorString(done)));
        }
        std::this_thread::yield();
        if (Clock::now() - asked < std::chrono::milliseconds(10)) continue;
        asked = Clock::now();
        look();
        if (ranks.lost()) throw PeerLost(gone);
    }
}

}  // namespace faultline::gpt::on_device
