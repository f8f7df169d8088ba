// SPDX-License-Identifier: Apache-2.0
// FAULTLINE_CLONES before a function compiles it for AVX-512, AVX2+FMA and baseline x86-64, and the loader picks one.
// In place of -march=native: a binary built on one machine runs on the next, and with -ffp-contract=off every clone
// gives the same bits. Off under sanitizers, whose runtime is not up when the loader resolves the choice.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(FAULTLINE_NO_CLONES)
#define FAULTLINE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAULTLINE_CLONES
#endif
