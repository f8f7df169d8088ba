# SPDX-License-Identifier: Apache-2.0
"""python -m faultline.figures FILE… -o DIR: every figure that the files hold, as PDF and PNG."""

import argparse
import errno
import os
import sys

from .. import open as open_file
from . import figures, write


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faultline.figures", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="attribution, probe, run or dissociation files")
    parser.add_argument("-o", "--output", default="figures", metavar="DIR", help="where to write (default: figures)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this figure alone; may be repeated")
    parser.add_argument("--list", action="store_true", help="the figures, and the kind of file each is made from")
    options = parser.parse_args(arguments)
    names = {f.name for f in figures()}
    for name in options.only or ():
        if name not in names:
            print(f"--only: no figure is named {name!r}; expected one of {', '.join(sorted(names))}", file=sys.stderr)
            return 2
    if options.list:
        for f in sorted(figures(), key=lambda f: (f.kind, f.name)):
            print(f"{f.kind:<18}{f.name:<24}{f.title}")
        return 0
    if not options.files:
        print("no FILE given; expected a file that faultline wrote", file=sys.stderr)
        return 2
    trees, labels = [], set()
    for path in options.files:
        try:
            trees.append(open_file(path))
        except FileNotFoundError:
            print(f"{path}: no such file; expected one that faultline wrote", file=sys.stderr)
            return 2
        except (OSError, ValueError) as error:
            print(error if path in str(error) else f"{path}: {error}", file=sys.stderr)
            return 2
        except (AttributeError, KeyError, RuntimeError) as error:  # a dimension without its scale, and the like
            print(f"{path}: cannot be read ({error}); expected a file as faultline writes it", file=sys.stderr)
            return 2
        # Files of one name in several folders are told apart by their place in the command, as faultline probe does.
        stem = label = os.path.splitext(os.path.basename(path))[0]
        place = len(trees)
        while label in labels:
            label, place = f"{stem}#{place}", place + 1
        labels.add(label)
        trees[-1].attrs["label"], trees[-1].attrs["path"] = label, path
    drawn = broken = 0
    try:
        for figure in write(trees, options.output, options.only):
            broken += figure.broken
            if figure.path:
                drawn += 1
                print(figure.path)
            else:
                print(f"{figure.files}: {figure.figure}: {figure.lacking}", file=sys.stderr)
    except OSError as error:
        where = error.filename if error.filename and os.path.abspath(error.filename) != os.path.abspath(options.output) else None
        print(f"{options.output}: cannot be written ({f'{where}: ' if where else ''}{error.strerror or error}); "
              "expected a folder with room and rights", file=sys.stderr)
        return 1 if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO) else 2
    if not drawn:
        print("nothing drawn; --list says which figures are made from which file", file=sys.stderr)
    return 1 if broken or not drawn else 0


if __name__ == "__main__":
    sys.exit(main())
