#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How often `faultline check` calls a right kernel biased or wrong, and how small a planted fault it finds: tables in Markdown, as
docs/results/check.md has them. The kernel is numpy_kernel.py, or the kernels of captures.

    bench/verdict/check_rates.py PROGRAM                          false alarms on random inputs, and planted faults
    bench/verdict/check_rates.py PROGRAM --captures FOLDER        and false alarms on every layer and kernel of the captures there
    bench/verdict/check_rates.py PROGRAM --only faults --seeds 3
"""
import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile

from numpy_kernel import FACTORS, TRUNCATIONS, layer

PARTS = ("alarms", "captures", "faults")
OWN_RUN = ", as the plan's own run is"
KINDS = ("normal", "large logits", "large key mean")
# Kernels of the captures and the presets that they are (docs/kernels.md).
OWN_PLANS = {"flash": ("fa2-unfused", "fa2-unfused-splitkv"), "cudnn": ("cudnn-like",), "efficient": ("efficient",), "math": ("math",)}


class Calls:
    """Of `faultline check`: outputs judged, tests, verdicts, processor time."""

    def __init__(self, program):
        self.program, self.count, self.outputs, self.tests, self.seconds = program, 0, 0, 0, []

    def check(self, *options):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([self.program, "check", *options, "--json", "--quiet"], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode > 1:
            sys.exit(f"{' '.join(options)}: {done.stderr.strip()}")
        found = json.loads(done.stdout)
        self.count += 1
        self.tests += found["tests"]
        self.outputs += sum(len(one["outputs"]) for one in found["layers"])
        self.seconds.append(after.ru_utime - before.ru_utime)
        return found

    def cost(self):
        return f"{self.count} calls, {self.outputs} outputs, {self.tests} tests; {min(self.seconds):.2f} to {max(self.seconds):.2f} s of processor time a call"


def told(found):
    """Outputs that are not within their rounding, in words."""
    return [f"{one['name']}.{name} {output['verdict']}" + (OWN_RUN if all(f.get("of_plan") for f in output["findings"]) else "")
            for one in found["layers"] for name, output in one["outputs"].items() if output["verdict"] != "within_rounding"]


def alarms(program, folder, seeds):
    print("| inputs | format, head size, rows | calls | not within its rounding | biased as the plan's own run is |\n|---|---|---|---|---|")
    all_calls = Calls(program)
    for kind, (low, d, n) in itertools.product(KINDS, (("bf16", 64, 128), ("fp16", 64, 128), ("bf16", 128, 96), ("bf16", 80, 100))):
        failed, biased = [], 0
        for seed in range(seeds):
            path = os.path.join(folder, "alarm.safetensors")
            layer(path, 5000 + seed, kind, low, n, d)
            texts = told(all_calls.check(path, "--plan", "fa2", "--seed", str(seed)))
            biased += any(text.endswith(OWN_RUN) for text in texts)
            failed += [f"seed {5000 + seed}: {text}" for text in texts if not text.endswith(OWN_RUN)]
        print(f"| {kind} | {low}, {d}, {n} | {seeds} | {'; '.join(failed) or 0} | {biased} |", flush=True)
    print(f"\n{all_calls.cost()}\n")


def of_captures(program, folder):
    print("| capture, layer | kernel and plan | outputs not within their rounding | processor time, s |\n|---|---|---|---|")
    all_calls = Calls(program)
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        path = os.path.join(folder, name)
        inspected = json.loads(subprocess.run([program, "inspect", path, "--json"], capture_output=True, text=True, check=True).stdout)
        for one in inspected["layers"]:
            splits = one["seq_k"] > 256
            for kernel, plans in OWN_PLANS.items():
                plan = plans[-1] if splits else plans[0]
                found = all_calls.check(path, "--layers", one["name"], "--kernel", kernel, "--plan", plan)
                print(f"| {name[:-12]}, {one['name']} | {kernel}, {plan} | {'; '.join(told(found)) or 0} | {all_calls.seconds[-1]:.1f} |", flush=True)
    print(f"\n{all_calls.cost()}\n")


def faults(program, folder, seeds, values):
    print("| value | sizes tried | smallest found on all seeds | smallest found on some |\n|---|---|---|---|")
    all_calls = Calls(program)

    def found_by(name, size):
        count = 0
        for seed in range(seeds):
            path = os.path.join(folder, "fault.safetensors")
            layer(path, 6000 + seed, n=128, count=1, fault=name, size=size)
            count += bool(told(all_calls.check(path, "--plan", "fa2", "--seed", str(seed))))
        return count

    for name in values or FACTORS + TRUNCATIONS:
        toward_zero = name in TRUNCATIONS
        # Falling: factors 1 + 2^-3, 2^-4 ...; bits kept 7, 8 ...
        steps = range(7, 24) if toward_zero else range(1 if name.startswith("one") else 3, 25)
        text = (lambda step: f"{step} bits") if toward_zero else (lambda step: f"2^-{step}")
        counts = []
        for step in steps:
            counts.append(found_by(name, step if toward_zero else 2.0 ** -step))
            if counts[-1] == 0:
                break
        whole = next((i for i, count in enumerate(counts) if count < seeds), len(counts))
        some = sum(count > 0 for count in counts)
        print(f"| {name} | {text(steps[0])} to {text(steps[len(counts) - 1])} | {text(steps[whole - 1]) if whole else 'none'} | "
              f"{text(steps[some - 1]) if some else 'none'} |", flush=True)
    print(f"\n{all_calls.cost()}\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program", help="faultline")
    p.add_argument("--captures", help="folder of captures with the kernels flash, cudnn, efficient and math")
    p.add_argument("--seeds", type=int, default=0, help="default 6 for false alarms, 3 for faults")
    p.add_argument("--only", choices=PARTS)
    p.add_argument("--values", default="", help="of the planted faults: " + ",".join(FACTORS + TRUNCATIONS))
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if a.only in (None, "alarms"):
            alarms(a.program, folder, a.seeds or 6)
        if a.captures and a.only in (None, "captures"):
            of_captures(a.program, a.captures)
        if a.only in (None, "faults"):
            faults(a.program, folder, a.seeds or 3, [v for v in a.values.split(",") if v])


if __name__ == "__main__":
    main()
