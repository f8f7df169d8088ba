// SPDX-License-Identifier: Apache-2.0
// The back end that has one thread: what a device computes, computed on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include <faultline/truth_teams/driver.hpp>

namespace faultline::truth_teams {

class HostBackend {
  public:
    /// `room`: bytes that strips are made for, as a device's memory would.
    explicit HostBackend(std::size_t room = std::numeric_limits<std::size_t>::max() / 2) : room_(room) {}

    template <class T>
    T* allocate(std::size_t n) {
        // Filled with what no result may depend on.
        auto part = std::make_unique<std::byte[]>(n * sizeof(T) + 1);
        std::memset(part.get(), 0xff, n * sizeof(T));
        parts_.push_back(std::move(part));
        return reinterpret_cast<T*>(parts_.back().get());
    }
    template <class T>
    T* upload(const T* values, std::size_t n) {
        T* to = allocate<T>(n);
        std::copy_n(values, n, to);
        return to;
    }
    template <class T>
    void download(const T* from, std::size_t n, T* to) {
        std::copy_n(from, n, to);
    }
    [[nodiscard]] std::size_t room() const { return room_; }
    [[nodiscard]] static int team_size() { return 1; }
    [[nodiscard]] std::size_t jobs() const { return jobs_; }  ///< run so far
    template <class Job>
    void run(const Job& job, std::ptrdiff_t teams, std::ptrdiff_t doubles) {
        ++jobs_;
        std::vector<double> memory(static_cast<std::size_t>(doubles));
        for (std::ptrdiff_t t = 0; t < teams; ++t) job(emulated::SerialTeam{}, t, memory.data());
    }

  private:
    std::size_t room_, jobs_ = 0;
    std::vector<std::unique_ptr<std::byte[]>> parts_;
};

}  // namespace faultline::truth_teams
