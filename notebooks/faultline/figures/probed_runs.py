# SPDX-License-Identifier: Apache-2.0
"""Figures of what `faultline probe` found in runs and checkpoints: lead times, singular values, weight distances."""

from __future__ import annotations

import os

import numpy as np

from ..files import NotRecorded
from .probes import blocks
from .registry import figure
from .style import COLOURS, PAGE, decades, new

_RUNS = "faultline probe RUN.h5 RUN.h5 --probe early-warning -o FILE.h5"
_CHECKPOINTS = "faultline probe FIRST.checkpoint.safetensors OTHER.checkpoint.safetensors -o FILE.h5"


@figure("early-warning", "probe run", "how many steps before divergence each monitor alarms, and its false alarms")
def early_warning(tree):
    data = blocks(tree, "early-warning", _RUNS)[0][1]
    diverged = [r for r in data["run"].values if np.isfinite(data["divergence"].sel(run=r))]
    if not diverged:
        raise NotRecorded("no run of this file diverged; one that does: faultline train --inject delta:multiplicative:0.3 -o FILE.h5")
    best = data["lead"].sel(run=diverged).max("run").values
    order = np.argsort(np.where(np.isfinite(best), best, -np.inf))
    names = [str(n) for n in data["monitor"].values[order]]
    drawn, ((axis, alarms),) = new(PAGE, 0.9 + 0.2 * len(names), columns=2, sharey=True, width_ratios=(3, 1))
    at = np.arange(len(names))
    thresholds = data["threshold"].values[order]
    for i, run in enumerate(diverged):
        lead = data["lead"].sel(run=run).values[order]
        step = int(data["divergence"].sel(run=run))
        axis.hlines(at, 0, np.nan_to_num(lead), color="0.85", lw=1.5, zorder=0)
        axis.plot(lead, at, "osD^vP"[i % 6], ms=5, color=COLOURS[i % len(COLOURS)], label=f"{run} (diverges at step {step})")
        for y, value, threshold in zip(at, lead, thresholds):
            if not np.isfinite(value):
                axis.text(0, y, " no alarm before" if np.isfinite(threshold) else " no threshold", va="center", color="0.4")
    axis.axvline(0, color="0.6", lw=0.6)
    axis.set_yticks(at, names)
    axis.set_xlabel("lead: steps from the alarm to divergence")
    drawn.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    judged, wrong = data["judged"].values[order], data["false_alarms"].values[order]
    alarms.barh(at, np.nan_to_num(wrong), color=COLOURS[1], height=0.55)
    most = max(1, int(np.nanmax(judged)))
    for y, (count, of) in enumerate(zip(wrong, judged)):
        alarms.text(np.nan_to_num(count) + 0.05 * most, y, f"{int(count)} of {int(of)}" if np.isfinite(count) else "not judged", va="center")
    alarms.set_xlim(0, 1.8 * most)
    alarms.set_xticks(range(0, most + 1, max(1, most // 3)))
    alarms.set_xlabel("false alarms,\nhealthy runs")
    if not np.isfinite(thresholds).any():
        drawn.suptitle("no healthy run in this file: nothing sets a threshold", x=0.98, ha="right", y=0.01, va="bottom")
    yield "", drawn


def _named(tree, place):
    """"fault: layer0" for "checkpoint1/layer0", by the file that was the second of the command."""
    checkpoint, slash, rest = place.partition("/")
    number = checkpoint.removeprefix("checkpoint")
    inputs = np.atleast_1d(tree.attrs.get("inputs", []))
    if not slash or not number.isdigit() or int(number) >= len(inputs):
        return place
    return f"{os.path.basename(str(inputs[int(number)])).removesuffix('.safetensors').removesuffix('.checkpoint')}: {rest}"


@figure("singular-values", "probe checkpoint", "leading singular values of W_Q, W_K and W_Q W_K^T; the update along them")
def singular_values(tree):
    found = blocks(tree, "directions", _CHECKPOINTS)
    places = [_named(tree, place) for place, _ in found]
    matrices = [str(m) for m in found[0][1]["matrix"].values]
    drawn, ((sigma, update),) = new(PAGE, 1.1 + 0.2 * len(places) * min(len(matrices), 4), columns=2, sharey=True, width_ratios=(3, 2))
    labels, y = [], 0
    for place, (_, data) in zip(places, found):
        for m, matrix in enumerate(str(n) for n in data["matrix"].values):
            values = data["sigma"].values[m]
            colour = COLOURS[0] if matrix == "W_Q" else COLOURS[2] if matrix == "W_K" else COLOURS[1]
            sigma.plot(values, [y] * len(values), "|", ms=8, mew=1.4, color=colour)
            two, one = (float(data[n].values[m]) for n in ("update_two_sided", "update_one_sided"))
            if np.isfinite(two):
                update.plot([two, one], [y, y], "-", color="0.8", lw=1.5, zorder=0)
                update.plot(two, y, "o", ms=5, color=COLOURS[0], label="along U and V" if not labels else None)
                update.plot(one, y, "D", ms=5, mfc="none", color=COLOURS[1], label="along U or V" if not labels else None)
            labels.append(f"{place}  {matrix}")
            y += 1
    sigma.set_yticks(range(y), labels)
    sigma.set_xscale("log")
    sigma.set_xlabel("singular values, the leading ones")
    update.set_xlim(0, 1)
    update.set_xlabel("share of the update's energy")
    sigma.invert_yaxis()
    if update.get_legend_handles_labels()[0]:
        drawn.legend(*update.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    yield "", drawn


@figure("weight-distances", "probe checkpoint", "distance of every parameter from the first checkpoint's")
def weight_distances(tree):
    found = blocks(tree, "trajectory", _CHECKPOINTS)
    names = [str(n) for n in found[0][1]["parameter"].values]
    drawn, axes = new(PAGE, 0.9 + 0.17 * len(names), columns=3, sharey=True)
    at = np.arange(len(names))
    for axis, quantity, label in zip(
        axes[0], ("wasserstein", "largest", "relative"),
        ("Wasserstein-1 of the entries", "largest of an entry", "Frobenius, over the first's norm"),
    ):
        for i, (place, data) in enumerate(found):
            values = data[quantity].values
            axis.plot(np.where(values > 0, values, np.nan), at, "osD^vP"[i % 6], ms=4, color=COLOURS[i % len(COLOURS)],
                      label=_named(tree, place).partition(": ")[0])
        decades(axis)
        axis.set_xlabel(label)
        axis.grid(axis="y", color="0.92", lw=0.5)
    axes[0, 0].set_yticks(at, names)
    axes[0, 0].invert_yaxis()
    drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    yield "", drawn
