// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_core/ordered.hpp>

#include <cmath>

#include <faultline/base/clones.hpp>
#include <faultline/tensor_core/instruction_set.hpp>
#include <faultline/tensor_core/lanes.hpp>
#include <faultline/tensor_core/ordered_block.hpp>

namespace faultline::ordered {
namespace {

using lanes::Double8;
using lanes::Float16;
using lanes::load;
using lanes::store;
using lanes::width;
static_assert(width == block_width);

template <class T, class Vector>
[[gnu::always_inline]] inline void multiply_then_add(const Block<T>& g) {
    constexpr int vectors = width * sizeof(T) / sizeof(Vector), lane_count = sizeof(Vector) / sizeof(T);
    Vector sum[row_block][vectors];
    for (int r = 0; r < row_block; ++r)
        for (int v = 0; v < vectors; ++v) load(sum[r][v], g.c[r] + v * lane_count);
    for (std::ptrdiff_t t = 0; t < g.k; ++t) {
        Vector x[vectors];
        for (int v = 0; v < vectors; ++v) load(x[v], g.b + t * g.stride + v * lane_count);
        for (int r = 0; r < row_block; ++r)
            for (int v = 0; v < vectors; ++v) sum[r][v] += g.a[r][t] * x[v];
    }
    for (int r = 0; r < row_block; ++r)
        for (int v = 0; v < vectors; ++v) store(g.c[r] + v * lane_count, sum[r][v]);
}

FAULTLINE_CLONES void exact(const Block<double>& g) { multiply_then_add<double, Double8>(g); }
FAULTLINE_CLONES void sequential(const Block<float>& g) { multiply_then_add<float, Float16>(g); }

FAULTLINE_CLONES void fma(const Block<float>& g) {
    for (int r = 0; r < row_block; ++r) {
        float sum[width];
        std::memcpy(sum, g.c[r], sizeof sum);
        for (std::ptrdiff_t t = 0; t < g.k; ++t) {
            const float x = g.a[r][t];
            const float* y = g.b + t * g.stride;
            for (int j = 0; j < width; ++j) sum[j] = std::fma(x, y[j], sum[j]);
        }
        std::memcpy(g.c[r], sum, sizeof sum);
    }
}

// The tree of neighbours without storing its leaves: like a binary counter, a finished subtree of 2^l leaves waits until
// its neighbour is finished. Subtrees left over at the end join from the smallest up, which is what "an odd one moves up
// unchanged" comes to.
FAULTLINE_CLONES void pairwise(const Block<float>& g) {
    constexpr int lane_count = sizeof(Float16) / sizeof(float), leaves = 8, leaf_level = 3;
    for (int r = 0; r < row_block; ++r) {
        for (int first = 0; first < width; first += lane_count) {
            Float16 waiting[64];
            int level[64];
            int depth = 0;
            const auto push = [&](const Float16& subtree, int l) __attribute__((always_inline)) {
                Float16 sum = subtree;
                while (depth > 0 && level[depth - 1] == l) {
                    sum = waiting[--depth] + sum;
                    ++l;
                }
                waiting[depth] = sum;
                level[depth++] = l;
            };
            std::ptrdiff_t t = 0;
            for (; t + leaves <= g.k; t += leaves) {
                Float16 p[leaves];
                for (int i = 0; i < leaves; ++i) {
                    load(p[i], g.b + (t + i) * g.stride + first);
                    p[i] *= g.a[r][t + i];
                }
                push(((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])), leaf_level);
            }
            for (; t < g.k; ++t) {
                Float16 p;
                load(p, g.b + t * g.stride + first);
                push(p * g.a[r][t], 0);
            }
            Float16 sum = waiting[--depth], start;
            while (depth > 0) sum = waiting[--depth] + sum;
            load(start, g.c[r] + first);
            store(g.c[r] + first, start + sum);
        }
    }
}

template <class T>
void run(void (*kernel)(const Block<T>&), MatrixView<const double> a, MatrixView<const double> b,
         const MatrixView<double>& c) {
    thread_local lanes::Packed<T> packed_a, packed_b;
    packed_a.assign(a);
    packed_b.assign(b);
    alignas(64) T sums[row_block][width];
    for (std::ptrdiff_t i = 0; i < c.rows; i += row_block) {
        const int rows = static_cast<int>(std::min<std::ptrdiff_t>(row_block, c.rows - i));
        for (std::ptrdiff_t j = 0; j < c.cols; j += width) {
            const int cols = static_cast<int>(std::min<std::ptrdiff_t>(width, c.cols - j));
            Block<T> block{{}, packed_b.row(0) + j, packed_b.stride, a.cols, sums};
            for (int r = 0; r < row_block; ++r) {  // rows past the end repeat the last one and are not stored
                const std::ptrdiff_t source = i + std::min(r, rows - 1);
                block.a[r] = packed_a.row(source);
                for (int v = 0; v < width; ++v) sums[r][v] = v < cols ? static_cast<T>(c(source, j + v)) : T{};
            }
            kernel(block);
            for (int r = 0; r < rows; ++r)
                for (int v = 0; v < cols; ++v) c(i + r, j + v) = static_cast<double>(sums[r][v]);
        }
    }
}

/// The kernels of `exact`, `sequential` and `pairwise` on this processor.
struct Kernels {
    void (*exact)(const Block<double>&) = ordered::exact;
    void (*sequential)(const Block<float>&) = ordered::sequential;
    void (*pairwise)(const Block<float>&) = ordered::pairwise;

    Kernels() {
#if defined(FAULTLINE_V3_KERNELS)
        if (!takes_v3_kernels()) return;
        exact = exact_v3;
        sequential = sequential_v3;
        pairwise = pairwise_v3;
#endif
    }
};

}  // namespace

void multiply_accumulate(Accumulation::Kind kind, MatrixView<const double> a, MatrixView<const double> b,
                         const MatrixView<double>& c) {
    using Kind = Accumulation::Kind;
    static const Kernels kernels;
    switch (kind) {
        case Kind::exact:
            run<double>(kernels.exact, a, b, c);
            break;
        case Kind::sequential:
            run<float>(kernels.sequential, a, b, c);
            break;
        case Kind::fma:
            run<float>(fma, a, b, c);
            break;
        case Kind::pairwise:
            run<float>(kernels.pairwise, a, b, c);
            break;
        case Kind::fused:
            break;
    }
}

}  // namespace faultline::ordered
