// SPDX-License-Identifier: Apache-2.0
// The back end of the emulated kernel that has one thread: what a device computes, computed on the host.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <faultline/cpu/backend.hpp>
#include <faultline/emulated/driver.hpp>

namespace faultline::emulated {

class HostBackend {
  public:
    /// One thread has no use for more teams than one; tests ask for more, to cut tiles as a device does.
    explicit HostBackend(int wanted_teams = 1, std::ptrdiff_t least_rows = 1, std::size_t tape_doubles = 1 << 20)
        : wanted_teams_(wanted_teams), least_rows_(least_rows), tape_doubles_(tape_doubles) {}
    [[nodiscard]] Limits limits() const { return {wanted_teams_, least_rows_}; }
    [[nodiscard]] std::size_t tape_doubles() const { return tape_doubles_; }
    double* zeros(std::size_t n) { return buffers_.emplace_back(n, 0.0).data(); }
    double* tape(std::size_t n) { return zeros(n); }
    void mark() {}
    const double* upload(const double* from, std::size_t n) {
        double* to = zeros(n);
        write(to, from, n);
        return to;
    }
    void write(double* to, const double* from, std::size_t n) {
        if (n > 0) std::memcpy(to, from, n * sizeof *to);
    }
    void download(const double* from, std::size_t n, double* to) { write(to, from, n); }
    void download_marked(const double* from, std::size_t n, double* to) { write(to, from, n); }
    /// The values stay where they are: the caller keeps them for as long as a job runs.
    template <class T>
    const T* upload_values(const T* values, std::size_t) {
        return values;
    }
    template <class Job>
    void run(const Job& job, std::ptrdiff_t teams, std::ptrdiff_t doubles) {
        std::vector<double> memory(static_cast<std::size_t>(doubles));
        const auto shared = std::make_unique<Shared>();
        for (std::ptrdiff_t t = 0; t < teams; ++t) job(SerialTeam{shared->bytes}, t, memory.data());
    }

  private:
    struct Shared {
        alignas(16) std::byte bytes[product::staging_bytes];
    };
    int wanted_teams_;
    std::ptrdiff_t least_rows_;
    std::size_t tape_doubles_;
    std::deque<std::vector<double>> buffers_;
};

/// The device's form as a back end of its own, for tests of what runs plans.
class HostForm final : public AttentionBackend {
  public:
    [[nodiscard]] std::string_view name() const override { return "device form on the host"; }
    [[nodiscard]] int calls_at_once(int threads) const override { return threads; }
    [[nodiscard]] GroupForward forward(const HeadGroup& in, const RoundingPlan& plan,
                                       Instrument* instrument) const override {
        HostBackend backend;
        return std::move(emulated::forward(backend, std::span(&in, 1), plan, instrument).front());
    }
    [[nodiscard]] GroupBackward backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                         Instrument* instrument) const override {
        HostBackend backend;
        return std::move(emulated::backward(backend, std::span(&in, 1), std::span(&fwd, 1), plan, instrument).front());
    }
    [[nodiscard]] GroupTruth truth(const TruthProblem& problem, const TruthOptions& options) const override {
        return attention_truth(problem, options);
    }
};

}  // namespace faultline::emulated
