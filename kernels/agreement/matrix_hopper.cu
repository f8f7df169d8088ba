// SPDX-License-Identifier: Apache-2.0
// wgmma, and mma.sync of fp8: code for compute capability 9.0 alone.
#include <faultline/agreement/matrix_probe.cuh>

#include <faultline/base/cuda_device.cuh>

namespace faultline::agreement {

MatrixFinding put_to_card(MatrixInstruction instruction, std::span<const Rival> given, const RandomStream& stream,
                          int tiles) {
    expect_cuda_device();
    Rivals rivals{};
    for (const Rival& rival : given.first(given.size() < max_rivals ? given.size() : max_rivals))
        rivals.list[rivals.count++] = rival;
    switch (instruction) {
        case MatrixInstruction::wgmma_bf16:
            return put<WgmmaBf16>(rivals, stream, tiles);
        case MatrixInstruction::wgmma_fp16:
            return put<WgmmaFp16>(rivals, stream, tiles);
        case MatrixInstruction::wgmma_fp16_half:
            return put<WgmmaFp16Half>(rivals, stream, tiles);
        case MatrixInstruction::wgmma_tf32:
            return put<WgmmaTf32>(rivals, stream, tiles);
        case MatrixInstruction::wgmma_e4m3:
            return put<WgmmaE4m3>(rivals, stream, tiles);
        case MatrixInstruction::wgmma_e5m2:
            return put<WgmmaE5m2>(rivals, stream, tiles);
        case MatrixInstruction::wgmma_e4m3_half:
            return put<WgmmaE4m3Half>(rivals, stream, tiles);
        case MatrixInstruction::wgmma_e5m2_half:
            return put<WgmmaE5m2Half>(rivals, stream, tiles);
        case MatrixInstruction::mma_e4m3:
            return put<MmaE4m3>(rivals, stream, tiles);
        case MatrixInstruction::mma_e5m2:
            return put<MmaE5m2>(rivals, stream, tiles);
        default:
            return put_mma(instruction, rivals, stream, tiles);
    }
}

}  // namespace faultline::agreement
