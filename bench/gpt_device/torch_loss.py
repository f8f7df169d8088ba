#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The loss of GPT-2 trained by `faultline train --device cuda` beside PyTorch's (torch.compile, bf16 autocast, FlashAttention-2
back end, fused AdamW), on the same text, with the same schedule, three seeds of each.

    bench/gpt_device/torch_loss.py build/cuda/experiments/cli/faultline --config experiments/configs/gpt2-124m.toml --text FILE

The text is read as bytes, which are written as ids of nanoGPT's format; its last sixteenth is held out. A seed gives both sides
the same windows of the text in the same order, of the training and of the validation (windows.py); the start of the weights is
drawn alike, but by each side's own generator. The train loss of a run is the mean of its last --last steps. Prints each run's
losses, both sides' means and spreads over the seeds, and whether the means are within the larger spread of each other; --out
FILE.json keeps every step. --device cpu tries the script itself, with a small configuration.
"""
import argparse
import array
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tomllib

import h5py

from torch_peer import torch_steps
from windows import training_windows, validation_windows


def rate_of(c, steps, warmup):
    def rate(step):
        if step < warmup:
            return c["lr"] * (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return c["final-lr"] + 0.5 * (1 + math.cos(math.pi * done)) * (c["lr"] - c["final-lr"])

    return rate


def our_runs(a, folder, c):
    """Of each seed one; all of them, and PyTorch, share the card."""
    fastest = ["--no-deterministic", "--no-monitors"] if a.device == "cuda" else []
    return [subprocess.Popen(
        [a.program, "train", "--config", a.config, "--device", a.device, "--data", folder, "--data-format", "nanogpt",
         *fastest, "--monitor-every", "0", "--validate-every", str(a.every), "--validation-batches",
         str(a.validation_batches), "--checkpoint-every", "0", "--quiet", "--steps", str(a.steps), "--warmup", str(a.warmup),
         "--batch", str(c["batch"]), "--seed", str(seed), "-o", os.path.join(folder, f"ours{seed}.h5")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for seed in range(a.seeds)]


def our_losses(run, path):
    """(loss of each step, validation loss by the number of steps after which it was taken)"""
    error = run.communicate()[1]
    if run.returncode != 0:
        sys.exit(error)
    with h5py.File(path, "r") as file:
        held = file["steps/validation_loss"][()]
        return [float(x) for x in file["steps/loss"][()]], {i + 1: float(x) for i, x in enumerate(held) if math.isfinite(x)}


def torch_losses(a, c, folder, seed, sizes, compiled):
    batch, context, means = c["batch"], c["context"], {}
    held = [validation_windows(seed, b, batch, sizes["val"], context) for b in range(a.validation_batches)]
    losses = torch_steps(c, folder, a.steps, seed, rate=rate_of(c, a.steps, a.warmup), reuse=compiled, device=a.device,
                         windows=lambda step: training_windows(seed, step, batch, sizes["train"], context),
                         validation=(a.every, held, means))
    return [float(x) for x in losses], means


def write_ids(text, folder):
    held = len(text) // 16
    parts = {"train": text[:-held], "val": text[-held:]}
    for name, part in parts.items():
        with open(os.path.join(folder, name + ".bin"), "wb") as file:
            array.array("H", list(part)).tofile(file)
    return {name: len(part) for name, part in parts.items()}


def summed_up(found):
    """Means and spreads over the seeds of (side, what), the gap of the means, and of each seed."""
    out = {}
    for what in ("train", "validation"):
        ours, theirs = found["faultline", what], found["PyTorch", what]
        spreads = {"faultline": max(ours) - min(ours), "PyTorch": max(theirs) - min(theirs)}
        gap = (sum(ours) - sum(theirs)) / len(ours)
        out[what] = {"faultline": ours, "PyTorch": theirs, "spreads": spreads, "gap": gap,
                     "gaps": [x - y for x, y in zip(ours, theirs)], "within": abs(gap) <= max(spreads.values())}
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program")
    p.add_argument("--config", required=True)
    p.add_argument("--text", required=True)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--warmup", type=int, default=100)
    p.add_argument("--batch", type=int)
    p.add_argument("--last", type=int, default=50)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--every", type=int, default=100, help="steps from one validation, and printed loss, to the next")
    p.add_argument("--validation-batches", type=int, default=32)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--out", help="JSON of every loss")
    a = p.parse_args()
    with open(a.config, "rb") as file:
        c = tomllib.load(file)["train"]
    if a.batch:
        c["batch"] = a.batch
    begin, found, kept = time.time(), {}, {}

    def say(side, seed, losses, held):
        last = sum(losses[-a.last:]) / len(losses[-a.last:])
        found.setdefault((side, "train"), []).append(last)
        found.setdefault((side, "validation"), []).append(held[a.steps // a.every * a.every])
        kept[f"{side} {seed}"] = {"loss": losses, "validation": held}
        mean = lambda end: sum(losses[max(0, end - a.last):end]) / min(end, a.last)
        print(f"{time.time() - begin:5.0f} s  {side:10} seed {seed}: step 0 {losses[0]:.4f}  " + "  ".join(
            f"{end}: {mean(end):.4f} ({held[end]:.4f})" for end in range(a.every, a.steps + 1, a.every)), flush=True)
        if a.out:
            with open(a.out, "w") as file:
                json.dump(kept, file)

    with tempfile.TemporaryDirectory() as folder:
        with open(a.text, "rb") as file:
            sizes = write_ids(file.read(), folder)
        print(f"{sizes['train']} and {sizes['val']} bytes; batch {c['batch']} x {c['context']}, {a.steps} steps; a run's train "
              f"loss, the mean of {a.last} steps, and in brackets its validation loss", flush=True)
        runs, compiled = our_runs(a, folder, c), {}
        try:
            for seed in range(a.seeds):
                say("PyTorch", seed, *torch_losses(a, c, folder, seed, sizes, compiled))
            for seed, run in enumerate(runs):
                say("faultline", seed, *our_losses(run, os.path.join(folder, f"ours{seed}.h5")))
        finally:
            for run in runs:
                run.terminate()
                run.wait()
    print(json.dumps(summed_up(found)))


if __name__ == "__main__":
    main()
