// SPDX-License-Identifier: Apache-2.0
// A fault applied to one tile: the function that both kinds of injectors stand on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include <faultline/cpu/alteration.hpp>
#include <faultline/injectors/fault.hpp>
#include <faultline/injectors/realised.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// Where a tile stands: names the random numbers, and the signs that persist.
struct FaultPlace {
    std::int64_t step = 0;
    int layer = 0;
    int head = 0;            ///< of the layer, the batch not counted
    int batch = 0;           ///< batch element, or replica
    std::uint64_t tile = 0;  ///< names the tile within the head: first row and first key, or a tensor's number
    int part = 0;            ///< among tiles of one name, see TileAt::part
    int heads = 1;           ///< model sites: the columns are this many equal blocks, one for each head
    /// Row i has columns j < visible0 + i; the others are masked, and stay: a fault does not make the masked visible.
    std::ptrdiff_t visible0 = std::numeric_limits<std::ptrdiff_t>::max() / 2;
    bool skip_zeros = false;  ///< zeros are masked too (by a bias of -inf)
};

/// Changes the values in place, each by what the law asks for, held in `format` as the fault says (`exact`: not rounded).
/// Elements that are not finite stay. A magnitude of zero changes no bit. Deterministic from the arguments alone.
/// T is float or double; float values are computed in binary64 and rounded once more to nearest on storing.
/// RequestError where the magnitude is in ulps and the format is `exact`.
template <class T>
Realised apply_fault(const Fault& fault, const FaultPlace& place, Format format, MatrixView<T> values);

/// apply_fault of the tiles of one head, but for place.tile and part, as data.
[[nodiscard]] Alteration alteration_of(const Fault& fault, const FaultPlace& place, Format format);

}  // namespace faultline
