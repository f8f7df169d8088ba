# SPDX-License-Identifier: Apache-2.0
"""Our HDF5 files as xarray objects."""

from __future__ import annotations

import builtins
import math
import os
from dataclasses import dataclass

import h5py
import numpy as np
import xarray as xr


class NotRecorded(LookupError):
    """The file lacks what was asked for; the message names the command that records it."""


def open(path, *, watch: bool = False) -> xr.DataTree:
    """The whole file as a DataTree: a node for each group, dimensions and coordinates by name, root attributes in
    `.attrs`. Low-precision tensors (stored as codes with an attribute `encoding`) are decoded to float32.

    watch: the file is being written (SWMR); what is read is what was complete when it was opened.

    Raises OSError where the file is not HDF5 and ValueError where it is not one of ours.
    """
    path = os.fspath(path)
    with builtins.open(path, "rb") as file:
        if file.read(8) != b"\x89HDF\r\n\x1a\n":
            raise OSError(f"{path}: not an HDF5 file")
    handle = h5py.File(path, "r", swmr=watch, libver="latest" if watch else None)
    if "schema" not in handle.attrs:
        handle.close()
        raise ValueError(f"{path}: no attribute 'schema' at the root: not a file of faultline's")
    groups = {"/": _dataset(handle["/"])}

    def visit(name, item):
        if isinstance(item, h5py.Group):
            groups["/" + name] = _dataset(item)

    handle.visititems(visit)
    tree = xr.DataTree.from_dict(groups)
    handle.close()
    return tree


def _dataset(group: h5py.Group) -> xr.Dataset:
    variables, coordinates = {}, {}
    for name, item in group.items():
        if not isinstance(item, h5py.Dataset) or item.shape is None:
            continue
        if _bytes_to_text(item.attrs.get("NAME", "")).startswith("This is a netCDF dimension but not a netCDF variable"):
            continue  # a dimension without a coordinate
        dims = tuple(_dimension(item, axis) for axis in range(item.ndim))
        variable = (dims, _values(item), {k: v for k, v in item.attrs.items() if k in ("units", "long_name", "encoding")})
        (coordinates if item.ndim == 1 and dims[0] == name else variables)[name] = variable
    attributes = {name: value for name, value in group.attrs.items()}
    return xr.Dataset(variables, coordinates, attributes)


def _bytes_to_text(value) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _dimension(item: h5py.Dataset, axis: int) -> str:
    scales = item.dims[axis]
    if len(scales):
        return scales[0].name.rsplit("/", 1)[-1]
    if item.is_scale and item.ndim == 1:
        return item.name.rsplit("/", 1)[-1]
    return item.dims[axis].label or f"{item.name.rsplit('/', 1)[-1]}_{axis}"


def _values(item: h5py.Dataset) -> np.ndarray:
    if h5py.check_string_dtype(item.dtype):
        return np.asarray(item.asstr()[()])
    values = np.asarray(item[()])
    encoding = _bytes_to_text(item.attrs.get("encoding", ""))
    if encoding == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if encoding in _FP8:
        return _fp8_table(*_FP8[encoding])[values]
    return values


# Exponent bits, fraction bits, and whether the topmost exponent holds infinities and NaN as in IEEE 754 (e5m2) or only
# the all-ones code is NaN (e4m3): OCP 8-bit floating point specification, revision 1.0.
_FP8 = {"float8_e4m3": (4, 3, False), "float8_e4m3fn": (4, 3, False), "float8_e5m2": (5, 2, True)}


def _fp8_table(exponent_bits: int, fraction_bits: int, ieee: bool) -> np.ndarray:
    bias = 2 ** (exponent_bits - 1) - 1
    table = np.empty(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> fraction_bits
        fraction = (code & (2**fraction_bits - 1)) / 2**fraction_bits
        if ieee and exponent == 2**exponent_bits - 1:
            value = math.inf if fraction == 0 else math.nan
        elif not ieee and code & 0x7F == 0x7F:
            value = math.nan
        elif exponent == 0:
            value = fraction * 2.0 ** (1 - bias)
        else:
            value = (1 + fraction) * 2.0 ** (exponent - bias)
        table[code] = sign * value
    return table


@dataclass(frozen=True)
class Wide:
    """A number as mantissa times 2 to the exponent, where a double may hold neither the number nor its square."""

    mantissa: float
    exponent2: int

    @property
    def log10(self) -> float:
        """log10 of the magnitude; -inf for 0."""
        return math.log10(abs(self.mantissa)) + self.exponent2 * math.log10(2) if self.mantissa else -math.inf

    def __float__(self) -> float:
        try:
            return math.ldexp(self.mantissa, self.exponent2)
        except OverflowError:
            return math.copysign(math.inf, self.mantissa)

    def __str__(self) -> str:
        if not self.mantissa or not math.isfinite(self.mantissa):
            return f"{self.mantissa:g}"
        exponent = math.floor(self.log10)
        return f"{math.copysign(10 ** (self.log10 - exponent), self.mantissa):.3g}e{exponent:+d}"


def wide(dataset, name: str):
    """`name` of a group as Wide numbers: one for a scalar, an object array for more.

    Raises NotRecorded where the group holds no such quantity.
    """
    try:
        mantissa, exponent = dataset[f"{name}_mantissa"].values, dataset[f"{name}_exponent2"].values
    except KeyError:
        raise NotRecorded(f"no {name}_mantissa and {name}_exponent2 in this group") from None
    if mantissa.ndim == 0:
        return Wide(float(mantissa), int(exponent))
    out = np.empty(mantissa.shape, object)
    for at in np.ndindex(mantissa.shape):
        out[at] = Wide(float(mantissa[at]), int(exponent[at]))
    return out
