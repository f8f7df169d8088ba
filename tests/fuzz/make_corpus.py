#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds in corpus/: small whole files of every kind a reader accepts, and some that it must refuse.

Run again after a change here: `python3 tests/fuzz/make_corpus.py`. Only the standard library is needed. The seeds of the
plan reader are the project's presets and small pieces that use every construct of the format.
"""
import json
import pathlib
import struct

here = pathlib.Path(__file__).resolve().parent
corpus = here / "corpus"


def put(target, name, data):
    folder = corpus / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


widths = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E5M2": 1, "F8_E4M3": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
          "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1}

for name, width in widths.items():
    put("safetensors", f"one_{name.lower()}", safetensors({"x": entry(name, [2], 0, 2 * width)}, bytes(range(2 * width))))
put("safetensors", "empty", safetensors({}))
put("safetensors", "metadata", safetensors({"__metadata__": {"loss": "1.28", "note": "\u00e4\n\u001b"}}))
put("safetensors", "padded", safetensors(b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}   ', b"\x07"))
put("safetensors", "capture", safetensors(
    {"__metadata__": {"step": "3000"}, "layer0.q": entry("BF16", [1, 1, 2, 2], 0, 8),
     "layer0.k": entry("BF16", [1, 1, 2, 2], 8, 16), "layer0.flash.lse": entry("F32", [1, 1, 2], 16, 24),
     "none": entry("F32", [0, 3], 24, 24)}, bytes(range(24))))
put("safetensors", "bad_hole", safetensors({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"abc"))
put("safetensors", "bad_overlap", safetensors({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc"))
put("safetensors", "bad_overflow", safetensors({"a": entry("F64", [2**62, 4], 0, 0)}))
put("safetensors", "bad_numbers", safetensors(b'{"a":{"dtype":"F64","shape":[1e9,-1,1.5],"data_offsets":[0,1e400]}}'))
put("safetensors", "bad_twice", safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\\u0061":{}}'))
put("safetensors", "bad_deep", safetensors(b'{"a":' + b"[" * 50 + b"]" * 50 + b"}"))
put("safetensors", "bad_name", safetensors(b'{"\\u001b[2J\\u009b\xe2\x80\xae":3}'))
put("safetensors", "bad_length", struct.pack("<Q", 2**64 - 1) + b"{}")


def npy(header, data=b"", version=1):
    text = header.encode("latin1")
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def header(descr, shape, fortran=False):
    return "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }\n" % (descr, fortran, shape)


for code, width in {"f8": 8, "f4": 4, "f2": 2, "f1": 1, "V2": 2, "V1": 1, "i8": 8, "i4": 4, "i2": 2, "i1": 1, "u8": 8,
                    "u4": 4, "u2": 2, "u1": 1, "b1": 1}.items():
    put("npy", f"little_{code}", npy(header("<" + code, "(3,)"), bytes(range(3 * width))))
    put("npy", f"big_{code}", npy(header(">" + code, "(1, 2)"), bytes(range(2 * width))))
put("npy", "fortran", npy(header("<i2", "(2, 3, 2)", True), bytes(24)))
put("npy", "scalar_v2", npy(header("<f4", "()"), bytes(4), 2))
put("npy", "empty_v3", npy(header("<f4", "(0, 3)"), b"", 3))
put("npy", "python2", npy("{'shape':(6L,),'descr':\"<u1\",'fortran_order':False}", bytes(6)))
put("npy", "bfloat16", npy(header("bfloat16", "(1,)"), bytes(2)))
put("npy", "bad_object", npy(header("|O", "(1,)"), b"\x80\x04N."))
put("npy", "bad_structured", npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", bytes(4)))
put("npy", "bad_overflow", npy(header("<f8", "(4294967296, 4294967296)")))
put("npy", "bad_huge", npy(header("|u1", "(9223372036854775807,)"), b"x"))
put("npy", "bad_fortran_empty", npy(header("|u1", "(4294967296, 2147483648, 0, 2)", True)))
put("npy", "bad_dimensions", npy(header("|u1", "(" + "1, " * 65 + ")")))
put("npy", "bad_version", npy(header("<f4", "()"), bytes(4), 9))

for preset in sorted((here.parent.parent / "kernels/plan/presets").glob("*.toml")):
    put("plan", preset.name, preset.read_bytes())
put("plan", "small", b"""name = "mine"
base = "fa2"
[schedule]
block_q = 128
key_order = "descending"
[[tiles]]
head_dim = 64
block_k = 128
[sites.p_cast]
format = { precision = 5, emin = -14, emax = 15 }
rounding = "nearest_even"
[sites.s_accumulate]
accumulation = { terms = 16, fraction_bits = 20, output = "f32_rz" }
""")
put("plan", "bad_types", b'name = 3\nbase = ["fa2"]\n[schedule]\nblock_q = "128"\n[sites]\np_cast = 1\n')
put("plan", "bad_names", b'name = "\\u001b[2J"\nbase = "\\u202efa2"\n[sites."\\n"]\nformat = "\\u0007"\n')
put("plan", "bad_numbers", b"[schedule]\nblock_q = -9223372036854775808\nblock_k = 1e400\n[sites.p_cast]\nformat = { precision = 0, emin = 9, emax = -9 }\n")
put("plan", "bad_syntax", b"[schedule\nblock_q = = 1\n")
# What the fuzzer found in toml++ 3.3 (kernels/plan/tomlplusplus.hpp).
put("plan", "bad_header", b"[!schedule\nblock_q = = 0\n")
put("plan", "bad_brackets", b"[[[1]]]\n")
put("plan", "bad_letter", "[s\u0321hedule]\n".encode())
put("plan", "bad_form", "\ufee2".encode())
