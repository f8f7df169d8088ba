# SPDX-License-Identifier: Apache-2.0
"""What figures there are, of which kind of file each is made, and how they are written."""

from __future__ import annotations

import os
import re
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


@dataclass(frozen=True)
class Drawn:
    """What became of one figure."""

    figure: str
    files: str  # labels of the trees that it is made from
    path: str | None = None  # of the PDF
    lacking: str | None = None  # a sentence: what the file lacks, or why it cannot be drawn
    broken: bool = False  # not as faultline writes it, or our mistake; False where something is only not recorded


def _stem(kind: str, suffix: str, taken: set[str]) -> str:
    """The file's name of a figure. Names of layers and sources may hold anything; two that come out alike are told apart."""
    stem = kind + (f"-{suffix}" if suffix else "")
    stem = re.sub(r"[^\w.=+#-]+", "-", stem)
    unique, n = stem, 1
    while unique in taken:
        n += 1
        unique = f"{stem}-{n}"
    taken.add(unique)
    return unique


def _save(drawn, where: str, stem: str) -> str:
    """Both files, or neither: under their final names only when both are whole."""
    os.makedirs(where, exist_ok=True)
    parts = {ending: os.path.join(where, f"{stem}.partial.{ending}") for ending in ("png", "pdf")}
    try:
        for ending in ("png", "pdf"):
            drawn.savefig(parts[ending])
            drawn.set_layout_engine("none")  # the layout is found, which is most of the work
        for ending, part in parts.items():
            os.replace(part, os.path.join(where, f"{stem}.{ending}"))
    finally:
        for part in parts.values():
            if os.path.isfile(part):
                os.remove(part)
    return os.path.join(where, f"{stem}.pdf")


def write(trees, folder, only=None) -> Iterator[Drawn]:
    """Draws each figure that belongs to the files' kinds, as PDF and PNG in `folder`: one for each file, in a folder of
    its own where there are several, and one for all where the figure compares. Raises OSError where they cannot be
    written."""
    trees = list(trees)
    for kind in figures():
        mine = [tree for tree in trees if kind_of(tree) == kind.kind]
        if not mine or (only and kind.name not in only):
            continue
        jobs = [(mine, mine, folder)] if kind.several else [
            ([tree], tree, os.path.join(folder, tree.attrs.get("label", "")) if len(trees) > 1 else folder)
            for tree in mine
        ]
        for of, argument, where in jobs:
            files = ", ".join(str(tree.attrs.get("path", tree.attrs.get("label", "file"))) for tree in of)
            taken: set[str] = set()
            try:
                with style():
                    for suffix, drawn in kind.draw(argument):
                        yield Drawn(kind.name, files, _save(drawn, where, _stem(kind.name, suffix, taken)))
            except NotRecorded as lacking:
                yield Drawn(kind.name, files, lacking=str(lacking))
            except OSError:
                raise
            except Exception as error:
                # A file that was cut, changed or written by something else: the other figures are drawn all the same.
                what = f"{type(error).__name__}: {error}"
                lacking = f"cannot be drawn ({what}); expected a file as faultline writes it"
                yield Drawn(kind.name, files, lacking=lacking, broken=True)


def need(tree, path: str, how: str):
    """The node or variable at `path`. Raises NotRecorded, which says how to record it."""
    try:
        return tree[path]
    except KeyError:
        raise NotRecorded(f"the file has no {path}; record it with: {how}") from None
