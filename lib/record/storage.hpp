// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace faultline {

/// How large datasets are stored. Small ones (under 64 KiB) are never compressed.
struct Storage {
    enum class Compression {
        measured,  ///< shuffle + deflate if a sample of the data shrinks by a quarter at least; float noise does not
        always,    ///< shuffle + deflate
        never,
    };
    Compression compression = Compression::measured;
    int level = 1;    ///< zlib's; bench/record has the figures behind the choice
    int threads = 0;  ///< that compress; 0: one per hardware thread. The bytes written do not depend on it.
};

}  // namespace faultline
