// SPDX-License-Identifier: Apache-2.0
// Where the time of calls to the device goes.
#pragma once

#include <map>
#include <string>

namespace faultline::device {

/// Seconds by part.
struct Parts {
    double allocating = 0, sending = 0, fetching = 0;
    std::map<std::string, double> computing;  ///< by job: "forward", "dq", …
};

/// From now on the calls of this thread wait for each of their steps and add what it took; nullptr: no longer. What is left of
/// a call's time is the host's.
void time_parts(Parts* parts);

}  // namespace faultline::device
