# SPDX-License-Identifier: Apache-2.0
"""Figures of attribution files: which site, where in the tiles, what repairs it."""

from __future__ import annotations

import numpy as np

from ..files import NotRecorded
from .registry import figure, need
from .style import COLOURS, PAGE, POSITIVE, SIGNED, decades, new, percent, signed_norm

_RECORD = "faultline attribute CAPTURE -o FILE.h5"


def layers(tree):
    """The layers of an attribution file."""
    found = [(node.path.strip("/"), node) for node in tree.subtree if "outputs" in node.children]  # a name may hold "/"
    if not found:
        raise NotRecorded(f"the file holds no layer; record it with: {_RECORD}")
    return found


def _log_wide(node, name):
    """log10 of a quantity that a double may not hold."""
    mantissa, exponent = np.abs(node[f"{name}_mantissa"].values), node[f"{name}_exponent2"].values
    with np.errstate(divide="ignore"):
        return np.log10(mantissa) + exponent * np.log10(2)


@figure("site-shares", "attribution", "error of each site alone and repaired, by output")
def site_shares(tree):
    any_drawn = False
    for layer, node in layers(tree):
        effects = need(node, "counterfactual", _RECORD)
        for output in effects["output"].values:
            one = effects.to_dataset().sel(output=output)
            alone, repaired = _log_wide(one, "alone"), _log_wide(one, "repaired")
            plan = _log_wide(need(node, f"outputs/{output}", _RECORD).to_dataset().sel(source="plan"), "rel_error")
            # A site matters by what it does alone or by what its repair changes; the twelve that matter most.
            weight = np.maximum(alone - plan, np.abs(repaired - plan) / 0.05 - 3)
            weight = np.where(np.isfinite(alone), weight, -np.inf)
            order = np.argsort(weight)[-12:]
            order = order[np.isfinite(weight[order])]
            if not order.size or not np.isfinite(plan):
                continue
            drawn, ((axis, shares),) = new(PAGE, max(1.6, 0.6 + 0.2 * order.size), columns=2, sharey=True)
            at = np.arange(order.size)
            axis.axvline(10**plan, color="0.6", lw=0.8, label="plan")
            axis.plot(10 ** alone[order], at, "o", ms=4, color=COLOURS[1], label="this site alone")
            axis.plot(10 ** repaired[order], at, "D", ms=4, mfc="none", color=COLOURS[0], label="this site repaired")
            axis.set_xscale("log")
            axis.set_yticks(at, one["site"].values[order])
            axis.set_ylim(-0.6, order.size - 0.4)
            axis.set_xlabel(f"relative error of {output}")
            drawn.legend(loc="outside upper right", ncols=3, columnspacing=1, handletextpad=0.3)
            share = one["share"].values[order]
            shares.barh(at, share, color=np.where(share >= 0, COLOURS[0], COLOURS[1]), height=0.6)
            shares.axvline(0, color="0.3", lw=0.6)
            percent(shares)
            shares.set_xlabel(f"share of the squared error in {output}\nthat its repair takes away (below 0: adds)")
            drawn.suptitle(f"{layer}: sites of {tree.attrs.get('plan', 'the plan')}", x=0.02, ha="left")
            any_drawn = True
            yield f"{layer}-{output}", drawn
    if not any_drawn:
        raise NotRecorded("no output of any layer has an error that is a number and not 0: there is nothing to share")


def _largest_shares(node):
    """{site: (share, output)}: the largest of each site's shares by size, where the file has any; the lse is no output here."""
    if "counterfactual" not in node.children or "share" not in node["counterfactual"]:
        return {}
    shares = node["counterfactual"].to_dataset()["share"]
    shares = shares.sel(output=[name for name in shares["output"].values if name != "lse"])
    found = {}
    for site in shares["site"].values:
        of_site = shares.sel(site=site)
        if of_site.size and bool(of_site.notnull().any()):
            output = str(of_site["output"].values[int(np.nanargmax(np.abs(of_site.values)))])
            found[str(site)] = (float(of_site.sel(output=output)), output)
    return found


def _pooled(site):
    """[query tile, key tile] over the heads: rms error over rms value, and mean error over rms error."""
    def mean(values):
        finite = np.isfinite(values)
        return np.where(finite.any(0), np.where(finite, values, 0).sum(0) / np.maximum(finite.sum(0), 1), np.nan)

    rms, value = (np.sqrt(mean(site[name].values**2)) for name in ("rms", "value_rms"))
    signed = mean(site["signed_mean"].values)
    return rms / np.where(value > 0, value, np.nan), signed / np.where(rms > 0, rms, np.nan)


@figure("tiles", "attribution", "local error by query tile and key tile, for the sites with the largest share")
def tiles(tree):
    for layer, node in layers(tree):
        sites = need(node, "tiles", _RECORD).children
        shares = _largest_shares(node)
        two_way = []
        for name, site in sites.items():
            values = site["rms"].values
            if values.ndim == 3 and values.shape[1] > 1 and values.shape[2] > 1 and np.nanmax(values, initial=0) > 0:
                relative = np.nanmax(_pooled(site.to_dataset())[0], initial=0)
                two_way.append((abs(shares[name][0]) if name in shares else -1, relative, name))
        if not two_way:
            raise NotRecorded(f"{layer} has no site with more than one tile each way; a longer sequence has")
        chosen = [name for *_, name in sorted(two_way, reverse=True)[:4]]
        drawn, axes = new(PAGE, 3.4, rows=2, columns=len(chosen))
        for column, name in enumerate(chosen):
            site = sites[name].to_dataset()
            rms, mean = _pooled(site)
            for row, (values, colours, norm) in enumerate(
                ((np.log10(np.where(rms > 0, rms, np.nan)), POSITIVE, None), (mean, SIGNED, signed_norm(mean)))
            ):
                axis = axes[row, column]
                axis.set_facecolor("0.9")
                shown = axis.imshow(values, cmap=colours, norm=norm, aspect="auto")
                drawn.colorbar(shown, ax=axis, shrink=0.9)
                if row == 0:
                    share = f"\n{100 * shares[name][0]:.2g}% of {shares[name][1]}" if name in shares else ""
                    axis.set_title(name + share)
                if column == 0:
                    axis.set_ylabel(("log10 rms error / rms value" if row == 0 else "mean / rms of error") + "\nquery tile")
                if row == 1:
                    axis.set_xlabel("key tile")
        drawn.suptitle(f"{layer}: local error by tile, all of {site.sizes['head']} head(s)" + ("; below the name: share of the squared error" if shares else ""), x=0.02, ha="left")
        yield layer, drawn


@figure("corrections", "attribution", "error left by each correction, beside the kernels seen")
def corrections(tree):
    for layer, node in layers(tree):
        table = need(node, "corrections", _RECORD + " --correction all").to_dataset()
        for output in table["output"].values:
            seen = need(node, f"outputs/{output}", _RECORD).to_dataset()
            names, errors = list(table["correction"].values), _log_wide(table.sel(output=output), "rel_error")
            keep = np.isfinite(errors) & (table["changes_function"].values == 0)
            order = [i for i in np.argsort(errors)[::-1] if keep[i]]
            if not order:
                continue
            drawn, ((axis,),) = new(0.7 * PAGE, max(1.6, 1.0 + 0.17 * len(order)))
            axis.plot(10 ** errors[order], range(len(order)), "o", ms=4)
            axis.set_yticks(range(len(order)), [names[i] for i in order])
            lines = list(zip(seen["source"].values, _log_wide(seen, "rel_error")))
            lines.append(("level", float(_log_wide(seen, "level"))))
            colours = iter(COLOURS[1:] * 3)
            for source, value in lines:
                if source == "floor" or not np.isfinite(value):
                    continue
                style = {"color": "0.4", "ls": ":"} if source == "level" else {"color": next(colours), "lw": 0.8}
                if source == "plan":  # a kernel that is the plan's lies on the same line
                    style.update(ls="--", lw=1.4, zorder=3)
                axis.axvline(10**value, label=source if source != "level" else "level of the format", **style)
            axis.set_xscale("log")
            axis.set_xlabel(f"relative error of {output}, {layer}")
            drawn.legend(loc="outside upper left", ncols=4, columnspacing=1, handlelength=1.2)
            yield f"{layer}-{output}", drawn


_NO_PROJECTION = "none"
_PROJECTIONS = ("zero_sum_uniform", "zero_sum_weighted", "zero_sum_largest", "key_centering")


@figure("projections", "attribution", "error of dq against the norm of the mean key, without and with each zero-sum projection", several=True)
def projections(trees):
    how = "faultline attribute CAPTURE --plan PLAN --outputs dq -o FILE.h5"
    points: dict[str, list] = {}
    levels = []
    for tree in trees:
        for _, node in layers(tree):
            if "dq" not in node["outputs"].children:
                continue
            norm = float(need(node, "rows/key_mean_norm", how).mean())
            seen = node["outputs/dq"].to_dataset()
            points.setdefault(_NO_PROJECTION, []).append((norm, _log_wide(seen.sel(source="plan"), "rel_error").item()))
            levels.append((norm, _log_wide(seen, "level").item()))
            table = need(node, "corrections", how).to_dataset().sel(output="dq")
            for name, error in zip(table["correction"].values, _log_wide(table, "rel_error")):
                if any(str(name).split("+")[-1].startswith(p) for p in _PROJECTIONS):
                    points.setdefault(str(name), []).append((norm, float(error)))
    if len(points) < 2:
        raise NotRecorded(f"no file holds dq with a zero-sum projection; record it with: {how}")
    drawn, ((axis,),) = new(0.75 * PAGE, 2.9)
    marks = "osD^vPX*"
    for i, (name, found) in enumerate(points.items()):
        norm, error = np.array(sorted(found)).T
        bare = name == _NO_PROJECTION
        axis.plot(
            norm, 10.0**error, marks[i % len(marks)] + ("-" if len(norm) > 2 else ""), ms=4, lw=0.9, label="no projection" if bare else name,
            color="black" if bare else COLOURS[(i - 1) % len(COLOURS)], mfc=None if bare else "none",
        )
    norm, level = np.array(sorted(levels)).T
    axis.plot(norm, 10.0**level, color="0.5", ls=":", lw=0.9, label="level of the format")
    decades(axis)
    decades(axis, "y")
    axis.set_xlabel("norm of the mean key")
    axis.set_ylabel("relative error of dq")
    drawn.legend(*axis.get_legend_handles_labels(), loc="outside right upper")
    yield "", drawn


@figure("rows", "attribution", "what the rows are: largest probability, broken zero sum, error of delta")
def rows(tree):
    for layer, node in layers(tree):
        table = need(node, "rows", _RECORD).to_dataset()
        drawn, ((sat, zero, delta),) = new(PAGE, 2.1, columns=3)
        p = np.sort(1 - table["p_max"].values.ravel())
        sat.plot(np.maximum(p, 1e-12), np.arange(1, p.size + 1) / p.size)
        sat.axvline(2.0**-9, color="0.5", lw=0.8, ls=":")
        sat.set_title("dotted: p rounds to 1 in bf16", color="0.4")
        sat.set_xscale("log")
        sat.set_xlabel("1 - largest p of the row")
        sat.set_ylabel("share of rows below")
        if "zero_sum" in table:
            at = np.arange(table.sizes["row"])
            heads = table["head"].values if "head" in table.coords else np.arange(table.sizes["head"])
            for name, axis, label in (("zero_sum", zero, "sum of ds over the row"), ("delta_error", delta, "error of delta")):
                for head, values in zip(heads, table[name].values):
                    total = np.cumsum(values)  # a NaN stays: a curve ends where the plan's numbers do
                    ends = np.flatnonzero(~np.isfinite(total))
                    axis.plot(at, total, label=f"head {head}" + (f", not finite from row {ends[0]}" if ends.size else ""))
                axis.axhline(0, color="0.6", lw=0.6)
                axis.set_xlabel("row")
                axis.set_ylabel(f"{label},\nrunning sum (nat per logit)")
                axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
            if table.sizes["head"] <= 6:
                zero.legend()
        drawn.suptitle(layer, x=0.02, ha="left")
        yield layer, drawn
