// SPDX-License-Identifier: Apache-2.0
// Where the time of calls to the device goes.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace faultline::device {

/// Seconds by part, and what the kernels that are made for some plans left to those that are for all.
struct Parts {
    double allocating = 0, sending = 0, fetching = 0;
    std::map<std::string, double> computing;                ///< by job: "forward", "dq", …
    std::map<std::string, std::size_t> heads_in_registers;  ///< by job: whose gradients gradients.cuh had, to the end
    std::size_t blocks_left = 0;  ///< of products that the card's unit had begun; of all threads of the process
};

/// From now on the calls of this thread wait for each of their steps and add what it took; nullptr: no longer. What is left of
/// a call's time is the host's. blocks_left is there when the clock has stopped.
void time_parts(Parts* parts);

}  // namespace faultline::device
