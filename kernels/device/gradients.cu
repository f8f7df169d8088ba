// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/gradients.cuh>

#include <optional>

#include <faultline/base/cuda_status.cuh>
#include <faultline/device/gradient_plan.hpp>
#include <faultline/device/gradient_tile.cuh>
#include <faultline/device/hidden_pairs.hpp>

namespace faultline::device {

namespace {

using namespace gradients;
using emulated::BackwardPart;
using emulated::BackwardRows;
using emulated::HeadProblem;

inline constexpr int blocks_at_once = 2;  ///< on a multiprocessor

[[maybe_unused]] __device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

/// Adds the largest absolute value of x to *largest, as its bits; false where an element is not finite.
__device__ bool are_finite(const View<const double>& x, unsigned long long* largest) {
    bool finite = true;
    double mine = 0;
    for (std::ptrdiff_t i = threadIdx.x; i < x.rows * x.cols; i += blockDim.x) {
        const double size = fabs(x.row(i / x.cols)[i % x.cols]);
        finite = finite && size <= DBL_MAX;
        mine = fmax(mine, size);
    }
    atomicMax(largest, static_cast<unsigned long long>(__double_as_longlong(mine)));  // in order, of numbers from 0 on
    return finite;
}

/// Opens the heads of which hidden pairs may be no zeros (hidden_pairs.hpp). A block for each.
__global__ void __launch_bounds__(threads)
    open_heads(GradientPlan g, const HeadProblem* problems, const BackwardRows* all_rows, int* open) {
    __shared__ unsigned long long largest[5];
    const HeadProblem& x = problems[blockIdx.x];
    if (threadIdx.x < 5) largest[threadIdx.x] = 0;
    __syncthreads();
    const View<const double> delta{all_rows[blockIdx.x].delta, 1, g.n_q, g.n_q};
    bool finite = true;
    const View<const double>* const all[] = {&x.dout, &x.v, &delta, &x.q, &x.k};
    for (int i = 0; i < 5; ++i) finite = are_finite(*all[i], &largest[i]) && finite;
    // Of a row without a key plus infinity is usual, and harmless: exp(-inf - inf) is 0, exp(-inf + inf) is NaN.
    for (int i = static_cast<int>(threadIdx.x); i < g.n_q; i += static_cast<int>(blockDim.x))
        finite = finite && all_rows[blockIdx.x].reference[i] > -INFINITY;
    const bool all_finite = __syncthreads_and(finite) != 0;
    if (threadIdx.x != 0) return;
    const auto size = [&](int i) { return __longlong_as_double(static_cast<long long>(largest[i])); };
    if (!all_finite ||
        !hidden_pairs_are_zeros(g.largest_hidden, static_cast<double>(x.v.cols), size(0), size(1), size(2)))
        open[blockIdx.x] = 1;
}

/// Blocks that a head's rows, or keys, have, each of 64.
__host__ __device__ constexpr int blocks_of(int n) { return (n + side - 1) / side; }

struct BlockPlace {
    std::ptrdiff_t head;
    int of_head;  ///< which of the head's blocks
};
/// In one axis of the grid: another has room for 65,535 heads only.
[[maybe_unused]] __device__ __forceinline__ BlockPlace place_of_block(int n) {
    const auto blocks = static_cast<unsigned>(blocks_of(n));
    return {static_cast<std::ptrdiff_t>(blockIdx.x / blocks), static_cast<int>(blockIdx.x % blocks)};
}

/// dk and dv of 64 keys of a head.
template <Products products, int d>
__global__ void __launch_bounds__(threads, blocks_at_once)
    key_gradients(GradientPlan g, const HeadProblem* problems, const BackwardRows* all_rows, int* open) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
    extern __shared__ double2 memory[];
    auto& m = *reinterpret_cast<Shared<d>*>(memory);
    const auto [head, of_head] = place_of_block(g.n_k);
    const HeadProblem& x = problems[head];
    const BackwardRows& r = all_rows[head];
    const int key0 = of_head * side, keys = smaller(side, g.n_k - key0);
    bool usual = true;
    load<products, d>(x.k, key0, keys, m.k, usual);
    load<products, d>(x.v, key0, keys, m.v, usual);
    float dk[d / 16][4] = {}, dv[d / 16][4] = {};
    const TileAxis axis(g.n_q, g.block_q);
    bool first = true;
    for (int b = 0; b < axis.count(); ++b) {
        const TileRange tile = axis.walk(b, axis.count(), g.query_order);
        const int end = static_cast<int>(tile.first + tile.count);
        if (visible_keys(end - 1, g.n_q, g.n_k, g.causal) <= key0) continue;
        for (int row0 = static_cast<int>(tile.first); row0 < end; row0 += side) {
            const int rows = smaller(side, end - row0);
            if (visible_keys(row0 + rows - 1, g.n_q, g.n_k, g.causal) <= key0) continue;  // zeros: no sum changes
            __syncthreads();
            load<products, d>(x.q, row0, rows, m.q, usual);
            load<products, d>(x.dout, row0, rows, m.dout, usual);
            load_rows<products, d>(g, r, row0, rows, m, usual);
            __syncthreads();
            score_tile<products, d, true>(g, m, row0, rows, key0, keys, usual);
            __syncthreads();
            if constexpr (products == Products::groups) {
                add_gradients_in_groups<d>(dv, m.p, m.dout, usual);
                add_gradients_in_groups<d>(dk, m.ds, m.q, usual);
            } else {
                add_gradients<products, d, true>(dv, m.p, m.dout);
                add_gradients<products, d, true>(dk, m.ds, m.q);
            }
        }
        if (!g.dkv_added) continue;
        store<products, d>(dk, r.dk, key0, g.dk, true, first, usual);
        store<products, d>(dv, r.dv, key0, g.dv, true, first, usual);
        first = false;
    }
    if (!g.dkv_added || first) {
        store<products, d>(dk, r.dk, key0, g.dk, false, true, usual);
        store<products, d>(dv, r.dv, key0, g.dv, false, true, usual);
    }
    if (!usual) open[head] = 1;
#endif
}

/// dq of 64 rows of a head.
template <Products products, int d>
__global__ void __launch_bounds__(threads, blocks_at_once)
    query_gradients(GradientPlan g, const HeadProblem* problems, const BackwardRows* all_rows, const int* keys_open,
                    int* open) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
    extern __shared__ double2 memory[];
    auto& m = *reinterpret_cast<Shared<d>*>(memory);
    const auto [head, of_head] = place_of_block(g.n_q);
    const HeadProblem& x = problems[head];
    const BackwardRows& r = all_rows[head];
    const int row0 = (blocks_of(g.n_q) - 1 - of_head) * side, rows = smaller(side, g.n_q - row0);
    bool usual = keys_open[head] == 0;
    load<products, d>(x.q, row0, rows, m.q, usual);
    load<products, d>(x.dout, row0, rows, m.dout, usual);
    load_rows<products, d>(g, r, row0, rows, m, usual);
    float dq[d / 16][4] = {};
    const int last = static_cast<int>(visible_keys(row0 + rows - 1, g.n_q, g.n_k, g.causal));
    const TileAxis axis(g.n_k, g.block_k);
    bool first = true;
    for (int a = 0; a < axis.count(); ++a) {
        const TileRange tile = axis.walk(a, axis.count(), g.key_order);
        const int end = static_cast<int>(tile.first + tile.count);
        if (last <= tile.first) continue;
        for (int key0 = static_cast<int>(tile.first); key0 < end && key0 < last; key0 += side) {
            const int keys = smaller(side, end - key0);
            __syncthreads();
            load<products, d>(x.k, key0, keys, m.k, usual);
            load<products, d>(x.v, key0, keys, m.v, usual);
            __syncthreads();
            score_tile<products, d, false>(g, m, row0, rows, key0, keys, usual);
            __syncthreads();
            if constexpr (products == Products::groups)
                add_gradients_in_groups<d>(dq, m.ds, m.k, usual);
            else
                add_gradients<products, d, false>(dq, m.ds, m.k);
        }
        if (!g.dq_added) continue;
        store<products, d>(dq, r.dq, row0, g.dq, true, first, usual);
        first = false;
    }
    if (!g.dq_added || first) store<products, d>(dq, r.dq, row0, g.dq, false, true, usual);
    if (!usual) open[head] = 1;
#endif
}
template <class Kernel, class... Arguments>
void start(Kernel kernel, std::size_t shared, int blocks, std::size_t heads, cudaStream_t stream,
           const Arguments&... arguments) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
               "setting the kernel up");
    kernel<<<static_cast<unsigned>(static_cast<std::size_t>(blocks) * heads), threads, shared, stream>>>(arguments...);
    check_cuda(cudaGetLastError(), "starting the kernel");
}

template <Products products, int d>
const int* start_part(const GradientPlan& g, const emulated::BackwardJob& job, std::size_t heads, int* open,
                      cudaStream_t stream) {
    int* const of_queries = open + heads;
    if (job.part == BackwardPart::key) {  // the first
        open_heads<<<static_cast<unsigned>(heads), threads, 0, stream>>>(g, job.problems, job.rows, open);
        check_cuda(cudaGetLastError(), "starting the kernel");
        start(key_gradients<products, d>, sizeof(Shared<d>), blocks_of(g.n_k), heads, stream, g, job.problems, job.rows,
              open);
        return open;
    }
    start(query_gradients<products, d>, sizeof(Shared<d>), blocks_of(g.n_q), heads, stream, g, job.problems, job.rows,
          open, of_queries);
    return of_queries;
}
template <Products products>
const int* start_size(const GradientPlan& g, std::ptrdiff_t d, const emulated::BackwardJob& job, std::size_t heads,
                      int* open, cudaStream_t stream) {
    return d == 64 ? start_part<products, 64>(g, job, heads, open, stream)
                   : start_part<products, 128>(g, job, heads, open, stream);
}

/// Whether the card's unit has the rules that were measured, and the code is what was compiled for it.
bool is_hopper() {
    static const bool is = [] {
        int device = 0, major = 0, minor = 0;
        check_cuda(cudaGetDevice(&device), "choosing a device");
        check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking the device");
        check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking the device");
        if (major != 9 || minor != 0) return false;
        cudaFuncAttributes code{};
        check_cuda(cudaFuncGetAttributes(&code, key_gradients<Products::sixteen, 128>), "loading the kernels");
        return code.ptxVersion == 90;
    }();
    return is;
}

}  // namespace

bool has_gradients(const emulated::FlatPlan& plan, const HeadProblem& head, BackwardPart part) {
    return (part == BackwardPart::key || part == BackwardPart::query) && is_hopper() && head.n_q() > 0 &&
           head.n_k() > 0 && gradient_request(plan, head).has_value();
}

const int* start_gradients(const emulated::BackwardJob& job, const emulated::FlatPlan& plan,
                           const std::vector<HeadProblem>& problems, int* open, cudaStream_t stream) {
    const std::optional<GradientRequest> request = gradient_request(plan, problems.front());
    const std::ptrdiff_t d = problems.front().q.cols;
    if (request->products == Products::sixteen)
        return start_size<Products::sixteen>(request->plan, d, job, problems.size(), open, stream);
    if (request->products == Products::groups)
        return start_size<Products::groups>(request->plan, d, job, problems.size(), open, stream);
    return start_size<Products::eight>(request->plan, d, job, problems.size(), open, stream);
}
}  // namespace faultline::device
