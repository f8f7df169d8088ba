#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TFLOP/s of PyTorch's FlashAttention-2 and cuDNN back ends, timed and counted as tensor_attention_bench and, with `backward`,
tensor_backward_bench do: median of 25 samples of 10 calls after 5 warm-ups, standard normal inputs, half of the products where
causal, a backward as 2.5 forwards.

    bench/tensor_kernel/torch_attention.py [backward] [batch heads kv_heads n head_dim causal(0|1)]     default: the two shapes of the table
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
    backward = sys.argv[1:2] == ["backward"]
    numbers = sys.argv[2:] if backward else sys.argv[1:]
    if len(numbers) == 6:
        *sizes, causal = (int(a) for a in numbers)
        shapes = [(*sizes, bool(causal))]
    elif numbers:
        sys.exit("torch_attention.py: expected backward or not, then no argument, or batch heads kv_heads n head_dim causal")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    for batch, heads, kv_heads, n, d, causal in shapes:
        torch.manual_seed(1)
        q = torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, kv_heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        dout = torch.randn_like(q)
        flops = 4 * batch * heads * n * n * d / (2 if causal else 1) * (2.5 if backward else 1)

        def attention():
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                if backward:
                    inputs = tuple(x.requires_grad_() for x in (q, k, v))
                    o = attention()
                    ms = median_ms(lambda: torch.autograd.grad(o, inputs, dout, retain_graph=True))
                else:
                    with torch.no_grad():
                        ms = median_ms(attention)
            mask = "causal" if causal else "full"
            print(f"B{batch} H{heads}/{kv_heads} N{n} d{d} {mask} bf16  {'backward ' * backward}{backend.name.lower():20} {ms:8.3f} ms "
                  f"{flops / ms * 1e-9:7.1f} TFLOP/s", flush=True)


main()
