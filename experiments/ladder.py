#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Losses of the isolation ladder at 8 layers, and their picture.

    experiments/ladder.py --runs FOLDER/runs/*.h5 -o docs/figures/data/ladder-eight.csv     # of sweep-ladder-eight.toml, in FOLDER
    experiments/ladder.py docs/figures/data/ladder-eight.csv -o docs/figures/ladder-eight.svg

The table has a row a run: seed, which layers have the whole streaming state in bf16 ("none", "all", "0,1,2,3"), and the train loss in
nats, mean over 50 steps, at every 25th step from 600 on. --runs puts runs into the table that is there, in place of those of the same
seed and layers. The picture has a panel a seed. Needs h5py for --runs alone.
"""
import argparse
import csv
import os
import re
import sys

FIRST, EVERY, WINDOW = 600, 25, 50
LOWEST, HIGHEST = 1.4, 3.0
COLOURS = {"none": "#888888", "all": "#000000", "0,1,2,3": "#2471a3", "4,5,6,7": "#c0392b"}
SINGLE = ["#6baed6", "#4292c6", "#2171b5", "#08519c", "#fdbe85", "#fd8d3c", "#e6550d", "#a63603"]  # lower half, upper half


def state_of(name):
    """Of a run's file, RECIPE__SOURCE__INTERVENTION__seedN__KEY.h5: seed and layers; None where it is no run of the ladder."""
    found = re.fullmatch(r"(?:.*__)?(none|plan-plans-streaming64-all-both\.toml(?:-layers-([\d-]+))?)__none__seed(\d+)__.*\.h5", name)
    if not found:
        return None
    return int(found[3]), "none" if found[1] == "none" else (found[2] or "all").replace("-", ",")


def losses(path):
    import h5py
    with h5py.File(path, "r") as file:
        loss = [float(x) for x in file["steps/loss"][:].reshape(-1)]
    return {step: sum(loss[step - WINDOW:step]) / WINDOW for step in range(FIRST, len(loss) + 1, EVERY)}


def read(path):
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    steps = [int(x) for x in rows[0][2:]]
    return {(int(row[0]), row[1]): {s: float(x) for s, x in zip(steps, row[2:]) if x} for row in rows[1:]}


def order(run):
    seed, layers = run
    return seed, ["none", "all"].index(layers) if layers in ("none", "all") else 2, -len(layers), layers


def write(table, path):
    steps = sorted({step for of in table.values() for step in of})
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["seed", "layers", *steps])
        for run in sorted(table, key=order):
            out.writerow([*run, *(f"{table[run][s]:.4f}" if s in table[run] else "" for s in steps)])


def label(layers):
    return {"none": "fp32 (control)", "all": "every layer", "0,1,2,3": "layers 0 to 3", "4,5,6,7": "layers 4 to 7"}.get(
        layers, f"layer {layers}")


def panel(seed, runs, left, top, width, height):
    last = max(step for of in runs.values() for step in of)
    x = lambda step: left + width * (step - FIRST) / (last - FIRST)
    y = lambda loss: top + height * (HIGHEST - min(max(loss, LOWEST), HIGHEST)) / (HIGHEST - LOWEST)
    out = [f'<text x="{left + width / 2:.0f}" y="{top - 9}" text-anchor="middle">seed {seed}</text>']
    for tick in (1.5, 2.0, 2.5, 3.0):
        out.append(f'<path d="M{left} {y(tick):.1f}H{left + width}" stroke="#dddddd"/>'
                   f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for tick in range(1000, last + 1, 500):
        out.append(f'<text x="{x(tick):.1f}" y="{top + height + 18}" text-anchor="middle">{tick}</text>')
    drawn = sorted(((layers, of) for (s, layers), of in runs.items() if s == seed), key=lambda run: order((seed, run[0])))
    for i, (layers, of) in enumerate(drawn):
        colour = COLOURS.get(layers) or SINGLE[int(layers)]
        how = f'stroke="{colour}" stroke-width="{1.8 if layers in COLOURS else 1.1}"'
        if layers not in COLOURS:
            how += ' stroke-dasharray="4 2"'
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in sorted(of.items()))
        out.append(f'<polyline points="{points}" fill="none" {how}/>')
        down = top + 10 + 14 * i
        out.append(f'<path d="M{left + 8} {down}h18" {how}/><text x="{left + 31}" y="{down + 4}" font-size="10">{label(layers)}</text>')
    return out


def draw(table, path):
    seeds = sorted({seed for seed, _ in table})
    width, height, left, top = 300, 330, 50, 28
    whole, high = left + len(seeds) * (width + 40) - 20, top + height + 56
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {high}" font-family="sans-serif" font-size="12">'
           f'<rect width="{whole}" height="{high}" fill="white"/>']
    for i, seed in enumerate(seeds):
        out += panel(seed, table, left + i * (width + 40), top, width, height)
    out.append(f'<text x="{whole / 2:.0f}" y="{high - 12}" text-anchor="middle">step</text><text x="14" y="{high / 2:.0f}" '
               f'transform="rotate(-90 14 {high / 2:.0f})" text-anchor="middle">train loss in nats, mean over {WINDOW} steps</text>')
    with open(path, "w") as file:
        file.write("\n".join(out) + "\n</svg>\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", nargs="?", help="the table to draw")
    p.add_argument("--runs", nargs="+", metavar="FILE.h5", help="records of runs")
    p.add_argument("-o", "--output", required=True, help="the picture, or with --runs the table")
    a = p.parse_args()
    if (a.table is None) == (a.runs is None):
        sys.exit("ladder: expected a table to draw, or --runs with records")
    if a.table is not None:
        return draw(read(a.table), a.output)
    table = read(a.output) if os.path.exists(a.output) else {}
    for path in a.runs:
        if run := state_of(os.path.basename(path)):
            table[run] = losses(path)
    write(table, a.output)


if __name__ == "__main__":
    main()
