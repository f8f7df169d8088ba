// SPDX-License-Identifier: Apache-2.0
// Processes that work on one run together: who they are, and how bytes get from one to another. What is made of the bytes is
// in sums.hpp, on top of this interface, so that a sum has the same order whatever carries it.
//
// Two kinds of transport: processes of one machine that one of them started, over sockets (local.hpp), and MPI
// (mpi_module.cpp, in a module of its own that is loaded where a launcher has started several ranks).
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace faultline {

class Ranks {
  public:
    virtual ~Ranks() = default;
    [[nodiscard]] int rank() const { return rank_; }
    [[nodiscard]] int size() const { return size_; }
    [[nodiscard]] int local_rank() const { return local_rank_; }  ///< among the ranks of this machine
    [[nodiscard]] int local_size() const { return local_size_; }  ///< how many these are
    [[nodiscard]] bool first() const { return rank_ == 0; }
    /// "sockets", or the name and version of an MPI library.
    [[nodiscard]] virtual std::string transport() const = 0;

    /// All bytes, in the order in which they are sent; may wait for the receiver. `to` and `from` are other ranks. PeerLost
    /// where the other one is gone.
    virtual void send(int to, std::span<const std::byte> bytes) = 0;
    virtual void receive(int from, std::span<std::byte> bytes) = 0;
    /// Whether another rank is known to be gone; does not wait. A transport whose launcher ends all ranks says no.
    [[nodiscard]] virtual bool lost() const { return false; }
    /// A failure of which the ranks cannot tell each other is said once: true on the first of them that asks. A transport whose
    /// launcher ends all ranks says yes to each.
    [[nodiscard]] virtual bool take_word() noexcept { return true; }
    /// The others find this rank gone from now on; and it waits until they are gone too, as long as `most`: what it has that they
    /// use is not to go before them. Nothing but abandon() is called afterwards. A transport whose launcher ends all ranks does
    /// not wait.
    virtual void see_off(std::chrono::milliseconds most) noexcept { (void)most; }
    /// This rank ends without the others: they are not to wait for it. Nothing else is called afterwards.
    virtual void abandon() noexcept = 0;

  protected:
    Ranks(int rank, int size) : rank_(rank), size_(size), local_rank_(rank), local_size_(size) {}
    int rank_, size_, local_rank_, local_size_;
};

}  // namespace faultline
