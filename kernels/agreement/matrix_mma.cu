// SPDX-License-Identifier: Apache-2.0
// mma.sync, from compute capability 8.0 on.
#include <faultline/agreement/matrix_probe.cuh>

namespace faultline::agreement {

MatrixFinding put_mma(MatrixInstruction instruction, const Rivals& rivals, const RandomStream& stream, int tiles) {
    switch (instruction) {
        case MatrixInstruction::mma_bf16:
            return put<MmaBf16>(rivals, stream, tiles);
        case MatrixInstruction::mma_fp16:
            return put<MmaFp16>(rivals, stream, tiles);
        case MatrixInstruction::mma_fp16_half:
            return put<MmaFp16Half>(rivals, stream, tiles);
        default:
            return put<MmaTf32>(rivals, stream, tiles);
    }
}

}  // namespace faultline::agreement
