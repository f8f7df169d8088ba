// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/rank_group.hpp>

#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <faultline/ranks/errors.hpp>
#include <faultline/ranks/launched.hpp>
#include <faultline/ranks/local.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::cli {

void RankGroup::join() {
    try {
        ranks_ = join_launched_ranks();
    } catch (const RequestError& error) {
        // There is no way to settle it with the others, to whom it happens as well.
        const std::optional<Launch> launch = launch_of_environment();
        const bool silent = launch && launch->rank > 0;
        // mpirun ends all when the first of them ends badly: the one that speaks needs the time to do so.
        if (silent) std::this_thread::sleep_for(std::chrono::milliseconds(500));
        throw SharedFailure(error.what(), true, silent);
    }
}

void RankGroup::start(std::int64_t wanted, const std::string& where) {
    if (ranks_ != nullptr) {
        if (wanted != 1 && wanted != ranks_->size())
            throw RequestError(fmt::format("{}: {}: a launcher has started {} ranks: expected one way of the two",
                                           where, wanted, ranks_->size()));
        return;
    }
    if (wanted > 1) ranks_ = start_local_ranks(static_cast<int>(wanted));
}

void RankGroup::ready() {
    settle(ranks_.get(), nullptr);
    ready_ = true;
}

void RankGroup::fail(const std::exception_ptr& failed) {
    if (ranks_ == nullptr || ready_) return;
    try {
        std::rethrow_exception(failed);
    } catch (const SharedFailure&) {
        return;
    } catch (const PeerLost&) {
        return;
    } catch (const LoneFailure&) {
        return;
    } catch (...) {
        settle(ranks_.get(), failed);
    }
}

void RankGroup::leave() noexcept {
    if (ranks_ != nullptr) ranks_->abandon();
}

bool choose_card(const Ranks& ranks) {
    constexpr const char* variable = "CUDA_VISIBLE_DEVICES";
    const char* const set = std::getenv(variable);
    const auto at = static_cast<std::size_t>(ranks.local_rank());
    if (set == nullptr) {
        (void)::setenv(variable, std::to_string(at).c_str(), 1);
        return true;
    }
    std::vector<std::string> cards;
    for (std::string_view left = set; !left.empty();) {
        const std::size_t comma = left.find(',');
        cards.emplace_back(left.substr(0, comma));
        left = comma == std::string_view::npos ? std::string_view() : left.substr(comma + 1);
    }
    if (cards.size() < static_cast<std::size_t>(ranks.local_size())) return false;
    (void)::setenv(variable, cards[at].c_str(), 1);
    return true;
}

}  // namespace faultline::cli
