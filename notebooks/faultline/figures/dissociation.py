# SPDX-License-Identifier: Apache-2.0
"""Figures of dissociation files: sources against interventions, the channel over the steps, coherence against deviation."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np

from ..files import NotRecorded
from .registry import figure, need
from .style import COLOURS, PAGE, SIGNED, decades, distinct, ink, new, row_of_axes, symlog

_RECORD = "faultline dissociate -o FILE.h5"


def _outcome(tree):
    return need(tree, "outcome", _RECORD).to_dataset()


def _verdict(cell, short=False) -> str:
    """What became of a cell's seeds, and of how many where there are several; a line each. short: first letters."""
    ran, lost = int(np.nansum(cell["runaway"])), int(np.nansum(cell["loss_failed"]))
    seeds = int(np.isfinite(cell["runaway"]).sum())
    if not seeds:
        return ""
    found = [(what, count) for what, count in (("runaway", ran), ("loss", lost)) if count]
    if short:
        return "\n".join(f"{what[0].upper()}{count if seeds > 1 else ''}" for what, count in found) or "H"
    return "\n".join(f"{what}\n{count}/{seeds}" if seeds > 1 else what for what, count in found) or "healthy"


@figure("matrix", "dissociation", "sources against interventions: sigma_max(W_Q) over the control's beside the verdict's limit, and the verdict")
def matrix(tree):
    data = _outcome(tree)
    sources = [s for s in data["source"].values if s != "none"]
    if not sources:
        raise NotRecorded(f"the file has no source but none; record it with: {_RECORD} --source SITE:LAW:MAGNITUDE")
    # The square of a matrix that is not there for a fault (an intervention run only as a control) stays empty.
    interventions = [i for i in data["intervention"].values if np.isfinite(data["sigma_ratio"].sel(source=sources, intervention=i)).any()]
    ratio = data["sigma_ratio"].sel(source=sources, intervention=interventions).median("seed")
    drawn, ((axis,),) = new(PAGE, max(2.6, 1.2 + (0.7 if data.sizes["seed"] > 1 else 0.46) * len(sources)))
    # The verdict's limit in the middle and a decade to each side in every file: colours of two pictures are the same ratios.
    limit = float(tree.attrs["sigma_ratio"])
    colours, norm = mpl.colormaps[SIGNED].with_extremes(bad="0.85"), mpl.colors.LogNorm(limit / 10, limit * 10)
    shown = axis.imshow(ratio.values, cmap=colours, aspect="auto", norm=norm)
    bar = drawn.colorbar(shown, ax=axis, fraction=0.05, extend="both", ticks=limit * np.array([0.1, 0.25, 0.5, 1, 2.5, 5, 10]),
                         format=mpl.ticker.FormatStrFormatter("%g"))
    bar.ax.minorticks_off()
    bar.ax.axhline(limit, color="black", lw=0.8)
    absent = "\ngrey: not run" if ratio.isnull().any() else ""
    bar.set_label(f"$\\sigma_{{max}}(W_Q)$ over the control's;\nred: above the limit, {limit:g}{absent}")
    short = len(interventions) > 7  # a word would run into the next cell
    if short:
        seeds = data.sizes["seed"]
        axis.set_title("H healthy, R runaway, L loss" + (f" (of {seeds} seeds)" if seeds > 1 else "") + "; below: the ratio", loc="left")
    for row, source in enumerate(sources):
        for column, intervention in enumerate(interventions):
            text = _verdict(data.sel(source=source, intervention=intervention), short)
            value = ratio.values[row, column]
            ground = colours(norm(value)) if np.isfinite(value) else colours.get_bad()
            if text and np.isfinite(value):
                text += f"\n{value:.3g}"
            axis.text(column, row, text, ha="center", va="center", color=ink(ground), fontsize=8)
    axis.set_xticks(range(len(interventions)), interventions, rotation=30, ha="right")
    axis.set_yticks(range(len(sources)), sources)
    axis.spines[:].set_visible(False)
    yield "", drawn


@figure("seeds", "dissociation", "sigma_max(W_Q) and train loss over the matched control's, a mark for each seed")
def seeds(tree):
    data = _outcome(tree)
    sources = [s for s in data["source"].values if s != "none" and np.isfinite(data["sigma_ratio"].sel(source=s)).any()]
    if not sources:
        raise NotRecorded(f"the file has no source but none; record it with: {_RECORD} --source SITE:LAW:MAGNITUDE")
    named = [str(i) for i in data["intervention"].values if np.isfinite(data["sigma_ratio"].sel(source=sources, intervention=i)).any()]
    numbers = [int(s) for s in data["seed"].values]
    looks = dict(zip(numbers, zip("osD^vP*Xph<>" * (1 + len(numbers) // 12), COLOURS * (1 + len(numbers) // len(COLOURS)))))
    columns = min(len(sources), 5)
    blocks = -(-len(sources) // columns)
    drawn, axes = new(PAGE, 0.7 + 2.9 * blocks, rows=2 * blocks, columns=columns, sharex=True, sharey="row")
    at = np.arange(len(named))
    losses = data["loss_ratio"].sel(source=sources, intervention=named).values
    spread = np.nanmax(losses) / np.nanmin(losses)
    by_spread = ((1.3, np.arange(0.7, 1.31, 0.05)), (1.8, np.arange(0.5, 1.81, 0.1)), (np.inf, [0.5, 0.7, 1, 1.5, 2, 3, 5, 10]))
    marked = next(ticks for most, ticks in by_spread if spread < most or most == np.inf)
    for place in range(blocks * columns):
        pair = axes[2 * (place // columns) : 2 * (place // columns) + 2, place % columns]
        if place >= len(sources):
            for axis in pair:
                axis.set_axis_off()
            continue
        cells = data.sel(source=sources[place], intervention=named)
        for axis, quantity, limit in zip(pair, ("sigma_ratio", "loss_ratio"), (tree.attrs["sigma_ratio"], tree.attrs["loss_ratio"])):
            for n, seed in enumerate(numbers):
                mark, colour = looks[seed]
                beside = 0.16 * (n - (len(numbers) - 1) / 2) if len(numbers) < 6 else 0
                axis.plot(at + beside, cells[quantity].sel(seed=seed), mark, ms=4, mfc="none", color=colour, label=f"seed {seed}")
            axis.axhline(1, color="0.6", lw=0.6)
            axis.axhline(float(limit), color="0.6", lw=0.6, ls=":")
            axis.set_yscale("log")
        pair[0].set_title("\n".join(str(sources[place]).split(":", 1)))
        for axis, ticks in zip(pair, ([0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500], marked)):
            axis.margins(y=0.1)
            axis.yaxis.set_minor_locator(mpl.ticker.NullLocator())
            axis.yaxis.set_major_locator(mpl.ticker.FixedLocator(ticks))
            axis.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
        pair[1].set_xticks(at, [n.replace(":", ":\n", 1) for n in named], rotation=60, ha="right")
        pair[1].xaxis.set_tick_params(labelbottom=True)
    for block in range(blocks):
        axes[2 * block, 0].set_ylabel("$\\sigma_{max}(W_Q)$\nover the control's")
        axes[2 * block + 1, 0].set_ylabel("train loss\nover the control's")
    drawn.legend(*_unique_handles(axes.ravel()), loc="outside upper left", ncols=6)
    yield "", drawn


@figure("channel", "dissociation", "sigma_max(W_Q) over the steps, by source and intervention")
def channel(tree):
    data = need(tree, "series", _RECORD).to_dataset()
    sources = [s for s in dict.fromkeys(data["source"].values) if s != "none"]
    interventions = list(dict.fromkeys(data["intervention"].values))
    shown = sources[:6]
    if not shown:
        raise NotRecorded(f"the file has no run with a fault; record it with: {_RECORD} --source SITE:LAW:MAGNITUDE")
    looks = dict(zip(map(str, interventions), distinct(len(interventions))))
    drawn, axes = row_of_axes(len(shown), height=2.1 + 0.06 * len(interventions), most=3, sharex=True)
    seeds = data["seed"].values
    sigma = data["sigma_q"]
    with_controls = False
    for axis, source in zip(axes, shown):
        faults = [(name, run) for name in looks for run in _runs(data, source, name)]
        for run in _runs(data, "none", "none"):
            axis.plot(data["step"], sigma.isel(run=run), color="0.6", lw=0.9, label="no fault" if seeds[run] == seeds.min() else None)
        for name in dict.fromkeys(name for name, _ in faults if name != "none"):
            for run in _runs(data, "none", name):
                axis.plot(data["step"], sigma.isel(run=run), color=looks[name][0], lw=0.9, ls=_CONTROL)
                with_controls = True
        for place, (name, run) in enumerate(faults):
            # What later lines lie on along all its steps is as much wider, and shows on both sides of them.
            covers = sum(seeds[later] == seeds[run] and _coincide(sigma.isel(run=run), sigma.isel(run=later)) for _, later in faults[place + 1 :])
            colour, line = looks[name]
            axis.plot(data["step"], sigma.isel(run=run), color=colour, ls=line, lw=0.9 + 1.8 * covers, label=name if seeds[run] == seeds.min() else None)
        axis.set_yscale("log")
        axis.set_title(source)
        axis.set_xlabel("step")
    for axis in axes[::3]:
        axis.set_ylabel("$\\sigma_{max}(W_Q)$")
    handles, labels = _unique_handles(axes)
    if with_controls:
        handles.append(mpl.lines.Line2D([], [], color="0.3", lw=0.9, ls=_CONTROL))
        labels.append("no fault, with the intervention")
    if len(shown) < len(sources):
        handles.append(mpl.lines.Line2D([], [], ls=""))
        labels.append(f"(the first {len(shown)} of {len(sources)} sources)")
    drawn.legend(handles, labels, loc="outside upper left", ncols=3)
    yield "", drawn


_CONTROL = (0, (1, 1.5))  # dotted: what a run is compared with


def _coincide(one, other) -> bool:
    """Whether two series look like one line: nowhere a hundredth apart."""
    one, other = one.values, other.values
    return bool(np.allclose(one, other, rtol=0.01, atol=0, equal_nan=True) and np.isfinite(one).any())


@figure("coherence", "dissociation", "sign coherence of the fault against its size, the outcome as colour")
def coherence(tree):
    data = _outcome(tree)
    if "none" not in data["intervention"].values:
        raise NotRecorded(f"the file has no run without intervention; record it with: {_RECORD} --intervention none")
    cells = data.sel(intervention="none")
    faults = [str(s) for s in cells["source"].values if s != "none"]
    if not faults:
        raise NotRecorded(f"the file has no source but none; record it with: {_RECORD} --source SITE:LAW:MAGNITUDE")
    drawn, ((axis,),) = new(PAGE, 2.8)
    marks = dict(zip(faults, "osD^vP*Xph<>" * (1 + len(faults) // 12)))
    kinds = {"healthy": COLOURS[2], "loss": COLOURS[4], "runaway": COLOURS[1]}
    seen = set()
    for source in faults:
        for seed in cells["seed"].values:
            cell = cells.sel(source=source, seed=seed)
            if not np.isfinite(cell["runaway"]):
                continue
            kind = "runaway" if cell["runaway"] > 0 else "loss" if cell["loss_failed"] > 0 else "healthy"
            axis.plot(
                cell["injected_rms"], np.abs(cell["step_coherence"]), marks[source], ms=5, color=kinds[kind], alpha=0.8,
            )
            seen.add(kind)
    decades(axis)
    axis.set_ylim(-0.03, 1.05)
    axis.set_xlabel("rms of the fault, relative to the value's")
    axis.set_ylabel("sign coherence over the steps")
    blank = {"ls": "", "ms": 5}
    outcomes = [mpl.lines.Line2D([], [], marker="s", color=kinds[k], label=k, **blank) for k in kinds if k in seen]
    drawn.legend(handles=outcomes, loc="outside upper left", ncols=3)
    drawn.legend(handles=[mpl.lines.Line2D([], [], marker=marks[s], color="0.4", label=s, **blank) for s in faults],
                 loc="outside right upper", handletextpad=0.2)
    yield "", drawn


def _runs(data, source, intervention):
    """Indices of the runs of a cell, all seeds."""
    pairs = zip(data["source"].values, data["intervention"].values)
    return [i for i, pair in enumerate(pairs) if pair == (source, intervention)]


def _panels(shown, how):
    if not shown:
        raise NotRecorded(how)
    return row_of_axes(len(shown), height=2.1, most=3, sharex=True)


def _is_removal(intervention: str) -> bool:
    return intervention.split(":")[0] == "project"


@figure("projection", "dissociation", "sigma_max(W_Q) with the leading directions projected out, and with equal energy removed elsewhere")
def projection(tree):
    data, outcome = need(tree, "series", _RECORD).to_dataset(), _outcome(tree)
    removals = [str(i) for i in outcome["intervention"].values if _is_removal(str(i))]
    shown = [s for s in outcome["source"].values if s != "none" and any(_runs(data, s, r) for r in removals)]
    drawn, axes = _panels(shown, f"no run of this file projects updates; record it with: {_RECORD} "
                          "--intervention none --intervention project --intervention project:removal=elsewhere")
    for axis, source in zip(axes, shown):
        for name, (colour, line) in [("none", ("black", "-")), *zip(removals, distinct(len(removals)))]:
            energy = outcome["removed_fraction"].sel(source=source, intervention=name).median().item() if name in removals else 0
            for n, run in enumerate(_runs(data, source, name)):
                axis.plot(data["step"], data["sigma_q"].isel(run=run), color=colour, ls=line, lw=1.0,
                          label=name if n == 0 else None)
                if n == 0 and name in removals and np.isfinite(energy):
                    end = data["sigma_q"].isel(run=run).dropna("step")
                    axis.annotate(f"{100 * energy:.0f}%", (float(end["step"][-1]), float(end[-1])), xytext=(2, 0),
                                  textcoords="offset points", color=colour, va="center", annotation_clip=False)
        for run in _runs(data, "none", "none"):
            axis.plot(data["step"], data["sigma_q"].isel(run=run), color="0.6", lw=0.9, ls="--", label="no fault" if run == _runs(data, "none", "none")[0] else None)
        axis.set_yscale("log")
        axis.set_title(f"{source}\n(%: of the updates' energy removed)")
        axis.set_xlabel("step")
    axes[0].set_ylabel("$\\sigma_{max}(W_Q)$")
    drawn.legend(*_unique_handles(axes), loc="outside upper left", ncols=3)
    yield "", drawn


@figure("guard-timeline", "dissociation", "when the guard switched, and logits, sigma_max(W_Q) and loss around it, beside the unguarded run")
def guard_timeline(tree):
    data, outcome = need(tree, "series", _RECORD).to_dataset(), _outcome(tree)
    guards = [str(i) for i in outcome["intervention"].values if str(i).split(":")[0] == "guard"]
    when = outcome["triggered_at"]
    cells = [(str(s), g) for s in outcome["source"].values for g in guards if (when.sel(source=s, intervention=g) >= 0).any()]
    if not cells:
        raise NotRecorded(f"no guard switched in this file; record one with: {_RECORD} --intervention none --intervention guard:threshold=30")
    for source in dict.fromkeys(s for s, _ in cells):
        mine = [g for s, g in cells if s == source]
        drawn, ((logit, sigma, loss),) = new(PAGE, 2.5 + 0.16 * max(0, -(-(len(mine) + 2) // 2) - 1), columns=3)
        # One seed: the first in which one of this source's guards switched.
        switched = (when.sel(source=source, intervention=mine) >= 0).any("intervention").values
        seed = int(outcome["seed"].values[int(np.argmax(switched))])
        looks = dict(zip(mine, distinct(len(mine))))
        for name, (colour, line) in [("none", ("black", "-")), *looks.items()]:
            runs = [r for r in _runs(data, source, name) if int(data["seed"].values[r]) == seed]
            for run in runs:
                for axis, quantity in ((logit, "max_logit"), (sigma, "sigma_q"), (loss, "loss")):
                    axis.plot(data["step"], data[quantity].isel(run=run), color=colour, ls=line, lw=1.0,
                              label="unguarded" if name == "none" else name)
            if name != "none":
                at = float(when.sel(source=source, intervention=name, seed=seed))
                for axis in (logit, sigma, loss):
                    if at >= 0:
                        axis.axvline(at, color=colour, lw=0.8, ls=":")
        for run in _runs(data, "none", "none"):
            if int(data["seed"].values[run]) == seed:
                for axis, quantity in ((logit, "max_logit"), (sigma, "sigma_q"), (loss, "loss")):
                    axis.plot(data["step"], data[quantity].isel(run=run), color="0.6", lw=0.9, ls="--", label="no fault")
        # The threshold of the guard (docs/dissociation.md has the defaults), where its monitor is drawn.
        for name, (colour, _) in looks.items():
            words = dict(word.split("=", 1) for word in name.split(":")[1:])
            axis = {"max_logit": logit, "sigma_q": sigma}.get(words.get("monitor", "max_logit"))
            if axis is not None:
                axis.axhline(float(words.get("threshold", 100)), color=colour, lw=0.8, ls=":")
        symlog(logit, data["max_logit"].values)
        sigma.set_yscale("log")
        logit.set_ylabel("largest scaled logit")
        sigma.set_ylabel("$\\sigma_{max}(W_Q)$")
        loss.set_ylabel("train loss (nat per token)")
        for axis in (logit, sigma, loss):
            axis.set_xlabel("step (dotted: switch, threshold)")
        drawn.legend(*_unique_handles([logit]), loc="outside upper left", ncols=2 if len(mine) > 1 else 3)
        seeds = outcome.sizes["seed"]
        logit.set_title(source + (f", seed {seed}, of {seeds} seeds" if seeds > 1 else ""), loc="left")
        yield source, drawn


def _unique_handles(axes):
    labelled = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            labelled.setdefault(label, handle)
    return list(labelled.values()), list(labelled)
