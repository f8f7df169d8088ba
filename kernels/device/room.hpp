// SPDX-License-Identifier: Apache-2.0
// The device's memory, shared by calls from several threads: each takes what it needs before it begins and waits while
// others have it, so that no call fails halfway for want of memory.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace faultline::device {

class Room {
  public:
    explicit Room(std::size_t bytes) : all_(bytes), left_(bytes) {}
    [[nodiscard]] std::size_t all() const { return all_; }

  private:
    friend class Lease;
    std::size_t all_, left_;
    std::mutex mutex_;
    std::condition_variable given_back_;
};

/// That of the device in use; made ready at the first call. WorkError as info().
[[nodiscard]] Room& shared_room();

/// So many bytes of a room, at most all of it, until it is destroyed.
class Lease {
  public:
    Lease(Room& room, std::size_t bytes) : room_(room), bytes_(bytes) {
        std::unique_lock lock(room_.mutex_);
        room_.given_back_.wait(lock, [&] { return room_.left_ >= bytes_; });
        room_.left_ -= bytes_;
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
        {
            const std::lock_guard lock(room_.mutex_);
            room_.left_ += bytes_;
        }
        room_.given_back_.notify_all();
    }

  private:
    Room& room_;
    std::size_t bytes_;
};

}  // namespace faultline::device
