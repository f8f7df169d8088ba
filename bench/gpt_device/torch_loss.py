#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The loss of GPT-2 trained by `faultline train --device cuda` beside PyTorch's (torch.compile, bf16 autocast, FlashAttention-2
back end, fused AdamW), on the same text, with the same schedule, three seeds of each.

    bench/gpt_device/torch_loss.py build/cuda/experiments/cli/faultline --config experiments/configs/gpt2-124m.toml --text FILE

The text is read as bytes, which are written as ids of nanoGPT's format. A seed draws the start and the windows, of each side in
its own way; the loss of a run is the mean of its last --last steps. Prints both sides' means and spreads, and whether they are
within the larger spread of each other.
"""
import argparse
import array
import json
import math
import os
import subprocess
import sys
import tempfile
import tomllib

from torch_peer import torch_steps


def rate_of(c, steps, warmup):
    def rate(step):
        if step < warmup:
            return c["lr"] * (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return c["final-lr"] + 0.5 * (1 + math.cos(math.pi * done)) * (c["lr"] - c["final-lr"])

    return rate


def our_runs(a, folder, c):
    """Of each seed one; all of them, and PyTorch, share the card."""
    return [subprocess.Popen(
        [a.program, "train", "--config", a.config, "--device", "cuda", "--data", folder, "--data-format", "nanogpt",
         "--no-deterministic", "--no-monitors", "--monitor-every", "0", "--validate-every", "0", "--checkpoint-every", "0",
         "--quiet", "--steps", str(a.steps), "--warmup", str(a.warmup), "--batch", str(c["batch"]), "--seed", str(seed), "-o",
         os.path.join(folder, f"ours{seed}.h5")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for seed in range(a.seeds)]


def our_losses(runs, folder):
    import h5py

    losses = []
    for seed, run in enumerate(runs):
        error = run.communicate()[1]
        if run.returncode != 0:
            sys.exit(error)
        with h5py.File(os.path.join(folder, f"ours{seed}.h5"), "r") as file:
            losses.append([float(x) for x in file["steps/loss"][()]])
    return losses


def main():
    p = argparse.ArgumentParser()
    p.add_argument("program")
    p.add_argument("--config", required=True)
    p.add_argument("--text", required=True)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--warmup", type=int, default=100)
    p.add_argument("--batch", type=int)
    p.add_argument("--last", type=int, default=50)
    p.add_argument("--seeds", type=int, default=3)
    a = p.parse_args()
    with open(a.config, "rb") as file:
        c = tomllib.load(file)["train"]
    if a.batch:
        c["batch"] = a.batch
    with tempfile.TemporaryDirectory() as folder:
        with open(a.text, "rb") as file:
            text = file.read()
        held = len(text) // 16
        for name, part in (("train", text[:-held]), ("val", text[-held:])):
            with open(os.path.join(folder, name + ".bin"), "wb") as file:
                array.array("H", list(part)).tofile(file)
        found, compiled, of = {}, {}, {}
        runs = our_runs(a, folder, c)
        of["PyTorch"] = [[float(x) for x in torch_steps(c, folder, a.steps, seed, rate=rate_of(c, a.steps, a.warmup),
                                                        reuse=compiled)] for seed in range(a.seeds)]
        of["faultline"] = our_losses(runs, folder)
        for side in ("faultline", "PyTorch"):
            for seed, losses in enumerate(of[side]):
                last = sum(losses[-a.last:]) / a.last
                found.setdefault(side, []).append(last)
                print(f"{side:10} seed {seed}: " + "  ".join(f"{i}: {losses[i]:.3f}" for i in
                      sorted({0, 10, 50, 100, 200, 500, a.steps - 1}) if i < len(losses)) + f"  last {a.last}: {last:.4f}",
                      flush=True)
        spreads = {side: max(x) - min(x) for side, x in found.items()}
        means = {side: sum(x) / len(x) for side, x in found.items()}
        gap = means["faultline"] - means["PyTorch"]
        print(json.dumps({"means": means, "spreads": spreads, "gap": gap, "within": abs(gap) <= max(spreads.values())}))


if __name__ == "__main__":
    main()
