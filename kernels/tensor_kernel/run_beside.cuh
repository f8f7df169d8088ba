// SPDX-License-Identifier: Apache-2.0
// A launch that may begin beside the one before it in its stream.
#pragma once

#include <faultline/tensor_kernel/device_memory.cuh>

namespace faultline::tensor_kernel {

/// kernel(arguments…). beside_the_last: as soon as every block of the kernel launched last has called let_dependents_begin();
/// a block of this kernel has then to call wait_for_dependency() before it ends, so that what comes next in the stream finds both
/// done.
template <class... Parameters, class... Arguments>
void run_beside(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t bytes, cudaStream_t stream,
                bool beside_the_last, const Arguments&... arguments) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = beside_the_last ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a tensor-core kernel");
}

}  // namespace faultline::tensor_kernel
