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


SCHEMA_VERSION = 1  # the newest layout that is read here (lib/record/manifest.hpp)


class NotRecorded(LookupError):
    """The file lacks what was asked for; the message names the command that records it."""


def open(path, *, watch: bool = False) -> xr.DataTree:
    """The whole file as a DataTree: a node for each group, dimensions and coordinates by name, root attributes in
    `.attrs`. Low-precision tensors (stored as codes with an attribute `encoding`) are decoded to float32.

    watch: the file is being written (SWMR); what is read is what was complete when it was opened. A file whose writer
    runs, or was killed, is read so whether asked or not. Of a run, every series is as long as its list of completed steps.

    Raises OSError where the file is not HDF5, and ValueError where it is not one of ours, is of a newer layout than is
    known here, or has a series that does not fit its steps.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; expected a file that faultline wrote")
    with builtins.open(path, "rb") as file:
        if file.read(8) != b"\x89HDF\r\n\x1a\n":
            raise OSError(f"{path}: not an HDF5 file")
    try:
        handle = h5py.File(path, "r", swmr=watch, libver="latest" if watch else None)
    except OSError as error:
        if watch or "open for write" not in str(error):
            raise
        handle = h5py.File(path, "r", swmr=True, libver="latest")
    with handle:
        kind = _expect_schema(path, handle.attrs)
        groups = {"/": _dataset(handle["/"])}

        def visit(name, item):
            if isinstance(item, h5py.Group):
                groups["/" + name] = _steps(path, item) if kind == "run" and name == "steps" else _dataset(item)

        handle.visititems(visit)
        return xr.DataTree.from_dict(groups)


def _expect_schema(path, attributes) -> str:
    """The file's kind, where schema and version are ones that are known here."""
    if "schema" not in attributes:
        raise ValueError(f"{path}: no attribute 'schema' at the root: not a file of faultline's")
    schema, kind = (_bytes_to_text(attributes.get(name, "")) for name in ("schema", "kind"))
    if not kind or schema != f"faultline.{kind}":
        raise ValueError(f"{path}: attribute schema: {schema!r}: expected 'faultline.KIND', and its kind in the attribute kind")
    version = attributes.get("schema_version")
    if not isinstance(version, (int, np.integer)) or not 1 <= version <= SCHEMA_VERSION:
        newer = " (a newer faultline wrote it)" if isinstance(version, (int, np.integer)) and version > SCHEMA_VERSION else ""
        found = "is missing" if version is None else _bytes_to_text(version)
        raise ValueError(f"{path}: attribute schema_version: {found}: expected {SCHEMA_VERSION}{newer}")
    return kind


def _steps(path, group: h5py.Group) -> xr.Dataset:
    """The steps of a run: what lies behind the last completed step (a writer that was killed, or is at work, has written
    some of the next one's numbers) is cut off."""
    if "step" not in group or group["step"].ndim != 1:
        raise ValueError(f"{path}: steps/step: is missing, or no list of numbers: expected the steps of a run")
    count = group["step"].shape[0]
    for name, item in group.items():
        if not isinstance(item, h5py.Dataset) or item.shape is None or item.is_scale:
            continue
        first = _dimension(item, 0) if item.ndim else "none"
        if first != "step" or item.shape[0] < count:
            raise ValueError(f"{path}: steps/{name}: {item.shape[0] if item.ndim else 1} numbers over {first}: "
                             f"expected {count}, one for each step")
    return _dataset(group, {"step": count})


def _dataset(group: h5py.Group, lengths: dict[str, int] | None = None) -> xr.Dataset:
    """The arrays of a group, cut to `lengths` along dimensions that it names."""
    variables, coordinates = {}, {}
    for name, item in group.items():
        if not isinstance(item, h5py.Dataset) or item.shape is None:
            continue
        if _bytes_to_text(item.attrs.get("NAME", "")).startswith("This is a netCDF dimension but not a netCDF variable"):
            continue  # a dimension without a coordinate
        dims = tuple(_dimension(item, axis) for axis in range(item.ndim))
        values = _values(item)
        if lengths and values.ndim:
            values = values[tuple(slice(lengths.get(dim)) for dim in dims)]
        variable = (dims, values, {k: v for k, v in item.attrs.items() if k in ("units", "long_name", "encoding")})
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
