# SPDX-License-Identifier: Apache-2.0
"""Figures of training runs: one at a time, and several over one another (stable against failing, a fix against none)."""

from __future__ import annotations

import numpy as np
import xarray as xr

from ..files import NotRecorded
from .registry import figure, need
from .style import COLOURS, PAGE, colours_of, key_of, new, row_of_axes, symlog

_RECORD = "faultline train -o FILE.h5"


def steps(tree):
    return need(tree, "steps", _RECORD).to_dataset()


def _series(data, name, how=_RECORD):
    if name not in data:
        raise NotRecorded(f"the file has no steps/{name}; record it with: {how}")
    return data[name]


def _due(values):
    """A quantity recorded at a cadence: where it is there, and its values."""
    values = values.dropna("step", how="all")
    if not values.sizes["step"]:
        raise NotRecorded(f"steps/{values.name} is never due; record it with: {_RECORD} --monitor-every 10")
    return values


def name_of(tree):
    """What a run is called in a legend: its file, without the ending."""
    return tree.attrs.get("label", "run")


def _keys(values, over):
    return values[over].values if over in values.coords else np.arange(values.sizes[over])


def _lines(axis, values, over, label):
    """A line for each layer or head; what a logarithmic axis cannot show, 0 and below, is a gap."""
    keys = _keys(values, over)
    for i, (key, colour) in enumerate(zip(keys, colours_of(len(keys)))):
        axis.plot(values["step"], values.isel({over: i}), label=f"{label} {key}", color=colour)


@figure("loss", "run", "loss, norm of the gradient, largest logit over the steps; several runs over one another", several=True)
def loss(trees):
    drawn, ((losses, norms, logits),) = new(PAGE, 2.3, columns=3)
    for tree, colour in zip(trees, COLOURS * 3):
        data, label = steps(tree), name_of(tree)
        losses.plot(data["step"], _series(data, "loss"), color=colour, lw=0.8, label=label)
        if "validation_loss" in data and bool(data["validation_loss"].notnull().any()):
            due = _due(data["validation_loss"])
            losses.plot(due["step"], due, "o", ms=3, color=colour, mfc="white")
        norms.plot(data["step"], _series(data, "grad_norm"), color=colour, lw=0.6)
        largest = _series(data, "max_logit").max(("layer", "head"))
        logits.plot(data["step"], largest, color=colour, lw=0.8)
    losses.set_ylabel("cross-entropy (nat per token)\ncircles: validation")
    norms.set_ylabel("norm of the gradient (nat)")
    norms.set_yscale("log")
    logits.set_ylabel("largest scaled logit")
    symlog(logits, np.concatenate([steps(t)["max_logit"].values.ravel() for t in trees]))
    for axis in (losses, norms, logits):
        axis.set_xlabel("step")
    if len(trees) > 1:
        drawn.legend(loc="outside upper left", ncols=4)
    yield "", drawn


@figure("gradient-norm", "run", "norm of the gradient of several runs: attention backward replaced in chosen layers, against not", several=True)
def gradient_norm(trees):
    if len(trees) < 2:
        raise NotRecorded(
            "one run has nothing to be compared with; record one whose fault ends in a layer, or that runs another kernel there: "
            f"{_RECORD} --inject SITE:LAW:MAGNITUDE:layers=1:until=500, or {_RECORD} --layer-attention 1=PLAN"
        )
    drawn, ((norms, ratios),) = new(PAGE, 2.6, columns=2)
    first = _series(steps(trees[0]), "grad_norm")
    for tree, colour in zip(trees, COLOURS * 3):
        norm = _series(steps(tree), "grad_norm")
        smooth = norm.rolling(step=11, center=True, min_periods=1).median()
        norms.plot(norm["step"], norm, color=colour, lw=0.4, alpha=0.35)
        norms.plot(norm["step"], smooth, color=colour, lw=1.1, label=name_of(tree))
        together = xr.align(norm, first, join="inner")
        ratio = together[0] / together[1]
        ratios.plot(ratio["step"], ratio.rolling(step=11, center=True, min_periods=1).median(), color=colour)
    norms.set_ylabel("norm of the gradient (nat)\n(thick: median of 11 steps)")
    ratios.set_ylabel(f"over that of {name_of(trees[0])}")
    for axis in (norms, ratios):
        axis.set_yscale("log")
        axis.set_xlabel("step")
    drawn.legend(*norms.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    yield "", drawn


@figure("spectral-norms", "run", "largest singular values of W_Q and W_K by layer and step")
def spectral_norms(tree):
    data = steps(tree)
    drawn, axes = new(PAGE, 2.3, columns=3)
    for axis, name, title in ((axes[0, 0], "sigma_q", "$W_Q$"), (axes[0, 1], "sigma_k", "$W_K$")):
        values = _due(_series(data, name))
        _lines(axis, values.isel(singular_value=0), "layer", "layer")
        for layer, colour in enumerate(colours_of(values.sizes["layer"])):
            axis.plot(values["step"], values.isel(layer=layer, singular_value=1), ls=":", color=colour)
        axis.set_ylabel(f"$\\sigma_1$ of {title} (dotted: $\\sigma_2$)")
        axis.set_yscale("log")
        axis.set_xlabel("step")
    values = _due(_series(data, "sigma_q")).isel(singular_value=0)
    shown = axes[0, 2].pcolormesh(values["step"], values["layer"], np.log10(values.T), shading="nearest")
    drawn.colorbar(shown, ax=axes[0, 2], label="log10 $\\sigma_1$ of $W_Q$")
    axes[0, 2].locator_params(axis="y", nbins=min(8, values.sizes["layer"]), integer=True)
    axes[0, 2].set_ylabel("layer")
    axes[0, 2].set_xlabel("step")
    key_of(drawn, axes[0, 0], "layer", _keys(values, "layer"), list(axes[0, :2]))
    yield "", drawn


@figure("spectral-norms-by-head", "run", "largest singular value of W_Q W_K^T of every head")
def by_head(tree):
    values = _due(_series(steps(tree), "sigma_qk")).isel(singular_value=0)
    drawn, axes = row_of_axes(values.sizes["layer"], height=2.2, sharex=True)
    for layer, axis in enumerate(axes):
        _lines(axis, values.isel(layer=layer), "head", "head")
        axis.set_yscale("log")
        axis.set_xlabel("step")
        axis.set_title(f"layer {int(_keys(values, 'layer')[layer])}")
    for axis in axes[::4]:
        axis.set_ylabel("$\\sigma_1$ of $W_Q W_K^T$")
    key_of(drawn, axes[0], "head", _keys(values, "head"))
    yield "", drawn


@figure("zero-sum", "run", "sum of the score gradient, which exact arithmetic keeps at 0, added up over the steps")
def zero_sum(tree):
    data = steps(tree)
    total, step, magnitude = (_series(data, n) for n in ("zero_sum_total", "zero_sum", "zero_sum_abs"))
    drawn, ((left, right),) = new(PAGE, 2.4, columns=2)
    few = total.sizes["layer"] * total.sizes["head"] <= 8
    ratio = (np.abs(step) / magnitude.where(magnitude > 0)).rolling(step=20, min_periods=1).median()
    for layer, colour in enumerate(colours_of(total.sizes["layer"])):
        for head in range(total.sizes["head"]):
            at = {"layer": layer, "head": head}
            line = ["-", "--", "-.", ":"][head % 4] if few else "-"
            left.plot(data["step"], total.isel(at), color=colour, ls=line, lw=None if few else 0.6,
                      label=f"layer {layer}, head {head}" if few else f"layer {layer}" if head == 0 else None)
            broken = ratio.isel(at)
            right.plot(data["step"], broken.where(broken > 0), color=colour, ls=line, lw=None if few else 0.6)
    symlog(left, total.values)
    left.axhline(0, color="0.6", lw=0.6)
    left.set_ylabel("sum of ds over keys, rows, steps\n(nat per logit)")
    right.set_ylabel("|sum| / sum of |ds|\n(median of 20 steps)")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xlabel("step")
    if few:
        drawn.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=4)
    else:
        key_of(drawn, left, "layer (a line for each head)", _keys(total, "layer"))
    yield "", drawn


@figure("saturation", "run", "share of saturated rows and entropy of the attention by layer")
def saturation(tree):
    data = steps(tree)
    drawn, ((left, right),) = new(PAGE, 2.2, columns=2)
    for axis, name, label in (
        (left, "saturated_fraction", "rows with $p_{max} > 1 - 2^{-9}$"),
        (right, "entropy", "mean entropy of a row (nat)"),
    ):
        values = _due(_series(data, name)).mean("head")
        _lines(axis, values, "layer", "layer")
        axis.set_ylabel(label)
        axis.set_xlabel("step")
    key_of(drawn, left, "layer", _keys(values, "layer"))
    yield "", drawn


@figure("injected", "run", "the fault as it was realised: rms and mean, and whether its sign is the same step after step")
def injected(tree):
    data = steps(tree)
    how = f"{_RECORD} --inject SITE:LAW:MAGNITUDE"
    rms, mean = _series(data, "injected_rms", how), _series(data, "injected_mean", how)
    asked = _series(data, "injected_asked_rms", how)
    spread = [d for d in rms.dims if d != "step"]
    drawn, ((left, right),) = new(PAGE, 2.5, columns=2)
    left.plot(data["step"], rms.mean(spread), color=COLOURS[5], lw=2.2, label="rms")
    left.plot(data["step"], np.abs(mean).mean(spread), color=COLOURS[3], label="|mean|")
    left.plot(data["step"], asked.mean(spread), color="black", ls=":", label="rms asked for")  # often the same line
    left.set_yscale("log")
    left.set_ylabel("injected error,\nover the rms of the values")
    coherence = _series(data, "injected_step_coherence", how).mean([d for d in spread if d != "layer"])
    if "layer" in coherence.dims:
        _lines(right, coherence, "layer", "layer")
    else:
        right.plot(data["step"], coherence, label="all layers")
    right.set_ylim(-0.03, 1.05)
    right.set_ylabel("sign coherence over the steps\nwith an error so far")
    many = "layer" in coherence.dims and coherence.sizes["layer"] > len(COLOURS)
    if many:
        key_of(drawn, right, "layer", _keys(coherence, "layer"), [right])
    # A legend over each panel: the colours of one mean nothing in the other.
    for axis in (left,) if many else (left, right):
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, columnspacing=1, handlelength=1.2, borderaxespad=0.2)
    for axis in (left, right):
        axis.set_xlabel("step")
    yield "", drawn


@figure("guard", "run", "guard timeline: when it switched, logits and spectral norms around it")
def guard(tree):
    data = steps(tree)
    active = _series(data, "guard_active")
    if not bool((active > 0).any()) or bool((active.isel(step=0) > 0).any()):
        raise NotRecorded("no guard switched in this run; a run of faultline dissociate with the intervention guard has one")
    drawn, ((logit, sigma),) = new(PAGE, 2.3, columns=2)
    _lines(logit, _series(data, "max_logit").max("head"), "layer", "layer")
    symlog(logit, data["max_logit"].values)
    logit.set_ylabel("largest scaled logit")
    _lines(sigma, _due(_series(data, "sigma_q")).isel(singular_value=0), "layer", "layer")
    sigma.set_ylabel("$\\sigma_1$ of $W_Q$")
    sigma.set_yscale("log")
    for layer, colour in enumerate(colours_of(active.sizes["layer"])):
        on = active.isel(layer=layer)
        if bool((on > 0).any()):
            first = int(data["step"].values[int(np.argmax(on.values > 0))])
            for axis in (logit, sigma):
                axis.axvline(first, color=colour, lw=0.8, ls="--")
    for axis in (logit, sigma):
        axis.set_xlabel("step (dashed: the layer's guard switches)")
    key_of(drawn, logit, "layer", _keys(active, "layer"))
    yield "", drawn
