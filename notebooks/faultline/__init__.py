# SPDX-License-Identifier: Apache-2.0
"""Reads Faultline's files and captures attention from PyTorch.

    tree = faultline.open("run.h5")                  # groups as xarray objects with named dimensions
    faultline.wide(tree["layer1/outputs/dq"], "truth_norm")    # numbers that a double cannot hold
    with faultline.capture(model, layers=[1], steps=[100], path="run7.safetensors"):
        train()
"""

import importlib

# Imported when used: a machine that trains needs torch and no HDF5, one that draws needs HDF5 and no torch.
_where = {"capture": "capturing", "NotRecorded": "files", "Wide": "files", "open": "files", "wide": "files"}
__all__ = sorted(_where)


def __getattr__(name):
    if name not in _where:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_where[name]}"), name)
