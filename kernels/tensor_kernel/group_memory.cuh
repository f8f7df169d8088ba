// SPDX-License-Identifier: Apache-2.0
// Head groups of the host as the tensors of a call, and results on their way back.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/tensor_kernel/device_memory.cuh>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {

/// [groups * heads of a group, rows, head_dim], rounded to the kernel's type; select(g) gives the heads of group g.
template <class T, class Select>
std::vector<T> stored(std::size_t groups, const Select& select) {
    std::vector<T> out;
    for (std::size_t g = 0; g < groups; ++g)
        for (const MatrixView<const double>& m : select(g))
            for (std::ptrdiff_t i = 0; i < m.rows; ++i)
                for (std::ptrdiff_t j = 0; j < m.cols; ++j) out.push_back(rounded<T>(m(i, j)));
    return out;
}

/// The next [rows, cols] of what `from` points at.
template <class T>
Matrix next_matrix(const T*& from, std::ptrdiff_t rows, std::ptrdiff_t cols) {
    Matrix out(rows, cols);
    std::transform(from, from + rows * cols, out.values.begin(), [](T x) { return static_cast<float>(x); });
    from += rows * cols;
    return out;
}

/// A ForwardCall or BackwardCall of these groups (one key head each, alike) with sizes, scale and the contiguous strides of
/// q, k, v and o; no pointers yet.
template <class Call>
Call call_of(std::span<const HeadGroup> groups) {
    const HeadGroup& first = groups.front();
    Call call;
    call.kv_heads = static_cast<int>(groups.size());
    call.heads = call.kv_heads * static_cast<int>(first.q.size());
    call.n_q = static_cast<int>(first.q.front().rows);
    call.n_k = static_cast<int>(first.k.rows);
    call.head_dim = static_cast<int>(first.k.cols);
    call.causal = first.causal;
    call.scale = first.scale;
    call.q_strides = call.o_strides = contiguous(call.heads, call.n_q, call.head_dim);
    call.k_strides = call.v_strides = contiguous(call.kv_heads, call.n_k, call.head_dim);
    return call;
}

}  // namespace faultline::tensor_kernel
