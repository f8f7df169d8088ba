// SPDX-License-Identifier: Apache-2.0
// What faultline selftest compares: the CPU's outputs and truth beside those of the device form, on the host or on a card, and how
// many elements differ in a bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::cli {

/// Outputs of one side, a head group each, and the time that it took.
struct Side {
    std::vector<GroupForward> forward;
    std::vector<GroupBackward> backward;
    double seconds = 0;
};

/// Elements that were compared, and those whose bits are not the same; of results of unlike sizes all differ.
struct Tally {
    std::uint64_t elements = 0, differing = 0;

    void add(const std::vector<double>& a, const std::vector<double>& b);
    /// Value, bound and exponent of each element.
    void add(const CertifiedMatrix& a, const CertifiedMatrix& b);
    void add(const GroupTruth& a, const GroupTruth& b);
    void add(const Side& a, const Side& b);
};

/// What one row of the listing says.
struct Compared {
    Tally tally;
    double cpu_seconds = 0, device_seconds = 0;
};

/// Both passes of `kernels/cpu`, head groups on `threads` threads.
Side on_cpu(const std::vector<HeadGroup>& groups, const RoundingPlan& plan, int threads);

/// Both passes of `kernels/emulated`: on the card where `device` is cuda, else on the host. The errors of device.hpp.
Side in_device_form(const std::string& device, const std::vector<HeadGroup>& groups, const RoundingPlan& plan);

/// Heads whose copies to a card have several pieces, passes one by one and in one call. On a card alone: elsewhere nothing is copied.
Compared compare_large(int threads, std::uint64_t seed);

/// Truth of each family by its fast path: what that leaves undecided is the processor's on every device.
Compared compare_truth(const std::string& device, const std::vector<const InputFamily*>& families,
                       const InputShape& shape, std::uint64_t seed);

}  // namespace faultline::cli
