#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The loss of GPT-2 trained by `faultline train --device cuda` beside PyTorch's (torch.compile, bf16 autocast, FlashAttention-2
back end, fused AdamW), on the same text, with the same schedule, some seeds of each.

    bench/gpt_device/torch_loss.py build/cuda/experiments/cli/faultline --config experiments/configs/gpt2-124m.toml --text FILE

The text is read as bytes, which are written as ids of nanoGPT's format; its last sixteenth is held out. A seed gives both sides
the same windows of the text in the same order, of the training and of the validation (windows.py); the start of the weights is
drawn alike, but by each side's own generator. Seed after seed, both sides at once, which share the card. The train loss of a run
is the mean of its last --last steps. Prints each run's losses, both sides' means and spreads over the seeds, and whether the
means are within the larger spread of each other; --out FILE.json keeps every step, and is written when a run ends. Of seeds that
were run in several calls, with the same settings, `torch_loss.py --join FILE.json...` prints the same. --device cpu tries the
script itself, with a small configuration.
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

from torch_peer import torch_steps
from windows import training_windows, validation_windows


def rate_of(c, steps, warmup):
    def rate(step):
        if step < warmup:
            return c["lr"] * (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return c["final-lr"] + 0.5 * (1 + math.cos(math.pi * done)) * (c["lr"] - c["final-lr"])

    return rate


def our_run(a, folder, c, seed):
    fastest = ["--no-deterministic", "--no-monitors"] if a.device == "cuda" else []
    return subprocess.Popen(
        [a.program, "train", "--config", a.config, "--device", a.device, "--data", folder, "--data-format", "nanogpt",
         *fastest, "--monitor-every", "0", "--validate-every", str(a.every), "--validation-batches",
         str(a.validation_batches), "--checkpoint-every", "0", "--quiet", "--steps", str(a.steps), "--warmup", str(a.warmup),
         "--batch", str(c["batch"]), "--seed", str(seed), "-o", our_record(folder, seed)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def our_record(folder, seed):
    return os.path.join(folder, f"ours{seed}.h5")


def our_losses(run, path, seconds=None):
    """(loss of each step, validation loss by the number of steps after which it was taken); where it takes longer than that, of
    the steps that it has made."""
    try:
        error = run.communicate(timeout=seconds)[1]
        if run.returncode != 0:
            sys.exit(error)
    except subprocess.TimeoutExpired:
        run.terminate()  # it writes what it has
        run.communicate()
    import h5py  # not needed to join

    with h5py.File(path, "r") as file:
        held = file["steps/validation_loss"][()]
        return [float(x) for x in file["steps/loss"][()]], {i + 1: float(x) for i, x in enumerate(held) if math.isfinite(x)}


def torch_losses(a, c, folder, seed, sizes, compiled, tell):
    """As our_losses(); tell(steps) is called after each `every` steps."""
    batch, context, means = c["batch"], c["context"], {}
    held = [validation_windows(seed, b, batch, sizes["val"], context) for b in range(a.validation_batches)]
    losses = torch_steps(c, folder, a.steps, seed, rate=rate_of(c, a.steps, a.warmup), reuse=compiled, device=a.device,
                         windows=lambda step: training_windows(seed, step, batch, sizes["train"], context),
                         validation=(a.every, held, means),
                         after=lambda step: tell(step + 1) if (step + 1) % a.every == 0 else None)
    return [float(x) for x in losses], means


def write_ids(text, folder):
    held = len(text) // 16
    parts = {"train": text[:-held], "val": text[-held:]}
    for name, part in parts.items():
        with open(os.path.join(folder, name + ".bin"), "wb") as file:
            array.array("H", iter(part)).tofile(file)  # an id a byte
    return {name: len(part) for name, part in parts.items()}


def summed_up(found):
    """Of (side, what), by seed: each side's spread over its own seeds; of the seeds that both have, the gap of the means, and of
    each seed; whether the gap is within the larger spread."""
    out = {}
    for what in ("train", "validation"):
        ours, theirs = found["faultline", what], found["PyTorch", what]
        both = sorted(ours.keys() & theirs.keys())
        gaps = [ours[seed] - theirs[seed] for seed in both]
        spreads = {side: max(of.values()) - min(of.values()) for side, of in (("faultline", ours), ("PyTorch", theirs))}
        gap = sum(gaps) / len(gaps)
        out[what] = {"faultline": ours, "PyTorch": theirs, "spreads": spreads, "seeds of both": both, "gap": gap, "gaps": gaps,
                     "within": abs(gap) <= max(spreads.values())}
    return out


def ends_of(kept, last):
    """Train and validation losses at the end, of (side, what) by seed; of the runs that made as many steps as any."""
    most = max(len(run["loss"]) for run in kept.values())
    found = {(side, what): {} for side in ("faultline", "PyTorch") for what in ("train", "validation")}
    for name, run in kept.items():
        if len(run["loss"]) < most:
            continue
        side, seed = name.split()
        found[side, "train"][int(seed)] = sum(run["loss"][-last:]) / len(run["loss"][-last:])
        found[side, "validation"][int(seed)] = run["validation"][str(max(map(int, run["validation"])))]
    return found


def line_of(run, last):
    """Step 0, and at each validation the mean of the steps before, with the validation's in brackets."""
    losses, held = run["loss"], {int(end): value for end, value in run["validation"].items()}
    mean = lambda end: sum(losses[max(0, end - last):end]) / min(end, last)
    return f"step 0 {losses[0]:.4f}  " + "  ".join(f"{end}: {mean(end):.4f} ({held[end]:.4f})" for end in sorted(held))


def join(paths, last):
    kept = {}
    for path in paths:
        with open(path) as file:
            kept.update(json.load(file))
    for name in sorted(kept):
        print(f"{name}: {line_of(kept[name], last)}")
    print(json.dumps(summed_up(ends_of(kept, last))))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program", nargs="?")
    p.add_argument("--config")
    p.add_argument("--text")
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--warmup", type=int, default=100)
    p.add_argument("--batch", type=int)
    p.add_argument("--last", type=int, default=50)
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--every", type=int, default=100, help="steps from one validation, and printed loss, to the next")
    p.add_argument("--validation-batches", type=int, default=32)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--only", choices=["faultline", "PyTorch"], help="one side alone, for --join")
    p.add_argument("--seconds", type=float, help="faultline's runs are interrupted after so long, and count as far as they came")
    p.add_argument("--out", help="JSON of every loss")
    p.add_argument("--join", nargs="+", metavar="FILE.json", help="of earlier calls: nothing is run")
    a = p.parse_args()
    if a.join:
        return join(a.join, a.last)
    if not (a.program and a.config and a.text):
        p.error("expected the program, --config and --text, or --join")
    with open(a.config, "rb") as file:
        c = tomllib.load(file)["train"]
    if a.batch:
        c["batch"] = a.batch
    begin, kept = time.time(), {}

    def say(side, seed, losses, held):
        run = kept[f"{side} {seed}"] = {"loss": losses, "validation": {str(end): value for end, value in held.items()}}
        print(f"{time.time() - begin:5.0f} s  {side:10} seed {seed}: {line_of(run, a.last)}", flush=True)
        if a.out:
            with open(a.out, "w") as file:
                json.dump(kept, file)

    with tempfile.TemporaryDirectory() as folder:
        with open(a.text, "rb") as file:
            sizes = write_ids(file.read(), folder)
        print(f"{sizes['train']} and {sizes['val']} bytes; batch {c['batch']} x {c['context']}, {a.steps} steps; a run's train "
              f"loss, the mean of {a.last} steps, and in brackets its validation loss", flush=True)
        compiled = {}
        for seed in a.seeds:
            run = our_run(a, folder, c, seed) if a.only != "PyTorch" else None
            try:
                if a.only != "faultline":
                    say("PyTorch", seed, *torch_losses(
                        a, c, folder, seed, sizes, compiled, lambda steps: print(
                            f"{time.time() - begin:5.0f} s  PyTorch    seed {seed}: {steps} steps", flush=True)))
                if run is not None:
                    say("faultline", seed, *our_losses(run, our_record(folder, seed), a.seconds))
            finally:
                if run is not None:
                    run.terminate()
                    run.wait()
    if a.only is None:
        print(json.dumps(summed_up(ends_of(kept, a.last))))


if __name__ == "__main__":
    main()
