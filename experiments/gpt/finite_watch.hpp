// SPDX-License-Identifier: Apache-2.0
// Names the first value of a step that is not finite.
#pragma once

#include <cstddef>
#include <string>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline::gpt {

/// Looks at values in the order in which a pass computes them. One for each chunk of a batch; the one whose ordinal is
/// smallest names the site, so the answer does not depend on the number of threads.
struct FiniteWatch {
    long ordinal = 0;    ///< values looked at so far
    long found_at = -1;  ///< ordinal of the first that was not finite
    std::string site;    ///< "layer1.w_q input": what it was
    std::ptrdiff_t row = 0, column = 0;

    template <class T>
    void look(int layer, const char* name, MatrixView<const T> value) {
        const long at = ordinal++;
        if (found_at >= 0) return;
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j)
                if (!(value(i, j) - value(i, j) == 0)) {
                    found_at = at;
                    site = layer < 0 ? std::string(name) : "layer" + std::to_string(layer) + "." + name;
                    row = i;
                    column = j;
                    return;
                }
    }
};

}  // namespace faultline::gpt
