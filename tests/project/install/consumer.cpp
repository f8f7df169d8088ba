// SPDX-License-Identifier: Apache-2.0
// The smallest program that uses the installed package: each header that it can find, and one value that is known.
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>

#include <atomic>
#include <cstdio>

int main() {
    std::atomic<int> sum{0};
    faultline::parallel_for(10, 2, [&](std::size_t i) { sum += static_cast<int>(i); });
    if (sum != 45) {
        std::puts("parallel_for: 0 + ... + 9 is not 45");
        return 1;
    }
    std::puts("built against the installed package");
    return 0;
}
