# SPDX-License-Identifier: Apache-2.0
"""The figures, from recorded files: `python -m faultline.figures FILE -o DIR`, or by name in a notebook."""

from . import attribution, dissociation, probed_runs, probes, runs  # noqa: F401  (registers its figures)
from .registry import draw, figures, write

__all__ = ["draw", "figures", "write"]
