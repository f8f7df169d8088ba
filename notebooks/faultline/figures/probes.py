# SPDX-License-Identifier: Apache-2.0
"""Figures of what `faultline probe` found in captures: the terms of W_Q's gradient error, running sums of delta's error,
the output's error by feature and over the keys, the winner's exponent."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np

from ..files import NotRecorded
from .registry import figure
from .style import COLOURS, COLUMN, PAGE, SIGNED, decades, new, row_of_axes, symlog

KIND = "probe capture"


def _how(probe):
    return f"faultline probe CAPTURE --probe {probe} -o FILE.h5"


def blocks(tree, probe: str, how: str | None = None):
    """(place, dataset) of every group that a probe wrote: "layer1", or "run7/layer1" where the file is of several."""
    found = [
        (node.path.strip("/").rpartition("/")[0], node.to_dataset()) for node in tree.subtree if node.name == probe
    ]
    if not found:
        raise NotRecorded(f"the file has no {probe}; record it with: {how or _how(probe)}")
    return found


def _file_name(place: str, head=None) -> str:
    stem = place.replace("/", "-")
    return stem if head is None else f"{stem}-head{head}"


def _clipped(values):
    """Colours symmetric about 0 that end where all but one in two hundred values do: one element must not bleach a map."""
    finite = np.abs(np.asarray(values, float))
    finite = finite[np.isfinite(finite)]
    most = np.quantile(finite, 0.995) if finite.size else 0.0
    return mpl.colors.Normalize(-(most or finite.max(initial=0) or 1.0), most or finite.max(initial=0) or 1.0)


def _heat(drawn, axis, values, title, x, y, norm=None):
    shown = axis.imshow(values, cmap=SIGNED, norm=norm or _clipped(values), aspect="auto", interpolation="nearest")
    bar = drawn.colorbar(shown, ax=axis, extend="neither" if norm else "both", fraction=0.06, pad=0.03)
    bar.formatter.set_powerlimits((-2, 3))
    bar.ax.locator_params(nbins=3)
    axis.spines[:].set_visible(False)
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.locator_params(nbins=4, integer=True)


def _resultant(a, b, weights):
    """|sum w_t a_t b_t^T| over the sum of the terms' norms (probes/similarity.hpp)."""
    total = np.linalg.norm(a.T @ (weights[:, None] * b))
    parts = np.abs(weights) * np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return total / parts.sum() if parts.sum() > 0 else np.nan


def similarity_numbers(head):
    """The similarity of one head's terms, (what, number) by the definitions of the probe's table. head: the group
    "similarity" of a probe file at one head."""
    cosine, energy, weights = (head[name].values for name in ("cosine", "energy", "coefficient"))
    a, b = head["pk"].values, head["x" if "x" in head else "q"].values
    other = ~np.eye(len(cosine), dtype=bool) & np.isfinite(cosine)
    p = energy[energy > 0]
    lines = [
        ("mean cosine", cosine[other].mean() if other.any() else np.nan),
        ("mean |cosine|", np.abs(cosine[other]).mean() if other.any() else np.nan),
        ("energy in the first", p[:1].sum() / p.sum() if p.size else np.nan),
        ("energy in the first 3", p[:3].sum() / p.sum() if p.size else np.nan),
        ("effective rank", np.exp(-(p * np.log(p)).sum()) if p.size else np.nan),
    ]
    if np.isfinite(weights).all():
        lines.append(("resultant", _resultant(a, b, weights)))
        size = np.abs(weights).sum()
        lines.append(("sum of delta errors\nover sum of sizes", weights.sum() / size if size else np.nan))
    return lines


@figure("similarity", KIND, "PK, the layer's input and their outer products as heat-maps, with similarity in numbers")
def similarity(tree):
    any_drawn = False
    for place, data in blocks(tree, "similarity"):
        name = "x" if "x" in data else "q"
        # One head a layer: the one whose terms are most alike.
        cosines = np.abs(data["cosine"].values)
        known = np.isfinite(cosines)
        if not known.any():
            continue
        any_drawn = True
        alike = np.where(known.any((1, 2)), np.where(known, cosines, 0).sum((1, 2)) / np.maximum(known.sum((1, 2)), 1), np.nan)
        at = int(np.nanargmax(alike))
        one = data.isel(head=at)
        a, b, cosine = one["pk"].values, one[name].values, one["cosine"].values
        weights = one["coefficient"].values
        size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        if np.isfinite(weights).all() and np.any(weights):
            size = size * np.abs(weights)
        # Two terms as the paper shows them: the largest of the first half of the tokens, and of the second.
        half = max(1, len(size) // 2)
        chosen = [int(np.argmax(size[:half])), half + int(np.argmax(size[half:])) if len(size) > half else 0]
        drawn, axes = new(PAGE, 4.6, rows=2, columns=3)
        symbol = "X" if name == "x" else "q"
        feature = "input feature" if name == "x" else "query feature"
        _heat(drawn, axes[0, 0], a, "$PK$", "key feature", "term $t$")
        _heat(drawn, axes[0, 1], b, f"${symbol}$", feature, "term $t$")
        whole = mpl.colors.Normalize(-1, 1)
        _heat(drawn, axes[0, 2], cosine, f"cosine of $(PK)[t]^T {symbol}[t]$", "term", "term", whole)
        captures = int(np.nanmax(data["term_capture"].values)) + 1
        for axis, t in zip(axes[1], chosen):
            token = int(data["term_row"].values[t])
            where = f", capture {int(data['term_capture'].values[t])}" if captures > 1 else ""
            _heat(drawn, axis, np.outer(a[t], b[t]), f"$(PK)[t]^T {symbol}[t]$, row {token}{where}", feature, "key feature")
        text = axes[1, 2]
        text.set_axis_off()
        for i, (what, value) in enumerate(similarity_numbers(one)):
            text.text(0.12, 0.95 - 0.14 * i, f"{value:.4g}", transform=text.transAxes, va="top", ha="right")
            text.text(0.18, 0.95 - 0.14 * i, what, transform=text.transAxes, va="top")
        drawn.suptitle(f"{place}, head {one['head'].item()}: terms of the error of $W_Q$'s gradient", x=0.02, ha="left")
        yield _file_name(place, one["head"].item()), drawn
    if not any_drawn:
        raise NotRecorded("no term of any head is other than 0 and finite; expected a capture whose keys and dO are")


@figure("delta-error", KIND, "running sum of the error of delta over rows, and over captures where there are several")
def delta_error(tree):
    # Places are LAYER, or of several captures LABEL/LAYER; a layer's own name may hold "/".
    several = np.size(tree.attrs.get("inputs", ())) > 1
    layers: dict[str, list] = {}
    for place, data in blocks(tree, "conservation"):
        if "delta_error" in data:
            layers.setdefault(place.partition("/")[2] if several else place, []).append((place, data))
    if not layers:
        raise NotRecorded("the capture has no dO, so no delta; faultline train --capture STEP records captures with it")
    for layer, parts in layers.items():
        first = parts[0][1]
        heads, stopped = [str(h) for h in first["head"].values], set()
        drawn, axes = row_of_axes(len(heads), height=2.3, sharex=True)
        sources = list(dict.fromkeys(str(s) for _, d in parts for s in d["source"].values if s != "exact"))
        everything = []
        for i, axis in enumerate(axes):
            for colour, source in zip(COLOURS * 3, sources):
                total, so_far, ends = [], 0.0, None
                for _, d in parts:
                    rows = d.sizes["row"] * d.sizes["sequence"]
                    if source not in d["source"].values:  # the curve has a gap over a capture without it
                        total.append(np.full(rows, np.nan))
                        continue
                    sums = so_far + np.cumsum(d["delta_error"].sel(source=source).isel(head=i).values.ravel())
                    so_far = sums[-1]
                    if ends is None and not np.isfinite(so_far):  # a NaN stays in all sums behind it
                        ends = sum(map(len, total)) + int(np.argmax(~np.isfinite(sums)))
                    total.append(sums)
                total = np.concatenate(total)
                everything.append(total)
                axis.plot(total, color=colour, label=source, lw=1.0)
                if ends is not None:
                    axis.plot(ends, 0, "x", color=colour, ms=5, clip_on=False)
                    stopped.add(source)
            edges = np.cumsum([d.sizes["row"] * d.sizes["sequence"] for _, d in parts])[:-1]
            for edge in edges:
                axis.axvline(edge, color="0.7", lw=0.6, ls=":")
            axis.axhline(0, color="0.6", lw=0.6)
            axis.set_title(f"head {heads[i]}")
            axis.set_xlabel("row" if len(parts) == 1 else "row (dotted: next capture)")
        for axis in axes:
            symlog(axis, np.concatenate(everything), linear=0.5)  # sums that cross 0 again and again
        axes[0].set_ylabel("sum of (delta - exact) so far\n(nat per logit)")
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)
        note = f"; cross: not finite from there on ({', '.join(sorted(stopped))})" if stopped else ""
        drawn.suptitle(layer + note, x=0.02, ha="left")
        yield _file_name(layer), drawn


def _worst_head(data) -> int:
    """The head with the largest mean error of a feature; the first where no error is a number."""
    sizes = np.abs(data["mean_ulp"].values)
    return int(np.argmax(np.where(np.isfinite(sizes), sizes, -1).max(axis=(0, 2))))


@figure("output-error", KIND, "mean signed error of O by feature in ulps; dO and the error of O of one row")
def output_error(tree):
    for place, data in blocks(tree, "output-error"):
        at = _worst_head(data)
        one = data.isel(head=at)
        feature = np.arange(data.sizes["feature"])
        drawn, axes = new(PAGE, 4.4, rows=3, sharex=True)
        mean, dout, error = axes[:, 0]
        marks = "osD^vP"
        for i, source in enumerate(one["source"].values):
            mean.plot(
                feature, one["mean_ulp"].sel(source=source), marks[i % len(marks)], ms=3 if i else 5,
                mfc="none" if i == 0 else None, mew=0.8, color=COLOURS[i % len(COLOURS)], label=str(source), ls="",
            )
        mean.set_ylabel("mean error of $O$\nover rows (ulp)")
        drawn.legend(*mean.get_legend_handles_labels(), loc="outside upper right", ncols=4, handletextpad=0.2)
        # Where both have one sign, the product pushes delta up: the paper's features 20 and 29 of token 718.
        product = one["row_dout"].values * one["row_o_error"].values
        colour = np.where(product > 0, COLOURS[1], COLOURS[0])
        for axis, values, label in (
            (dout, one["row_dout"].values, "$dO$\n(nat per value)"),
            (error, one["row_o_error"].values, "error of $O$\n(value)"),
        ):
            axis.bar(feature, values, color=colour, width=0.8)
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
            axis.set_ylabel(label)
        for axis in axes[:, 0]:
            axis.axhline(0, color="0.6", lw=0.6)
        handles = [mpl.patches.Patch(color=COLOURS[1]), mpl.patches.Patch(color=COLOURS[0])]
        drawn.legend(handles, ["dO times the error above 0: delta too large", "below 0: too small"], ncols=2, loc="outside lower center")
        row = int(one["running_row"])
        source = str(one["source"].values[0])
        # They are one number where delta is made of O and dO; a plan may make it of P and dP.
        text = f"row {row}, {source}: sum of the products {np.sum(product):.4g}"
        if "row_delta_error" in one:
            text += f", error of its delta {float(one['row_delta_error']):.4g} nat/logit"
        dout.set_title(text, loc="left")
        error.set_xlabel("feature")
        drawn.suptitle(f"{place}, head {one['head'].item()}", x=0.02, ha="left")
        yield _file_name(place, one["head"].item()), drawn


@figure("running-error", KIND, "running error of O over the keys of one row, with the keys whose weight is stored as 1")
def running_error(tree):
    for place, data in blocks(tree, "output-error"):
        events = data["running_event"].values.sum(axis=1)
        at = int(np.argmax(events)) if events.any() else _worst_head(data)
        one = data.isel(head=at)
        key = np.arange(data.sizes["key"])
        seen = np.flatnonzero(one["running_weight"].values > 0)
        last = min(len(key), int(one["running_row"]) + 1) if seen.size == 0 else max(int(seen[-1]) + 1, 2)
        drawn, axes = new(PAGE, 3.6, rows=2, sharex=True)
        error, weight = axes[:, 0]
        ones = np.flatnonzero(one["running_event"].values > 0)
        for axis in (error, weight):
            for k in ones[:200]:
                axis.axvline(k, color=COLOURS[4], lw=0.6, zorder=0)
        error.step(key[:last], one["running_error"].values[:last], where="post", color=COLOURS[0])
        error.axhline(0, color="0.6", lw=0.6)
        error.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        feature = int(one["running_feature"])
        error.set_ylabel(f"error of $\\bar O$ so far,\nfeature {feature} (value)")
        shown = np.maximum(one["running_weight"].values[:last], 1e-12)
        weight.plot(key[:last], shown, ".", ms=2.5, color=COLOURS[0])
        weight.set_yscale("log")
        weight.set_ylim(shown.min() / 3, 3)
        weight.set_ylabel("$\\bar P$ = exp(s - max)" + ("\n(at least 1e-12)" if shown.min() <= 1e-12 else ""))
        weight.set_xlabel("key")
        error.set_title(
            f"{place}, head {one['head'].item()}, row {int(one['running_row'])}; "
            f"vertical: the weight is stored as 1 ({len(ones)} keys)", loc="left",
        )
        yield _file_name(place, one["head"].item()), drawn


@figure("winner-exponent", KIND, "exponent that a kernel gives its winner against the size of the logit, fused and not")
def winner_exponent(tree):
    logits, fused, unfused = [], [], []
    for _, data in blocks(tree, "saturation"):
        logits.append(data["max_logit"].values.ravel())
        fused.append(data["winner_exponent_fused"].values.ravel())
        unfused.append(data["winner_exponent_unfused"].values.ravel())
    logit, fused, unfused = (np.concatenate(v) for v in (logits, fused, unfused))
    keep = np.isfinite(logit) & (logit != 0) & np.isfinite(fused)
    if not keep.any():
        raise NotRecorded("no row of this capture has a largest logit other than 0")
    size = np.abs(logit[keep])
    drawn, ((axis,),) = new(1.4 * COLUMN, 2.9)
    axis.plot(size, fused[keep], ".", ms=3, color=COLOURS[1], label="fused: fma(m, c, -round(m c))", rasterized=size.size > 5000)
    axis.plot(size, unfused[keep], ".", ms=3, color=COLOURS[0], label="unfused: round(m c) - round(m c)", rasterized=size.size > 5000)
    # Half an ulp of the fp32 product x = m c, c = scale log2(e), is 2^(floor(log2 x) - 24).
    x = np.geomspace(size.min(), size.max() * 1.001, 400)
    half_ulp = 2.0 ** (np.floor(np.log2(x * np.log2(np.e))) - 24)
    for sign in (1, -1):
        axis.plot(x, sign * half_ulp, color="0.4", lw=0.7, label="half an ulp of m c" if sign > 0 else None)
    decades(axis)
    symlog(axis, np.concatenate([fused[keep], half_ulp, -half_ulp]))
    axis.set_xlabel("|largest logit| of the row")
    axis.set_ylabel("exponent of the winner (log2),\n0 in exact arithmetic")
    drawn.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=1)
    yield "", drawn
