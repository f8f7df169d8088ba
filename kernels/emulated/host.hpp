// SPDX-License-Identifier: Apache-2.0
// The back end of the emulated kernel that has one thread: what a device computes, computed on the host.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <vector>

#include <faultline/emulated/driver.hpp>

namespace faultline::emulated {

class HostBackend {
  public:
    double* zeros(std::size_t n) { return buffers_.emplace_back(n, 0.0).data(); }
    const double* upload(const double* from, std::size_t n) {
        double* to = zeros(n);
        write(to, from, n);
        return to;
    }
    void write(double* to, const double* from, std::size_t n) {
        if (n > 0) std::memcpy(to, from, n * sizeof *to);
    }
    void download(const double* from, std::size_t n, double* to) { write(to, from, n); }
    /// The values stay where they are: the caller keeps them for as long as a job runs.
    template <class T>
    const T* upload_values(const T* values, std::size_t) {
        return values;
    }
    template <class Job>
    void run(const Job& job, std::ptrdiff_t teams, std::ptrdiff_t doubles) {
        std::vector<double> memory(static_cast<std::size_t>(doubles));
        for (std::ptrdiff_t t = 0; t < teams; ++t) job(SerialTeam{}, t, memory.data());
    }

  private:
    std::deque<std::vector<double>> buffers_;
};

}  // namespace faultline::emulated
