// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/products.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include <cublasLt.h>
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>

namespace faultline::gpt::on_device {
namespace {

void check(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    const cudaError_t error = cudaPeekAtLastError();  // which cuBLASLt does not pass on
    throw WorkError(fmt::format("device cuda: {}: {}{}", what, cublasLtGetStatusString(status),
                                error == cudaSuccess ? "" : fmt::format(" ({})", cudaGetErrorString(error))));
}
void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw WorkError(fmt::format("device cuda: {}: {}", what, cudaGetErrorString(error)));
}

template <class Handle, cublasStatus_t (*destroy)(Handle)>
struct Owned {
    Handle handle = nullptr;
    Owned() = default;
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() {
        if (handle != nullptr) (void)destroy(handle);
    }
};
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;

/// What cuBLASLt may rely on: up to 256 bytes.
std::uint32_t alignment_of(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    return static_cast<std::uint32_t>(std::min<std::uintptr_t>(256, address & (~address + 1)));
}

using Key = std::tuple<bool, bool, int, int, int, bool, int, int, int, bool, std::array<std::uint32_t, 3>>;

/// In the library's terms, which are column-major: c^T = op(b)^T op(a)^T.
struct Planned {
    Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> description;
    Layout left, right, out;
    cublasLtMatmulAlgo_t algorithm{};
    std::size_t workspace = 0;
};

}  // namespace

struct Products::State {
    cublasLtHandle_t handle = nullptr;
    Stream stream = nullptr;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;
    bool deterministic = true;
    std::map<Key, std::unique_ptr<Planned>> planned;

    ~State() {
        const auto alone = no_other_recording();
        planned.clear();
        if (handle != nullptr) (void)cublasLtDestroy(handle);
    }

    void run(const Product& p, cudaDataType_t operands, cudaDataType_t result, const void* a, const void* b, void* c,
             const void* bias) {
        const Key key{p.transpose_a,
                      p.transpose_b,
                      p.m,
                      p.n,
                      p.k,
                      p.add,
                      p.batch,
                      static_cast<int>(operands),
                      static_cast<int>(result),
                      bias != nullptr,
                      {alignment_of(a), alignment_of(b), alignment_of(c)}};
        auto found = planned.find(key);
        if (found == planned.end()) found = planned.emplace(key, plan(p, operands, result, a, b, c, bias)).first;
        multiply(p, *found->second, found->second->algorithm, a, b, c, bias);
    }

    void multiply(const Product& p, const Planned& how, const cublasLtMatmulAlgo_t& algorithm, const void* a,
                  const void* b, void* c, const void* bias) {
        if (bias != nullptr)
            check(cublasLtMatmulDescSetAttribute(how.description.handle, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                                 sizeof bias),
                  "a product's bias");
        const float one = 1, beta = p.add ? 1 : 0;
        check(cublasLtMatmul(handle, how.description.handle, &one, b, how.left.handle, a, how.right.handle, &beta, c,
                             how.out.handle, c, how.out.handle, &algorithm, workspace, workspace_bytes, stream),
              "a product");
    }

    std::unique_ptr<Planned> plan(const Product& p, cudaDataType_t operands, cudaDataType_t result, const void* a,
                                  const void* b, void* c, const void* bias) {
        auto how = std::make_unique<Planned>();
        check(cublasLtMatmulDescCreate(&how->description.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product");
        const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
            check(cublasLtMatmulDescSetAttribute(how->description.handle, attribute, &value, sizeof value),
                  "a product");
        };
        set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (bias != nullptr) {
            set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        }
        const auto layout = [&p](Layout& to, cudaDataType_t type, int rows, int cols) {
            check(cublasLtMatrixLayoutCreate(&to.handle, type, static_cast<std::uint64_t>(rows),
                                             static_cast<std::uint64_t>(cols), rows),
                  "a product's layout");
            if (p.batch == 1) return;
            const std::int32_t count = p.batch;
            const std::int64_t stride = std::int64_t{1} * rows * cols;
            check(cublasLtMatrixLayoutSetAttribute(to.handle, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
                  "a product's layout");
            check(cublasLtMatrixLayoutSetAttribute(to.handle, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                   sizeof stride),
                  "a product's layout");
        };
        layout(how->left, operands, p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k);
        layout(how->right, operands, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m);
        layout(how->out, result, p.n, p.m);

        Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference;
        check(cublasLtMatmulPreferenceCreate(&preference.handle), "a product's preference");
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
            check(cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, &value, sizeof value),
                  "a product's preference");
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(b));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(c));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(c));
        if (deterministic)  // in place, the parts of a split sum are added as they come
            prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE});
        std::array<cublasLtMatmulHeuristicResult_t, 8> candidates{};
        int count = 0;
        check(cublasLtMatmulAlgoGetHeuristic(handle, how->description.handle, how->left.handle, how->right.handle,
                                             how->out.handle, how->out.handle, preference.handle,
                                             deterministic ? 1 : static_cast<int>(candidates.size()), candidates.data(),
                                             &count),
              "looking for a product's algorithm");
        if (count == 0)
            throw WorkError(fmt::format("device cuda: cuBLASLt has no product of {} x {} x {}", p.m, p.n, p.k));
        std::size_t best = 0;
        if (!deterministic)
            best = fastest(p, *how, std::span(candidates).first(static_cast<std::size_t>(count)), a, b, c, bias);
        how->algorithm = candidates[best].algo;
        return how;
    }

    std::size_t fastest(const Product& p, const Planned& how, std::span<const cublasLtMatmulHeuristicResult_t> all,
                        const void* a, const void* b, void* c, const void* bias) {
        constexpr int repeats = 4;
        cudaEvent_t begin = nullptr, end = nullptr;
        check(cudaEventCreate(&begin), "an event");
        check(cudaEventCreate(&end), "an event");
        std::size_t best = 0;
        float least = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            multiply(p, how, all[i].algo, a, b, c, bias);
            check(cudaEventRecord(begin, stream), "timing a product");
            for (int r = 0; r < repeats; ++r) multiply(p, how, all[i].algo, a, b, c, bias);
            check(cudaEventRecord(end, stream), "timing a product");
            check(cudaEventSynchronize(end), "timing a product");
            float ms = 0;
            check(cudaEventElapsedTime(&ms, begin, end), "timing a product");
            if (i == 0 || ms < least) best = i, least = ms;
        }
        (void)cudaEventDestroy(begin);
        (void)cudaEventDestroy(end);
        return best;
    }
};

Products::Products(Stream stream, void* workspace, std::size_t workspace_bytes, bool deterministic)
    : state_(std::make_unique<State>()) {
    const auto alone = no_other_recording();
    check(cublasLtCreate(&state_->handle), "starting cuBLASLt");
    state_->stream = stream;
    state_->workspace = workspace;
    state_->workspace_bytes = workspace_bytes;
    state_->deterministic = deterministic;
}
Products::~Products() = default;

void Products::run(const Product& p, const float* a, const float* b, float* c, const float* bias) {
    state_->run(p, CUDA_R_32F, CUDA_R_32F, a, b, c, bias);
}
void Products::run(const Product& p, const Bf16* a, const Bf16* b, Bf16* c, const Bf16* bias) {
    state_->run(p, CUDA_R_16BF, CUDA_R_16BF, a, b, c, bias);
}
void Products::run(const Product& p, const Bf16* a, const Bf16* b, float* c) {
    state_->run(p, CUDA_R_16BF, CUDA_R_32F, a, b, c, nullptr);
}

}  // namespace faultline::gpt::on_device
