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
    kind: str  # attribute `kind` of the files it is made from
    title: str
    draw: Callable  # (tree) -> iterator of (suffix, matplotlib Figure); raises NotRecorded


_figures: dict[str, FigureKind] = {}


def figure(name: str, kind: str, title: str):
    """Registers a drawing function: (tree) -> (suffix, Figure) pairs."""

    def register(draw):
        _figures[name] = FigureKind(name, kind, title, draw)
        return draw

    return register


def figures(kind: str | None = None) -> list[FigureKind]:
    return [f for f in _figures.values() if kind is None or f.kind == kind]


def write(tree, folder, only=None) -> Iterator[tuple[str, str | None, str | None]]:
    """Draws each figure that belongs to the file's kind, as PDF and PNG in `folder`. Yields (figure, path of the PDF,
    None), or (figure, None, what the file lacks)."""
    os.makedirs(folder, exist_ok=True)
    for kind in figures(tree.attrs.get("kind")):
        if only and kind.name not in only:
            continue
        try:
            with style():
                for suffix, drawn in kind.draw(tree):
                    stem = os.path.join(folder, kind.name + (f"-{suffix}" if suffix else ""))
                    for extension in ("pdf", "png"):
                        drawn.savefig(f"{stem}.{extension}")
                    yield kind.name, f"{stem}.pdf", None
        except NotRecorded as lacking:
            yield kind.name, None, str(lacking)


def need(tree, path: str, how: str):
    """The node or variable at `path`. Raises NotRecorded, which says how to record it."""
    try:
        return tree[path]
    except KeyError:
        raise NotRecorded(f"the file has no {path}; record it with: {how}") from None
