// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda.so.1 as far as the runtime goes before it looks for a device, and answers as the environment says: what a
// driver does that cannot be had for a test.
#include <cstdlib>

namespace {

int said(const char* name, int otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace

extern "C" {

int cuDriverGetVersion(int* version) {
    *version = said("STAND_IN_VERSION", 13000);
    return 0;
}
int cuInit(unsigned) { return said("STAND_IN_INIT", 0); }
}
