// SPDX-License-Identifier: Apache-2.0
// Linked with lib/truth compiled for baseline x86-64 without clones: prints what clones_test.cpp expects of its own.
#include <cstdio>

#include "fingerprint.hpp"

int main() {
    std::printf("%016llx\n", static_cast<unsigned long long>(faultline::test::fingerprint()));
    return 0;
}
