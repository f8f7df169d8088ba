#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts whole heads of one layer out of a capture (safetensors), bit for bit.

Only whole heads can be cut: with a causal mask the first n rows of o, lse and dq depend on those rows alone, but dk and
dv sum over all later queries, so a capture with fewer rows would not be what any kernel returned.

    cut_capture.py CAPTURE OUTPUT --layer layer1 --heads 1 --kernels flash,math

The result is a function of the arguments and the input's bytes alone: tensors in the order of their names, metadata in
the order of its keys, header padded with spaces to a multiple of 8. Needs nothing but Python's own library.
"""

import argparse
import json
import pathlib
import struct
import sys

INPUTS = ("q", "k", "v", "do")
# Of the whole run, not of the heads that are cut: carried over as they stand.
CARRIED = ("causal", "device", "grad_norm", "head_dim", "injected_delta_bias", "loss", "lr", "run", "scale", "seq", "step", "torch")


def read_header(path):
    """(header without metadata, metadata, the bytes after the header)."""
    data = path.read_bytes()
    if len(data) < 8:
        sys.exit(f"{path}: {len(data)} bytes, expected a safetensors file of at least 8")
    (length,) = struct.unpack("<Q", data[:8])
    if length > len(data) - 8:
        sys.exit(f"{path}: header length {length} is larger than the file")
    header = json.loads(data[8 : 8 + length])
    return header, header.pop("__metadata__", {}), data[8 + length :]


def cut_heads(tensor, payload, heads):
    """The bytes of the given heads of a [1, head, ...] tensor, in that order."""
    begin, end = tensor["data_offsets"]
    if end < begin or end > len(payload):
        sys.exit(f"data_offsets [{begin}, {end}] lie outside the file's {len(payload)} bytes of data")
    batch, count = tensor["shape"][:2]
    if batch != 1 or (end - begin) % count:
        sys.exit(f"shape {tensor['shape']}: expected [1, heads, ...]")
    size = (end - begin) // count
    for head in heads:
        if not 0 <= head < count:
            sys.exit(f"head {head} does not exist: the capture has {count}")
    return b"".join(payload[begin + head * size : begin + (head + 1) * size] for head in heads)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("capture", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--layer", required=True)
    parser.add_argument("--heads", required=True, type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--kernels", required=True, type=lambda text: text.split(","))
    args = parser.parse_args()

    header, metadata, payload = read_header(args.capture)
    wanted = [f"{args.layer}.{name}" for name in INPUTS]
    for kernel in args.kernels:
        wanted += [name for name in header if name.startswith(f"{args.layer}.{kernel}.")]
    missing = [name for name in wanted if name not in header]
    if missing or len(wanted) == len(INPUTS):
        sys.exit(f"{args.capture}: no tensor {', '.join(missing) or 'of the kernels named'}")

    out_header, chunks, offset = {}, [], 0
    out_metadata = {key: metadata[key] for key in CARRIED if key in metadata}
    out_metadata |= {key: value for key, value in metadata.items() if key.startswith(f"{args.layer}.")}
    out_metadata |= {
        "heads": str(len(args.heads)),
        "layers": "1",
        "cut_from": args.capture.name,
        "cut_heads": json.dumps(args.heads),
    }
    out_header["__metadata__"] = dict(sorted(out_metadata.items()))
    for name in sorted(wanted):
        tensor = header[name]
        chunk = cut_heads(tensor, payload, args.heads)
        shape = [1, len(args.heads), *tensor["shape"][2:]]
        out_header[name] = {"dtype": tensor["dtype"], "shape": shape, "data_offsets": [offset, offset + len(chunk)]}
        chunks.append(chunk)
        offset += len(chunk)

    text = json.dumps(out_header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    args.output.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


if __name__ == "__main__":
    main()
