// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <faultline/tensor_kernel/forward_beside.cuh>
#include <faultline/tensor_kernel/forward_launch.cuh>
#include <faultline/tensor_kernel/recording.hpp>

namespace faultline::tensor_kernel {
namespace {

/// Blocks that look at tiles. One that is looked at takes about twice as long (docs/results/tensor-kernel-forward.md), so that of
/// the multiprocessors' time they take 2 f / (1 + f); twice as many blocks as that end well before the others, which then find
/// their multiprocessors free, and are few, since each of these begins and ends once more.
int recording_blocks(double fraction, int tiles) {
    const double units = multiprocessors(), share = 2 * fraction / (1 + fraction);
    const double most = std::min(units, fraction < 1 ? std::ceil(2 * fraction * tiles) : tiles);
    return static_cast<int>(std::clamp(std::ceil(2 * share * units), 1.0, std::max(1.0, most)));
}

template <int d>
void launch_of(const ForwardCall& call, const ForwardKernel& kernel, const ForwardRecorder& recorder,
               cudaStream_t stream) {
    using T = __nv_bfloat16;
    using Tiles = ForwardTiles<T, d>;
    using Rec = Recorder<T, d, Tiles::block_k>;
    static_assert(Tiles::block_q == 128 && Tiles::block_k == 128);  // recording.hpp's tiles
    const RecordedShape shape(call);
    const std::uint64_t threshold = sample::threshold(recorder.fraction);
    // In each part of the tiles about one that is looked at.
    const int part = static_cast<int>(std::clamp(0x1p32 / static_cast<double>(threshold), 1.0, 32.0));
    const typename Rec::Arguments recording{recorder.cells,   threshold,     recorder.seed,
                                            shape.row_groups, shape.k_tiles, part};
    ForwardArguments<T> in = with_maps<T, Tiles>(call);
    set_launch<T, Tiles>(in, call, kernel, stream);
    const bool is_all = recording.is_all();
    const int blocks = recording_blocks(std::min(recorder.fraction, 1.0), in.tiles);
    const auto launched = [&]<class Variant>(Variant) {
        if (kernel.variant != Variant::value) return false;
        // Those that are looked at come first, since they take longer and would end late after all others, which take the
        // multiprocessors that are free, and the rest when these blocks end.
        const auto run = blocks < multiprocessors() ? forward_recorded<T, Tiles, Variant, Rec, true>
                                                    : forward_recorded<T, Tiles, Variant, Rec, false>;
        start_forward<Tiles, Rec>(run, blocks, stream, true, in, recording);
        if (!is_all)
            start_forward<Tiles, NoRecorder>(forward_others<T, Tiles, Variant, Rec>,
                                             std::min(in.tiles, multiprocessors()), stream, true, in, recording);
        return true;
    };
    using enum ArgumentForm;
    if (!launched(Compiled<>{}) && !launched(Compiled<subtract_then_scale>{}) &&
        !launched(Compiled<fused, false, true>{}))
        throw std::invalid_argument("tensor_kernel: not one of the kernels that has_recorder() names");
}

/// Whether a query tile is looked at. Where none is, the plain kernel alone runs.
bool draws_any(const ForwardCall& call, const ForwardRecorder& recorder) {
    const std::uint64_t threshold = sample::threshold(recorder.fraction);
    for (int head = 0; head < call.batch * call.heads; ++head)
        for (int tile = 0; tile < (call.n_q + 127) / 128; ++tile)
            if (sample::tile_bits(recorder.seed, head, tile) < threshold) return true;
    return false;
}

}  // namespace

void launch_recorded_of(const ForwardCall& call, const ForwardKernel& kernel, const ForwardRecorder& recorder,
                        cudaStream_t stream) {
    if (!draws_any(call, recorder)) return launch_forward(call, kernel, stream);
    if (call.head_dim == 64) return launch_of<64>(call, kernel, recorder, stream);
    launch_of<128>(call, kernel, recorder, stream);
}

}  // namespace faultline::tensor_kernel
