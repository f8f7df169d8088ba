# SPDX-License-Identifier: Apache-2.0
"""One style for every figure: column widths, 8 pt, colours that colour-blind readers tell apart."""

from __future__ import annotations

import contextlib

import matplotlib as mpl
import numpy as np

COLUMN = 3.35  # inches: one column of a two-column paper
PAGE = 6.9  # inches: both columns

# Okabe and Ito, Color Universal Design (2008), without its yellow, which is pale on paper.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SIGNED = "RdBu_r"  # diverging, zero in the middle
POSITIVE = "viridis"

_SETTINGS = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "figure.titlesize": 9,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 200,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text stays text
    "image.interpolation": "nearest",
}


@contextlib.contextmanager
def style():
    """The settings, for the block alone."""
    with mpl.rc_context(_SETTINGS):
        yield


def colours_of(count):
    """A colour for each of `count` lines: the distinct ones where they suffice, else a sequence from dark to light, whose
    order is that of the lines (layers, heads)."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    return [mpl.colors.to_hex(c) for c in mpl.colormaps[POSITIVE](np.linspace(0, 0.92, count))]


def distinct(count):
    """(colour, line style) of each of `count` things that have no order; black is left for what they are compared with."""
    return [(COLOURS[i % 6], ("-", "--", "-.", (0, (1, 1)))[i // 6 % 4]) for i in range(count)]


def key_of(drawn, axis, label, names, beside=None):
    """What the lines of `axis` are: a legend above the figure for a few, a colour bar for a sequence, beside all panels or
    those given."""
    if len(names) <= len(COLOURS):
        drawn.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=7, columnspacing=1, handlelength=1.2)
        return
    shades = mpl.colors.ListedColormap(colours_of(len(names)))
    norm = mpl.colors.BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
    ticks = sorted({0, len(names) // 2, len(names) - 1})
    bar = drawn.colorbar(mpl.cm.ScalarMappable(norm, shades), ax=beside or [a for a in drawn.axes if a.get_subplotspec() is not None],
                         label=label, ticks=ticks, fraction=0.03, pad=0.02)
    bar.ax.set_yticklabels([str(names[t]) for t in ticks])
    bar.ax.minorticks_off()


def new(width=COLUMN, height=2.4, rows=1, columns=1, **options):
    """A figure without a window, and its axes as a 2-d array."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def row_of_axes(count, height=2.3, most=4, **options):
    """`count` panels of one kind, at most `most` side by side, the rest in rows below; and the axes in use as a list."""
    columns = min(count, most)
    rows = -(-count // columns)
    figure, axes = new(PAGE, height * rows, rows=rows, columns=columns, sharey=True, **options)
    for axis in axes.ravel()[count:]:
        axis.set_axis_off()
    for axis in axes.ravel()[max(0, count - columns) : count]:  # the lowest of its column has the numbers
        axis.xaxis.set_tick_params(labelbottom=True)
    return figure, list(axes.ravel()[:count])


def symlog(axis, values, which="y", linear=0.05):
    """Signed quantities over many decades: linear below what the fraction `linear` of the magnitudes does not exceed (but
    at most a tenth of the largest, or half of it for `linear` of 1/2 and more), logarithmic above."""
    values = np.asarray(values, float)
    signed = values[np.isfinite(values)]
    finite = np.abs(signed[signed != 0])
    if not finite.size:
        return
    largest = finite.max()
    most = largest / (10 if linear < 0.5 else 2)
    threshold = max(min(np.quantile(finite, linear), most), largest * 1e-4)
    getattr(axis, f"set_{which}scale")("symlog", linthresh=threshold)
    # Labels at 0 and at up to three powers of ten a side, the largest among them.
    top, bottom = int(np.floor(np.log10(largest))), int(np.ceil(np.log10(threshold)))
    powers = [10.0**k for k in range(top, min(bottom, top) - 1, -max(1, -(-(top - bottom + 1) // 3)))]
    ticks = [t for t in [-p for p in powers] + [0] + powers[::-1] if signed.min() <= t <= signed.max() or t == 0]
    getattr(axis, f"set_{which}ticks")(ticks)
    if signed.min() >= 0:
        getattr(axis, f"set_{which}lim")(0)


def decades(axis, which="x"):
    """A logarithmic axis with powers of ten alone, two of them at least: labels between them run into one another."""
    getattr(axis, f"set_{which}scale")("log")
    low, high = getattr(axis, f"get_{which}lim")()
    if np.floor(np.log10(high)) - np.ceil(np.log10(low)) < 1:
        low, high = 10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high))
        getattr(axis, f"set_{which}lim")(low, high)
    getattr(axis, f"{which}axis").set_minor_formatter(mpl.ticker.NullFormatter())


def signed_norm(values):
    """Colours symmetric about 0."""
    finite = np.abs(np.asarray(values, float))
    finite = finite[np.isfinite(finite)]
    largest = finite.max() if finite.size and finite.max() > 0 else 1.0
    return mpl.colors.Normalize(-largest, largest)


def ink(background):
    """Black or white, whichever is read more easily on a colour: the larger contrast ratio of WCAG 2.1, at least 4.5."""
    rgb = np.asarray(mpl.colors.to_rgb(background))
    luminance = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def percent(axis, which="x"):
    """Ticks in percent."""
    getattr(axis, f"{which}axis").set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{100 * x:g}%"))
