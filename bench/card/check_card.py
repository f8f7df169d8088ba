#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Repeats on the card at hand what docs/device.md and docs/results say of a card: what gives the same bits, what it takes beside
the processor and PyTorch, what is refused, and, with a folder of compute-sanitizer, that it finds nothing. Some ten minutes on an
H200 with sixteen processor cores, in the order of what matters; each step has a limit and its output a file.

    cmake --preset cuda -DFAULTLINE_BUILD_BENCHMARKS=ON && ninja -C build/cuda
    bench/card/check_card.py build/cuda results [--only NAME[,…]] [--sanitizer FOLDER] [--torch PYTHON]
    bench/card/check_card.py --list

Exit status: 0 every step that could run gave what is expected, 1 one did not, 2 a wrong request. A step whose program is not built,
or which wants PyTorch or the sanitizer where there is none, is left out and said so. Timings want the card, and a processor, alone.
"""
import argparse
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent
TREE = BENCH.parent
PRESETS = ("fa2", "fa2-unfused", "fa2-unfused-splitkv", "fa3", "fa4", "cudnn-like", "cutlass", "thunderkittens", "fa3-fp8", "efficient",
           "fa1", "repo-2510.04212", "math", "standard-bf16", "llmc", "exact")


class Step:
    """expected: what is said of it in the list; found: a pattern whose groups are the figure; holds: of the groups, as numbers;
    status: what it may exit with; ahead_of: of this step's figures and those of the step named, where that has some: whether the
    one is as it should be beside the other."""

    def __init__(self, name, line, command, limit, expected, found, holds=None, status=(0,), environment=None, ahead_of=None):
        self.name, self.line, self.command, self.limit = name, line, command, limit
        self.expected, self.found, self.holds = expected, found, holds
        self.status, self.environment, self.ahead_of = status, environment or {}, ahead_of


def not_slower(torch, ours):
    """The fused kernel beside PyTorch's FlashAttention-2 back end, shape by shape."""
    flash = [rate for name, rate in torch if name.startswith("flash")]
    return len(flash) == len(ours) and all(mine[0] >= theirs for mine, theirs in zip(ours, flash))


def recorder_holds(fraction, times):
    return times <= {1.0: 2.0, 0.01: 1.03}.get(fraction, math.inf)


def steps(build, torch, sanitizer):
    program = f"{build}/experiments/cli/faultline"
    tests = f"{build}/tests"
    tensor_test = f"{tests}/kernels/tensor_kernel/tensor_kernel_test"
    speed = f"{build}/kernels/cuda/emulated_speed/emulated_speed"
    head = str(TREE / "tests/data/collapsed-layer.safetensors")
    passed = r"\[  PASSED  \] (\d+) test"
    rate = r"(flash\w*|cudnn\w*) +[\d.]+ ms +([\d.]+)"
    none = [r"(\d+) of \d+ elements of outputs", lambda n: n == 0]
    wanted = [
        Step("selftest", "1-3, 5 bits", [program, "selftest", "--device", "cuda"], 60,
             "0 differ, in less than a minute", *none),
        Step("bits", "1 bits of 10^8", [speed, "--plan", "fa2", "--n", "4096", "--heads", "48", "--d", "128", "--repeat", "1",
                                        "--cpu-threads", "0" if os.cpu_count() < 8 else str(os.cpu_count())], 120,
             "0 of 100,859,904 elements differ", r"(\d+) of 100859904 elements differ", lambda n: n == 0),
        Step("tensor", "2", [tensor_test], 300, "every test passes, two of other machines skipped", passed, lambda n: n >= 60),
        Step("device", "1, 4, 5", [f"{tests}/kernels/device/device_test"], 120, "every test passes, one of other machines skipped", passed,
             lambda n: n >= 18),
        Step("rule", "3 rule", [f"{build}/kernels/cuda/hardware_probe/hardware_probe"], 120,
             "0 of 109 million dot products of each instruction differ", r"(hopper-\S+): (\d+) dot products, (\d+) differ",
             lambda name, products, differ: differ == 0),
        Step("functions", "3 ex2, lg2", [f"{build}/kernels/cuda/special_probe/special_probe"], 120, "all equal",
             r"(all equal)"),
        Step("truth", "4", [f"{build}/kernels/cuda/truth_at_scale/truth_at_scale", "--repeat", "3", "--verify", "32"], 120,
             "16 heads of 4096 at head size 128 in less than 10 s, none of MPFR's elements outside",
             r"best ([\d.]+) s(?:.|\n)*recomputed, (\d+) outside", lambda seconds, outside: seconds < 10 and outside == 0),
        Step("refused", "memory, a sentence", [program, "attribute", head, "--plan", "math", "--device", "cuda"], 30,
             "one sentence with file, layer and plan, exit 1", r"(device cuda: plan \"math\": a run needs)", None, (1,),
             {"FAULTLINE_DEVICE_MIB": "16"}),
        Step("attribute", "5", [program, "attribute", head, "--device", "cuda", "--sites", "o_cast,p_cast"], 60,
             "the table of the processor", r"(dq: \S+ is)"),
        Step("families", "table: emulated kernel", [speed, "--plan", ",".join(PRESETS), "--n", "2048", "--heads", "16", "--d", "128",
                                                    "--repeat", "5", "--cpu-threads", "2"], 240,
             "each preset 100 times two threads or more, 0 differ", r"plan (\S+),(?:.|\n)*?s, ([\d.]+) times as long; (\d+) of",
             lambda plan, times, differ: differ == 0 and times >= 100),
        Step("forward", "table: forward", [f"{build}/bench/tensor_kernel/tensor_attention_bench"], 60,
             "TFLOP/s at the two shapes", r"bf16  fused +[\d.]+ ms +([\d.]+) TFLOP/s"),
        Step("forward-torch", "table: forward beside PyTorch", [torch, f"{BENCH}/tensor_kernel/torch_attention.py"], 60,
             "FlashAttention-2, no faster than the step forward, and cuDNN", rate, ahead_of=("forward", not_slower)),
        Step("backward", "table: backward", [f"{build}/bench/tensor_kernel/tensor_backward_bench"], 60,
             "TFLOP/s at the two shapes", r"bf16  backward fused +[\d.]+ ms +([\d.]+) TFLOP/s"),
        Step("backward-torch", "table: backward beside PyTorch",
             [torch, f"{BENCH}/tensor_kernel/torch_attention.py", "backward"], 60,
             "FlashAttention-2, no faster than the step backward, and cuDNN", rate, ahead_of=("backward", not_slower)),
        Step("recorder", "table: recorder", [f"{build}/bench/tensor_kernel/tensor_recorder_bench"], 60,
             "at most 2 times on every tile, 1.03 on 1%", r"recorder on ([\d.e-]+): .* ([\d.]+) times", recorder_holds),
        Step("bits-64", "1 bits at d 64, no mask", [speed, "--plan", ",".join(PRESETS), "--n", "1000", "--heads", "8", "--d", "64",
                                                    "--non-causal", "--repeat", "1", "--cpu-threads", str(os.cpu_count())], 120,
             "0 differ", r"plan (\S+),(?:.|\n)*?; (\d+) of", lambda plan, differ: differ == 0),
    ]
    tool = Path(sanitizer or "--sanitizer FOLDER") / "compute-sanitizer"
    small = [program, "selftest", "--device", "cuda", "--parts", "plans,truth", "--families", "benign", "--queries", "72", "--heads",
             "2", "--head-dim", "32"]
    # Head sizes of the kernels that keep gradients in registers: by Hopper's unit in groups of 16 and of eight, by Ampere's rule, of e4m3.
    registers = [speed, "--plan", "fa2,efficient,fa1,fa3-fp8", "--heads", "1", "--repeat", "1", "--cpu-threads", "0"]
    launches = [tensor_test, "--gtest_filter=TensorRecorderLaunches.LeaveTheirCounters*:TensorAltered.ForwardsAre*"]
    for check in ("memcheck", "initcheck", "synccheck", "racecheck"):
        zero = r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard"
        wanted.append(Step(check, "sanitizers", [str(tool), "--tool", check, *small], 120, "nothing found", zero,
                           lambda errors, hazards=0: errors == hazards == 0))
        for n, d in (("200", "64"), ("130", "128")):
            wanted.append(Step(f"{check}-{d}", "sanitizers", [str(tool), "--tool", check, *registers, "--n", n, "--d", d], 120,
                               "nothing found", zero, lambda errors, hazards=0: errors == hazards == 0))
    wanted.append(Step("memcheck-tensor", "sanitizers", [str(tool), "--tool", "memcheck", *launches], 120, "nothing found",
                       r"ERROR SUMMARY: (\d+) error", lambda errors: errors == 0))
    recorders = [tensor_test, "--gtest_filter=TensorRecorder.LooksAt*:TensorBackwardRecorder.SamplesKeyTiles:*AreTheSameInAGraph"]
    wanted.append(Step("racecheck-tensor", "sanitizers", [str(tool), "--tool", "racecheck", *recorders], 120, "nothing found",
                       r"RACECHECK SUMMARY: (\d+) hazard", lambda hazards: hazards == 0))
    return wanted


def numbers(groups):
    return [float(g) if re.fullmatch(r"[\d.]+(e-?\d+)?", g) else g for g in groups if g is not None]


def run(step, folder, before):
    """Whether what is expected came, the figure, the seconds. `before`: what the steps before found, by name; the step's own is
    added."""
    begin = time.monotonic()
    file = folder / f"{step.name}.txt"
    with open(file, "wb") as out:
        try:
            status = subprocess.run(step.command, stdout=out, stderr=subprocess.STDOUT, timeout=step.limit,
                                    env={**os.environ, **step.environment}).returncode
        except subprocess.TimeoutExpired:
            return False, f"no end in {step.limit} s", time.monotonic() - begin
    text = file.read_text(errors="replace")
    found = [numbers(m.groups()) for m in re.finditer(step.found, text)]
    figure = "; ".join(" ".join(str(x) for x in one) for one in found[:16]) or "nothing of it in the output"
    holds = bool(found) and status in step.status and (step.holds is None or all(step.holds(*one) for one in found))
    before[step.name] = found
    if holds and step.ahead_of and step.ahead_of[0] in before:
        holds = step.ahead_of[1](found, before[step.ahead_of[0]])
    if status not in step.status:
        lines = [line for line in text.splitlines() if line.strip()]
        figure = f"exit {status}: {lines[-1] if lines else ''}"
    return holds, figure, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("build", type=Path, nargs="?")
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--sanitizer")
    parser.add_argument("--torch", default=sys.executable)
    given = parser.parse_args()
    if given.build is None and not given.list:
        parser.error("expected the folder of a build with the preset cuda, and one for what the steps print")
    all_steps = steps(given.build or Path("build/cuda"), given.torch, given.sanitizer)
    names = [name for name in given.only.split(",") if name]
    for name in names:
        if name not in [s.name for s in all_steps]:
            parser.error(f"--only: no such step {name!r}: expected some of {', '.join(s.name for s in all_steps)}")
    chosen = [s for s in all_steps if not names or s.name in names]
    if given.list:
        for step in chosen:
            set_first = "".join(f"{name}={value} " for name, value in step.environment.items())
            print(f"{step.name:16} {step.line}: {step.expected}; at most {step.limit} s\n    {set_first}{' '.join(step.command)}")
        return 0
    if given.results is None:
        parser.error("expected a folder for what the steps print")
    given.results.mkdir(parents=True, exist_ok=True)
    failed = False
    found = {}
    print(f"{'step':16} {'line':30} {'s':>6}  figure", flush=True)
    for step in chosen:
        has = [p for p in step.command[:1] if not Path(p).exists()]
        if not has and "torch_attention.py" in " ".join(step.command):
            has = [] if subprocess.run([given.torch, "-c", "import torch"], capture_output=True).returncode == 0 else ["PyTorch"]
        if has:
            print(f"{step.name:16} {step.line:30} {'':>6}  left out: there is no {has[0]}", flush=True)
            continue
        holds, figure, seconds = run(step, given.results, found)
        failed = failed or not holds
        print(f"{step.name:16} {step.line:30} {seconds:6.0f}  {figure}{'' if holds else '   NOT as expected: ' + step.expected}",
              flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
