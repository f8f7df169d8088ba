// SPDX-License-Identifier: Apache-2.0
// The ranks that this process is one of, where several work on one command; and how they end together.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include <faultline/ranks/ranks.hpp>

namespace faultline::cli {

class RankGroup {
  public:
    /// Joins the ranks that a launcher or the first rank has started, if any.
    void join();
    /// Starts `wanted` - 1 others on this machine. Where a launcher has started ranks already, `wanted` is to be 1 or their
    /// number. RequestError that begins with `where`.
    void start(std::int64_t wanted, const std::string& where);
    /// Null: this process is alone.
    [[nodiscard]] Ranks* ranks() const { return ranks_.get(); }
    /// Results, progress and errors are the first rank's to say.
    [[nodiscard]] bool speaks() const { return ranks_ == nullptr || ranks_->first(); }
    /// All ranks come here once what they read is good: a SharedFailure where it is not on one of them. From here on a failure
    /// that the ranks do not settle among themselves ends them all.
    void ready();
    /// The command fails with this. Before ready() all ranks are told, and this throws their SharedFailure; afterwards it
    /// returns, and leave() is to be called once the failure is said.
    void fail(const std::exception_ptr& failed);
    /// A failure that the ranks have not settled among themselves is said by one of them: whether it is this one.
    [[nodiscard]] bool take_word() noexcept { return ranks_ == nullptr || ranks_->take_word(); }
    /// The others are not to wait for this rank.
    void leave() noexcept;

  private:
    std::unique_ptr<Ranks> ranks_;
    bool ready_ = false;
};

/// Cards that CUDA finds from here on: of those that CUDA_VISIBLE_DEVICES leaves, or of all, the one of this rank's place among
/// the ranks of its machine. Where fewer than that are named the launcher has chosen, and nothing is changed: false.
bool choose_card(const Ranks& ranks);

}  // namespace faultline::cli
