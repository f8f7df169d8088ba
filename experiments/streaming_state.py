#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does a streaming state in bf16 end a training, and which part of it? Runs experiments/configs/streaming-state.toml under the
plans of experiments/configs/plans/streaming64, some at a time on each card, and sums the runs up.

    experiments/streaming_state.py --faultline build/cuda/experiments/cli/faultline --out FOLDER [--devices 0,1] [--mps]
    experiments/streaming_state.py … --recipe 'slow=--lr 0.0015' --recipe 'small=--layers 6' --runs none:0 all:0

From the repository's root. FOLDER gets PLAN-seedN.h5 of every run, summary.json, summary.md and losses.svg; with --recipe, each
recipe has a folder of its name in it, and a panel in the figure (--by-seed: a panel for each of its seeds). Called again it goes
on: finished runs are left alone, those that were stopped are resumed, --collect runs nothing. Needs h5py.

A run has separated where its loss, a mean over 50 steps, stays more than 0.3 nat above that of the control (plan none) of its
seed; the separation step is the first from which that holds to the end of both, first gap the first at which it holds at all. A
run whose gradient is no longer finite ends there.
"""
import argparse
import collections
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time

import h5py

CONFIG = "experiments/configs/streaming-state.toml"
PLANS = "experiments/configs/plans/streaming64"
CONTROL = "none"
KEY = ["none", "all", "all-both", "lse", "all-but-lse", "all-both-but-lse"]
REST = ["s", "s-both", "s-backward", "row-max", "row-sum", "o", "all-but-s", "all-but-row-max", "all-but-row-sum",
        "all-but-o", "all-both-but-row-max", "all-both-but-row-sum", "all-both-but-o", "o-row-sum-lse", "s-both-lse",
        "s-backward-lse"]
WINDOW, GAP = 50, 0.3
MARKS = [1000, 2000, 3000, 4000, 6000, 8000]
LOGIT_MARKS = [500, 750, 1000, 1250]

Job = collections.namedtuple("Job", "recipe plan seed steps")


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--faultline", required=True, help="the program, of a build with the preset cuda")
    p.add_argument("--out", required=True)
    p.add_argument("--runs", nargs="+", metavar="PLAN:SEEDS", help="plans of " + PLANS + " with their seeds, as none:0-4 "
                   "lse:0,7; in this order (default: %s with seeds 0-4, the rest with 0-1)" % ", ".join(KEY))
    p.add_argument("--recipe", action="append", default=[], metavar="NAME=OPTIONS", help="the same runs with these options of "
                   "faultline train, again for more; recipe by recipe, in this order")
    p.add_argument("--devices", default=os.environ.get("CUDA_VISIBLE_DEVICES") or "0", help="CUDA devices, comma-separated "
                   "(default: those of CUDA_VISIBLE_DEVICES, else 0)")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the plans emulated, some hours a run")
    p.add_argument("--at-once", type=int, default=4, help="runs at a time on each device")
    p.add_argument("--mps", action="store_true", help="let them share a device by NVIDIA's multi-process service")
    p.add_argument("--steps", type=int, default=4000)
    p.add_argument("--control-steps", type=int, default=8000)
    p.add_argument("--threads", type=int, default=2, help="host threads of each run")
    p.add_argument("--time-limit", type=float, help="seconds; then runs are stopped, and may be resumed")
    p.add_argument("--keep-checkpoints", action="store_true", help="of finished runs, 255 MB each")
    p.add_argument("--collect", action="store_true", help="sum up what is there, run nothing")
    p.add_argument("--by-seed", action="store_true", help="a panel of the figure for each seed")
    p.add_argument("extra", nargs="*", help="after --: more options of faultline train, of every run")
    a = p.parse_args()
    a.recipes = {"": []}
    if a.recipe:
        pairs = [text.partition("=") for text in a.recipe]
        for text, (name, _, options) in zip(a.recipe, pairs):
            if not re.fullmatch(r"[A-Za-z0-9.-]*[A-Za-z0-9]", name):
                sys.exit(f"streaming_state: --recipe {text}: expected NAME=OPTIONS, NAME of letters, digits, . and -")
        a.recipes = {name: shlex.split(options) for name, _, options in pairs}
    return a


def jobs(a):
    wanted = []
    for text in a.runs or [f"{plan}:0-4" for plan in KEY] + [f"{plan}:0-1" for plan in REST]:
        parts = re.fullmatch(r"([a-z-]+):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)", text)
        if not parts or parts[1] not in KEY + REST or not os.path.exists(f"{PLANS}/{parts[1]}.toml"):
            sys.exit(f"streaming_state: --runs {text}: expected PLAN:SEEDS, PLAN of {', '.join(KEY + REST)}, in the "
                     "repository's root")
        for group in parts[2].split(","):
            first, _, last = group.partition("-")
            wanted += [(parts[1], seed) for seed in range(int(first), int(last or first) + 1)]
    return [Job(recipe, plan, seed, a.control_steps if plan == CONTROL else a.steps)
            for recipe in a.recipes for plan, seed in wanted]


def steps_done(path):
    try:
        with h5py.File(path, "r") as file:
            return len(file["steps/loss"])
    except (OSError, KeyError):
        return 0


class Sharing:
    """NVIDIA's multi-process service, one for each device: kernels of several processes run beside each other, where without
    it they take turns."""

    def __init__(self, devices, folder):
        self.environments = {}
        for device in devices:
            pipe = os.path.abspath(os.path.join(folder, f"mps-{device}"))
            os.makedirs(pipe, exist_ok=True)
            places = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": pipe}
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True,
                           env=dict(os.environ, CUDA_VISIBLE_DEVICES=device, **places))
            self.environments[device] = dict(places, CUDA_VISIBLE_DEVICES="0")  # of those that the service sees

    def stop(self):
        for of in self.environments.values():
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=dict(os.environ, **of))


class Runs:
    """Processes, some at a time on each device."""

    def __init__(self, a, environments):
        self.a, self.running, self.failed, self.environments = a, {}, set(), environments
        self.slots = [device for _ in range(a.at_once) for device in a.devices.split(",")]

    def path(self, job):
        return os.path.join(self.a.out, job.recipe, f"{job.plan}-seed{job.seed}.h5")

    def checkpoint(self, job):
        return self.path(job)[:-3] + ".checkpoint.safetensors"

    def finished(self, job):
        return job in self.failed or steps_done(self.path(job)) >= job.steps

    def start(self, job, device):
        path = self.path(job)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        command = [self.a.faultline, "train", "--device", self.a.device, "--config", CONFIG, "--quiet",
                   "--attention", f"{PLANS}/{job.plan}.toml", "--seed", str(job.seed), "--steps", str(job.steps),
                   "--threads", str(self.a.threads), *self.a.extra, *self.a.recipes[job.recipe]]
        resumes = os.path.exists(path) and os.path.exists(self.checkpoint(job))
        command += ["--resume", path] if resumes else ["-o", path, "--force"]
        log = open(path[:-3] + ".log", "a")
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ, **self.environments[device]))
        self.running[process] = (job, device, time.time())

    def reap(self):
        for process in [p for p in self.running if p.poll() is not None]:
            job, device, since = self.running.pop(process)
            self.slots.append(device)
            done = steps_done(self.path(job))
            print(f"{job.recipe} {job.plan} seed {job.seed}: exit {process.returncode}, {done} steps, "
                  f"{time.time() - since:.1f} s".lstrip(), flush=True)
            if done >= job.steps and not self.a.keep_checkpoints and os.path.exists(self.checkpoint(job)):
                os.remove(self.checkpoint(job))
            if process.returncode != 0:
                self.failed.add(job)  # a loss that is not finite is an end too
                with open(self.path(job)[:-3] + ".log") as log:
                    print("   ", (log.read().splitlines() or [""])[-1], flush=True)

    def stop(self):
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in list(self.running):
            process.wait()
        self.reap()


def run(a, wanted):
    devices = a.devices.split(",")
    if not a.mps:
        return run_with(a, wanted, {device: {"CUDA_VISIBLE_DEVICES": device} for device in devices})
    sharing = Sharing(devices, a.out)
    try:
        return run_with(a, wanted, sharing.environments)
    finally:
        sharing.stop()


def run_with(a, wanted, environments):
    runs, begin = Runs(a, environments), time.time()
    left = [job for job in wanted if not runs.finished(job)]
    before = sum(steps_done(runs.path(job)) for job in wanted)
    print(f"{len(wanted)} runs, {len(left)} to do", flush=True)
    over = lambda: a.time_limit is not None and time.time() - begin > a.time_limit
    while (left or runs.running) and not over():
        while left and runs.slots:
            runs.start(left.pop(0), runs.slots.pop(0))
        time.sleep(0.1)
        runs.reap()
    runs.stop()
    seconds = time.time() - begin
    steps = sum(steps_done(runs.path(job)) for job in wanted) - before
    print(f"{steps} steps in {seconds:.1f} s: {steps / seconds:.0f} steps/s in all")
    return seconds, steps


def running_mean(values):
    total, out = 0.0, []
    for i, x in enumerate(values):
        total += x - (values[i - WINDOW] if i >= WINDOW else 0.0)
        out.append(total / min(i + 1, WINDOW))
    return out


def read(path):
    with h5py.File(path, "r") as file:
        steps = file["steps"]
        series = {name: steps[name][:] for name in ("loss", "validation_loss", "grad_norm", "sigma_q", "max_logit")
                  if name in steps}
    loss = [float(x) for x in series["loss"].reshape(-1)]
    out = {"steps": len(loss), "mean_loss": running_mean(loss)}
    norms = [float(x) for x in series["grad_norm"].reshape(-1)]
    out["grad_norm"] = statistics.median(norms[-250:])
    validation = [float(x) for x in series["validation_loss"].reshape(-1) if math.isfinite(x)]
    out["validation_loss"] = validation[-1] if validation else None

    def at_step(values, step):  # over layers and heads; NaN where not recorded
        finite = [float(x) for x in values[step].reshape(-1) if math.isfinite(x)]
        return finite or None

    # A largest logit for each layer, of which the median: how far logits have grown where the model as a whole has them.
    logits = series["max_logit"] if "max_logit" in series else []
    layers = lambda step: sorted(max(float(x) for x in layer.reshape(-1)) for layer in logits[step - 1])
    out["median_logit"] = {str(m): statistics.median(layers(m)) for m in LOGIT_MARKS if m <= len(logits)}

    for name, key in (("sigma_q", "sigma_q"), ("max_logit", "max_logit")):
        finite = [at_step(series[name], i) for i in range(len(loss) - 1, -1, -1)[:1000]] if name in series else []
        finite = next((f for f in finite if f), None)
        out[key] = max(finite) if finite else None
    return out


def separation(run, control):
    """First step from which the gap stays above GAP to the end of both; None where it does not."""
    common = min(run["steps"], control["steps"])
    first = common
    while first > 0 and run["mean_loss"][first - 1] - control["mean_loss"][first - 1] > GAP:
        first -= 1
    return first if first < common else None


def collect(folder):
    """A row for every run in the folder, and the runs by (plan, seed)."""
    found = {}
    for name in os.listdir(folder):
        parts = re.fullmatch(r"(.+)-seed(\d+)\.h5", name)
        path = os.path.join(folder, name)
        if parts and parts[1] in KEY + REST and steps_done(path) > WINDOW:
            found[parts[1], int(parts[2])] = read(path)
    rows = []
    for (plan, seed), of in sorted(found.items(), key=lambda x: ((KEY + REST).index(x[0][0]), x[0][1])):
        row = {"plan": plan, "seed": seed, "steps": of["steps"],
               "loss": {str(m): of["mean_loss"][m - 1] for m in MARKS if m <= of["steps"]}}
        row |= {key: of[key] for key in ("validation_loss", "grad_norm", "sigma_q", "max_logit", "median_logit")}
        control = found.get((CONTROL, seed))
        if plan != CONTROL and control is not None:
            common = min(of["steps"], control["steps"])
            row["common_steps"] = common
            row["gap"] = of["mean_loss"][common - 1] - control["mean_loss"][common - 1]
            row["separation_step"] = separation(of, control)
            gaps = (i for i in range(common) if of["mean_loss"][i] - control["mean_loss"][i] > GAP)
            row["first_gap_step"] = next(gaps, None)
        rows.append(row)
    return rows, found


def number(x, digits):
    return "" if x is None else f"{x:.{digits}f}" if abs(x) < 1000 else f"{x:.3g}"


def markdown(rows):
    out = ["| state in bf16 | seed | steps | " + " | ".join(f"loss at {m}" for m in MARKS) +
           " | gap | first gap | separates from | grad norm | sigma_max(W_Q) | max logit |", "|" + "---|" * (len(MARKS) + 9)]
    for r in rows:
        losses = " | ".join(number(r["loss"].get(str(m)), 3) for m in MARKS)
        step = r.get("separation_step")
        first = "" if r.get("first_gap_step") is None else r["first_gap_step"]
        said = "" if "gap" not in r else "no" if step is None else str(step)
        out.append(f"| {r['plan']} | {r['seed']} | {r['steps']} | {losses} | {number(r.get('gap'), 3)} | {first} | {said} | "
                   f"{number(r['grad_norm'], 2)} | {number(r['sigma_q'], 1)} | {number(r['max_logit'], 0)} |")
    logits = [r for r in rows if r["median_logit"]]
    if logits:
        out += ["", "Median over the layers of the largest logit:", "",
                "| state in bf16 | seed | " + " | ".join(map(str, LOGIT_MARKS)) + " |", "|" + "---|" * (len(LOGIT_MARKS) + 2)]
        out += [f"| {r['plan']} | {r['seed']} | " + " | ".join(number(r["median_logit"].get(str(m)), 0) for m in LOGIT_MARKS) +
                " |" for r in logits]
    out += ["", "| state in bf16 | seeds | separated | median gap at the end | median separation step |", "|---|---|---|---|---|"]
    for plan in KEY + REST:
        of = [r for r in rows if r["plan"] == plan and "gap" in r]
        if not of:
            continue
        steps = [r["separation_step"] for r in of if r["separation_step"] is not None]
        out.append(f"| {plan} | {len(of)} | {len(steps)} | {number(statistics.median(r['gap'] for r in of), 3)} | "
                   f"{int(statistics.median(steps)) if steps else ''} |")
    return "\n".join(out) + "\n"


COLOURS = {"none": "#444444", "all": "#c0392b", "all-but-lse": "#e59866", "s": "#b7950b", "all-both": "#8e44ad",
           "all-both-but-lse": "#1e8449", "lse": "#2471a3", "s-both-lse": "#d81b93"}
PANELS_IN_A_ROW = 3


def panel(title, found, left, top, width, height, legend):
    """Losses of the plans that have a colour over steps, a line a run, as SVG; left, top: the corner of the axes."""
    last = max(of["steps"] for of in found.values())
    x = lambda step: left + width * step / last
    y = lambda loss: top + height - height * (min(max(loss, 0.75), 4.0) - 0.75) / 3.25
    out = [f'<text x="{left + width / 2:.1f}" y="{top - 9}" text-anchor="middle">{title}</text>'] if title else []
    for tick in (1, 2, 3, 4):
        out.append(f'<path d="M{left} {y(tick):.1f}H{left + width}" stroke="#dddddd"/>'
                   f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for tick in range(0, last + 1, 250 if last <= 1500 else 1000 if last <= 4000 else 2000):
        out.append(f'<text x="{x(tick):.1f}" y="{top + height + 18}" text-anchor="middle">{tick}</text>')
    order = list(COLOURS)
    for (plan, seed), of in sorted((x for x in found.items() if x[0][0] in order), key=lambda x: -order.index(x[0][0])):
        points = " ".join(f"{x(s):.1f},{y(of['mean_loss'][s - 1]):.1f}" for s in range(25, of["steps"] + 1, 25))
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[plan]}" stroke-width="1.2"/>')
    for i, plan in enumerate(p for p in order if p in legend):
        out.append(f'<text x="{left + width - 110}" y="{top + 14 + 16 * i}" fill="{COLOURS[plan]}">{plan}</text>')
    return out


def by_seed(panels):
    """The runs of each panel, a panel for each of their seeds."""
    return [(f"{title} seed {seed}".lstrip(), {key: of for key, of in found.items() if key[1] == seed})
            for title, found in panels for seed in sorted({seed for _, seed in found})]


def figure(panels, path):
    """A panel for every (title, runs), in rows; each plan is named in the first panel that has it."""
    columns = min(len(panels), PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    width, height = 570 if columns == 1 else 300, 300
    across, down, left, top = width + 40, height + 56, 50, 28  # from panel to panel, and where the first one's axes begin
    whole, high = left + columns * across - 20, top + rows * down
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {high}" font-family="sans-serif" '
           f'font-size="12"><rect width="{whole}" height="{high}" fill="white"/>']
    named = set()
    for i, (title, found) in enumerate(panels):
        legend = {plan for plan, _ in found} - named
        named |= legend
        out += panel(title, found, left + i % columns * across, top + i // columns * down, width, height, legend)
    out.append(f'<text x="{whole / 2}" y="{high - 12}" text-anchor="middle">step</text>'
               f'<text x="14" y="{high / 2}" transform="rotate(-90 14 {high / 2})" text-anchor="middle">loss in nats, '
               f'mean over {WINDOW} steps</text>')
    with open(path, "w") as file:
        file.write("\n".join(out) + "\n</svg>\n")


def summary(folder, took):
    rows, found = collect(folder) if os.path.isdir(folder) else ([], {})
    if not rows:
        return None, {}
    with open(os.path.join(folder, "summary.json"), "w") as file:
        json.dump({"runs": rows, "seconds": took[0] if took else None, "steps": took[1] if took else None}, file, indent=1)
    text = markdown(rows)
    with open(os.path.join(folder, "summary.md"), "w") as file:
        file.write(text)
    return text, found


def main():
    a = arguments()
    wanted = jobs(a)
    os.makedirs(a.out, exist_ok=True)
    took = None if a.collect else run(a, wanted)
    summaries = {recipe: summary(os.path.join(a.out, recipe), took) for recipe in a.recipes}
    panels = [(recipe, found) for recipe, (_, found) in summaries.items() if found]
    if not panels:
        sys.exit(f"streaming_state: {a.out}: no run there: expected --out with runs, or no --collect")
    figure(by_seed(panels) if a.by_seed else panels, os.path.join(a.out, "losses.svg"))
    for recipe, (text, _) in summaries.items():
        print(f"{recipe}\n\n{text}" if recipe and text else text or f"{recipe}: no run yet\n")


if __name__ == "__main__":
    main()
