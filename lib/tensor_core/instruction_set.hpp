// SPDX-License-Identifier: Apache-2.0
// Private to this folder: which kernels this processor takes.
#pragma once

namespace faultline {

/// Whether the *_v3.cpp kernels are to be used: where there is AVX2 and no AVX-512. There the vectors of 512 bits that the other
/// files are written with, which AVX-512 has, are taken apart through memory (g++ 12), at a seventh of the speed.
inline bool takes_v3_kernels() {
#if defined(FAULTLINE_V3_KERNELS)
    static const bool takes = [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("x86-64-v3") && !__builtin_cpu_supports("x86-64-v4");
    }();
    return takes;
#else
    return false;
#endif
}

}  // namespace faultline
