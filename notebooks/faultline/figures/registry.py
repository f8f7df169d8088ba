# SPDX-License-Identifier: Apache-2.0
"""What figures there are, of which kind of file each is made, and how they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..files import NotRecorded
from .style import style


@dataclass(frozen=True)
class FigureKind:
    name: str
    kind: str  # kind_of() the files it is made from
    title: str
    draw: Callable  # (tree) -> iterator of (suffix, matplotlib Figure); raises NotRecorded
    several: bool = False  # draw takes a list of trees, drawn over one another


_figures: dict[str, FigureKind] = {}


def figure(name: str, kind: str, title: str, several: bool = False):
    """Registers a drawing function: (tree) -> (suffix, Figure) pairs; several: ([tree, …]) -> pairs."""

    def register(draw):
        _figures[name] = FigureKind(name, kind, title, draw, several)
        return draw

    return register


def kind_of(tree) -> str:
    """Attribute `kind`; of what faultline probe wrote, with the kind of what it probed: "probe capture"."""
    kind, probed = tree.attrs.get("kind", ""), tree.attrs.get("probed")
    return f"{kind} {probed}" if kind == "probe" and probed else str(kind)


def figures(kind: str | None = None) -> list[FigureKind]:
    return [f for f in _figures.values() if kind is None or f.kind == kind]


def draw(name: str, *trees):
    """The matplotlib Figures of one kind of figure, from one opened file, or from several where it compares. Raises
    KeyError for a name that there is not, and NotRecorded where a file lacks what it needs."""
    kind = _figures[name]
    with style():
        return [drawn for _, drawn in kind.draw(list(trees) if kind.several else trees[0])]


def write(trees, folder, only=None) -> Iterator[tuple[str, str | None, str | None]]:
    """Draws each figure that belongs to the files' kinds, as PDF and PNG in `folder`: one for each file, in a folder of
    its own where there are several, and one for all where the figure compares. Yields (figure, path of the PDF, None), or
    (figure, None, what the file lacks)."""
    trees = list(trees)
    for kind in figures():
        mine = [tree for tree in trees if kind_of(tree) == kind.kind]
        if not mine or (only and kind.name not in only):
            continue
        jobs = [(mine, folder)] if kind.several else [
            (tree, os.path.join(folder, tree.attrs.get("label", "")) if len(trees) > 1 else folder) for tree in mine
        ]
        for argument, where in jobs:
            os.makedirs(where, exist_ok=True)
            try:
                with style():
                    for suffix, drawn in kind.draw(argument):
                        stem = os.path.join(where, kind.name + (f"-{suffix}" if suffix else ""))
                        drawn.savefig(f"{stem}.png")
                        drawn.set_layout_engine("none")  # the layout is found, which is most of the work
                        drawn.savefig(f"{stem}.pdf")
                        yield kind.name, f"{stem}.pdf", None
            except NotRecorded as lacking:
                yield kind.name, None, str(lacking)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                # A file that was cut, changed or written by something else: the other figures are drawn all the same.
                yield kind.name, None, f"cannot be drawn ({error}); expected a file as faultline writes it"


def need(tree, path: str, how: str):
    """The node or variable at `path`. Raises NotRecorded, which says how to record it."""
    try:
        return tree[path]
    except KeyError:
        raise NotRecorded(f"the file has no {path}; record it with: {how}") from None
