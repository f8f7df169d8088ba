#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of `faultline train` and of the same model, batch and optimizer in PyTorch (CPU, eager, fp32 and bf16
autocast), in turns in one run so that the machine's moods meet both alike. PyTorch is no dependency: run this where it is.

    bench/gpt/torch_gpt.py build/release/experiments/cli/faultline [--threads 2] [--width 64 --layers 2 --heads 2 --context 128]
"""
import argparse
import json
import math
import subprocess
import sys
import tempfile
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError:
    sys.exit("torch_gpt.py: PyTorch cannot be imported: expected it for the comparison")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fc, self.proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (y.view(b, n, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, -1))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c)
        x = x + self.out(o)
        return x + self.proj(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.token, self.place = nn.Embedding(256, a.width), nn.Embedding(a.context, a.width)
        self.blocks = nn.ModuleList(Block(a.width, a.heads) for _ in range(a.layers))
        self.norm = nn.LayerNorm(a.width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                branch = name.endswith(("out.weight", "proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * a.layers) if branch else 0.02)

    def forward(self, ids, targets):
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def torch_rate(a, data, autocast):
    torch.manual_seed(0)
    model = Gpt(a)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0)
    begin = None
    for step in range(a.steps + 5):
        if step == 5:
            begin = time.perf_counter()
        at = torch.randint(len(data) - a.context - 1, (a.batch,))
        x = torch.stack([data[i : i + a.context] for i in at]).long()
        y = torch.stack([data[i + 1 : i + 1 + a.context] for i in at]).long()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return a.steps * a.batch * a.context / (time.perf_counter() - begin)


def our_rate(a, path, precision):
    said = subprocess.run(
        [a.program, "train", "--data", path, "--json", "--quiet", "--threads", str(a.threads), "--steps", str(a.steps),
         "--layers", str(a.layers), "--width", str(a.width), "--heads", str(a.heads), "--context", str(a.context),
         "--batch", str(a.batch), "--precision", precision, "--validate-every", "0"],
        check=True, capture_output=True, text=True)
    return json.loads(said.stdout)["tokens_per_second"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("program")
    for name, value in dict(threads=2, layers=2, width=64, heads=2, context=128, batch=16, steps=100, rounds=5).items():
        p.add_argument("--" + name, type=int, default=value)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    text = "".join(f"The square of {i} is {i * i}.\n" for i in range(50000)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rates = {}
    with tempfile.NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        for _ in range(a.rounds):
            for precision in ("fp32", "bf16"):
                rates.setdefault(f"faultline {precision}", []).append(our_rate(a, file.name, precision))
                rates.setdefault(f"PyTorch {torch.__version__} {precision}", []).append(
                    torch_rate(a, data, precision == "bf16"))
    print(f"{a.layers} layers, width {a.width}, {a.heads} heads, context {a.context}, batch {a.batch}, {a.threads} threads")
    for name, values in rates.items():
        values.sort()
        print(f"  {name:28} {values[len(values) // 2]:10.0f} tokens/s, median of {len(values)} "
              f"({values[0]:.0f} to {values[-1]:.0f})")


if __name__ == "__main__":
    main()
