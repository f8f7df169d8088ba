# SPDX-License-Identifier: Apache-2.0
"""A tiled attention forward and backward in numpy that rounds where FlashAttention-2 does and shares no code with Faultline: what
`faultline check` is asked about. Sums are those of numpy's float32 products and of tiles of 64 keys, so that their order is not
the plan's, as a real kernel's is not. A fault changes one value by a factor, or truncates it.

Rounding points: flash-attention 0251105a, csrc/flash_attn/src (softmax.h:76-88, 165, 180; flash_fwd_kernel.h:354, 443;
flash_bwd_kernel.h:536-594, 682)."""
import json
import struct

import numpy as np

LOG2E = 1.4426950408889634


def to_bf16(x):
    """float32 rounded to bfloat16, to nearest, ties to even; held as float32. Finite values alone."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def to_fp16(x):
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


CASTS = {"bf16": to_bf16, "fp16": to_fp16}


def truncated(x, bits):
    """Towards zero to `bits` significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32)


def head(q, k, v, do, cast, fault=None, size=0.0, block=64):
    """[n, d] of one causal head, float32 that hold values of the low format: {"o", "dq", "dk", "dv", "lse"} as they are stored.
    fault: the name of a value in FAULTS."""
    n, d = q.shape
    scale = np.float32(1 / np.sqrt(d))
    if fault == "scale":
        scale = np.float32(scale * (1 + size))
    to_log2 = np.float32(float(scale) * LOG2E)
    factor = np.float32(1 + size)

    def made(name, x):
        return (x * factor).astype(np.float32) if fault == name else x

    hidden = np.triu(np.ones((n, n), bool), 1)
    o = np.zeros((n, d), np.float32)
    maximum = np.full((n, 1), -np.inf, np.float32)
    total = np.zeros((n, 1), np.float32)
    for j in range(0, n, block):
        s = q @ k[j:j + block].T
        s[hidden[:, j:j + block]] = -np.inf
        new = np.maximum(maximum, s.max(1, keepdims=True))
        rescale = np.exp2((maximum - new) * to_log2)
        # The product and the difference round once: in float64 the product is exact.
        p = np.exp2((s.astype(np.float64) * to_log2 - (new * to_log2).astype(np.float32)).astype(np.float32))
        total = total * rescale + p.sum(1, keepdims=True, dtype=np.float32)
        low = cast(p)
        if fault == "p":
            low = cast(p * factor)
        elif fault == "p toward zero":
            low = truncated(p, int(size))
        o = o * rescale + low @ v[j:j + block]
        maximum = new
    total = made("row sum", total)
    lse = (maximum * np.float32(scale) + np.log(total)).astype(np.float32)
    o = made("o", (o / total).astype(np.float32))
    if fault == "one element of o":
        o[n // 2, d // 2] *= factor
    o = cast(truncated(o, int(size)) if fault == "o toward zero" else o)

    s = q @ k.T
    p = np.exp2((s.astype(np.float64) * to_log2 - (lse * np.float32(LOG2E)).astype(np.float32)).astype(np.float32))
    p[hidden] = 0
    delta = made("delta", (do * o).sum(1, keepdims=True, dtype=np.float32))
    ds = cast((p * (do @ v.T - delta)).astype(np.float32))
    if fault == "ds toward zero":
        ds = truncated((p * (do @ v.T - delta)).astype(np.float32), int(size))
    return {"o": o, "dq": cast(made("dq", (ds @ k) * scale)), "dk": cast(made("dk", (ds.T @ q) * scale)),
            "dv": cast(cast(p).T @ do), "lse": lse[:, 0]}


# What a fault multiplies by 1 + size; those toward zero keep `size` bits, p and ds in place of the cast, o before it.
FACTORS = ("scale", "row sum", "p", "o", "one element of o", "delta", "dq", "dk")
TRUNCATIONS = ("p toward zero", "o toward zero", "ds toward zero")


def inputs(rng, kind, n, d, cast):
    """q, k, v, do of one head."""
    q, k, v, do = (rng.standard_normal((n, d)).astype(np.float32) for _ in range(4))
    if kind == "large logits":
        q *= 8
    if kind == "large key mean":
        k += 4 * rng.standard_normal((1, d)).astype(np.float32)
    return [cast(x) for x in (q, k, v, do)]


def write(path, heads, low):
    """Heads of one layer with what the kernel returned, as safetensors: [1, heads, n, d] in the low format, lse in float32."""
    code = {"bf16": "BF16", "fp16": "F16"}[low]
    tensors, where, blobs = {}, 0, []
    for name in ("q", "k", "v", "do", "numpy.o", "numpy.dq", "numpy.dk", "numpy.dv", "numpy.lse"):
        x = np.stack([h[name] for h in heads])[None].astype(np.float32)
        if name.endswith("lse"):
            blob, dtype = x.tobytes(), "F32"
        elif low == "bf16":
            blob, dtype = (x.view(np.uint32) >> 16).astype(np.uint16).tobytes(), code
        else:
            blob, dtype = x.astype(np.float16).tobytes(), code
        tensors["layer0." + name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [where, where + len(blob)]}
        where += len(blob)
        blobs.append(blob)
    tensors["__metadata__"] = {"causal": "true"}
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + b"".join(blobs))


def layer(path, seed, kind="normal", low="bf16", n=128, d=64, count=2, fault=None, size=0.0):
    """A capture of `count` heads drawn from the seed."""
    rng = np.random.default_rng(seed)
    heads = []
    for _ in range(count):
        q, k, v, do = inputs(rng, kind, n, d, CASTS[low])
        left = head(q, k, v, do, CASTS[low], fault, size)
        heads.append({"q": q, "k": k, "v": v, "do": do, **{"numpy." + name: x for name, x in left.items()}})
    write(path, heads, low)
