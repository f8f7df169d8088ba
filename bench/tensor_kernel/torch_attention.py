#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TFLOP/s of PyTorch's FlashAttention-2 and cuDNN back ends, forward, timed and counted as tensor_attention_bench does: median
of 25 samples of 10 calls after 5 warm-ups, standard normal inputs, half of the products where causal.

    bench/tensor_kernel/torch_attention.py [batch heads kv_heads n head_dim causal(0|1)]     default: the two shapes of the table
"""
import statistics
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    sys.exit("torch_attention.py: PyTorch cannot be imported: expected it for the comparison")


def median_ms(call, warm_ups=5, samples=25, calls=10):
    times = []
    for sample in range(-warm_ups, samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        if sample >= 0:
            times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def main():
    shapes = [(8, 16, 16, 4096, 128, True), (32, 12, 12, 1024, 64, True)]
    if len(sys.argv) == 7:
        *sizes, causal = (int(a) for a in sys.argv[1:])
        shapes = [(*sizes, bool(causal))]
    elif len(sys.argv) != 1:
        sys.exit("torch_attention.py: expected no argument, or batch heads kv_heads n head_dim causal")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    for batch, heads, kv_heads, n, d, causal in shapes:
        torch.manual_seed(1)
        q = torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, kv_heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        flops = 4 * batch * heads * n * n * d / (2 if causal else 1)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend), torch.no_grad():
                ms = median_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads))
            mask = "causal" if causal else "full"
            print(f"B{batch} H{heads}/{kv_heads} N{n} d{d} {mask} bf16  {backend.name.lower():20} {ms:8.3f} ms "
                  f"{flops / ms * 1e-9:7.1f} TFLOP/s", flush=True)


main()
