# SPDX-License-Identifier: Apache-2.0
"""Runs attention kernels of PyTorch, and yours, on the tensors of a capture, and writes what they return beside them.

    faultline generate saturated,large-key-mean -o inputs.safetensors
    python -m faultline.observe inputs.safetensors -o observed.safetensors
    faultline identify observed.safetensors

LAYER.q, .k, .v, .do of the input are kept; of every kernel LAYER.KERNEL.o, .dq, .dk, .dv are added. Scale and causal mask are
those of the file as attribute reads it: where it has no word of them 1/sqrt(head_dim), and causal unless there is a mask; the
corner of the causal mask is the lower right one. Kernels: the back ends of scaled_dot_product_attention, and with --kernel
NAME=MODULE:FUNCTION any differentiable FUNCTION(q, k, v, *, causal, scale) -> o of [batch, heads, sequence, head_dim].
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys

BACK_ENDS = ("flash", "cudnn", "efficient", "math")
_INPUTS = ("q", "k", "v", "do", "mask")
# What else may belong to a layer's problem (docs/captures.md). These kernels are not given it: another function is refused.
_OTHER = re.compile(
    r"\.(softcap|sink|dropout|keep|cu_seqlens(_[qk])?|seqused_[qk]|block_table|(q|k|v|do)_(scale|descale|global_scale))$"
)


class Refused(Exception):
    """The request was wrong, in a sentence."""


def observe(source, destination, *, kernels=BACK_ENDS, functions=None, layers=None, device="cuda", say=print):
    """Writes `destination`: the layers of the capture `source` with the outputs of each kernel.

    kernels: names out of BACK_ENDS. functions: {name: function(q, k, v, *, causal, scale) -> o}. layers: names, None: all.
    Returns {(layer, kernel): None, or why the kernel did not run there}. Raises Refused for a file that is no capture of
    plain attention, an unknown kernel or layer, or a device that is not there.
    """
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    unknown = [kernel for kernel in kernels if kernel not in BACK_ENDS]
    if unknown:
        raise Refused(f"kernel '{unknown[0]}' is unknown, expected some of {', '.join(BACK_ENDS)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise Refused(f"device {device}: PyTorch finds no CUDA device")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise Refused(f"{source}: no safetensors file ({error})") from None
    causal = {"true": True, "false": False, "": None}.get(metadata.get("causal", "").lower(), metadata.get("causal"))
    if isinstance(causal, str):
        raise Refused(f"{source}: causal = {causal!r}, expected true or false")
    try:
        scale = float(metadata["scale"]) if "scale" in metadata else None
    except ValueError:
        raise Refused(f"{source}: scale = {metadata['scale']!r}, expected a number") from None

    wanted = _layers(source, tensors, layers)
    for name in metadata:
        if name in ("softcap", "keep"):
            raise Refused(f"{source}: the metadata has {name}; these kernels are not given it")
    outcome, written = {}, {}
    for layer in wanted:
        inputs = _inputs(source, layer, tensors, device)
        written.update({f"{layer}.{name}": tensors[f"{layer}.{name}"] for name in inputs})
        runs = {kernel: _back_end(torch, kernel) for kernel in kernels}
        runs.update({name: (lambda f: lambda **call: _own(f, call))(f) for name, f in (functions or {}).items()})
        for kernel, run in runs.items():
            # As attribute reads a capture that does not say: causal, unless there is a mask.
            is_causal = "mask" not in inputs if causal is None else causal
            found, why = _outputs(torch, run, inputs, is_causal, scale)
            outcome[layer, kernel] = why
            say(f"{layer}.{kernel}: {'done' if why is None else 'not run: ' + why}")
            written.update({f"{layer}.{kernel}.{name}": value for name, value in found.items()})
    metadata["torch"] = torch.__version__
    metadata["device"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    partial = f"{destination}.partial"
    try:
        # Copies: a kernel may return one tensor twice, or its input.
        save_file({name: value.contiguous().clone() for name, value in written.items()}, partial, metadata=metadata)
        os.replace(partial, destination)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise Refused(f"{destination}: cannot be written ({error})") from None
    return outcome


def _layers(source, tensors, layers):
    found = sorted({name[: -len(".q")] for name in tensors if name.endswith(".q")})
    if not found:
        raise Refused(f"{source}: no tensor LAYER.q")
    for layer in layers or ():
        if layer not in found:
            raise Refused(f"{source}: no layer '{layer}', expected some of {', '.join(found)}")
    wanted = list(layers or found)
    for name in tensors:
        other = _OTHER.search(name)
        if other and name[: other.start()] in wanted:
            raise Refused(f"{source}: {name} makes this another function; these kernels are not given it")
    return wanted


def _inputs(source, layer, tensors, device):
    inputs = {name: tensors[f"{layer}.{name}"] for name in _INPUTS if f"{layer}.{name}" in tensors}
    for name in ("k", "v"):
        if name not in inputs:
            raise Refused(f"{source}: no tensor {layer}.{name}")
    for name, tensor in inputs.items():
        if tensor.dim() != 4:
            raise Refused(
                f"{source}: {layer}.{name} has shape {list(tensor.shape)}, expected [batch, heads, sequence, head_dim]"
            )
        if name != "mask" and not tensor.is_floating_point():
            raise Refused(f"{source}: {layer}.{name} is {tensor.dtype}, expected a floating-point type")
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _outputs(torch, run, inputs, causal, scale):
    """{name: tensor on the host}, and None or why there are none."""
    # Leaves of their own: no kernel sees what another one left in .grad.
    q, k, v = (inputs[name].detach().clone().requires_grad_() for name in ("q", "k", "v"))
    try:
        o = run(q=q, k=k, v=v, mask=inputs.get("mask"), causal=causal, scale=scale)
        found = {"o": o.detach().cpu()}
        if "do" in inputs:
            gradients = torch.autograd.grad(o, (q, k, v), inputs["do"].to(o.dtype))
            found.update({name: value.cpu() for name, value in zip(("dq", "dk", "dv"), gradients)})
        return found, None
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {}, str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _back_end(torch, kernel):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    back_end = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }[kernel]

    def run(*, q, k, v, mask, causal, scale):
        options = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        queries, keys = q.shape[2], k.shape[2]
        if mask is not None:
            if mask.dtype != torch.bool:
                mask = mask.to(q.dtype)
            if causal:
                hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
                mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -float("inf"))
        elif causal and queries != keys:  # is_causal alone has its corner at the upper left
            mask = causal_lower_right(queries, keys)
        with sdpa_kernel(back_end):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, **options
            )

    return run


def _own(function, call):
    if call["mask"] is not None:
        raise ValueError("the layer has a mask, which the function is not given")
    return function(call["q"], call["k"], call["v"], causal=call["causal"], scale=call["scale"])


def _function(text):
    name, _, where = text.partition("=")
    module, _, attribute = where.partition(":")
    if not (name and module and attribute):
        raise Refused(f"--kernel {text}: expected NAME=MODULE:FUNCTION")
    if "." in name:
        raise Refused(f"--kernel {text}: NAME has a dot, which the names of tensors are divided by")
    sys.path.insert(0, os.getcwd())
    try:
        return name, getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Refused(f"--kernel {text}: {error}") from None


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m faultline.observe", description=__doc__.split("\n\n")[0])
    parser.add_argument("capture", help="safetensors file with LAYER.q, .k, .v and, for the gradients, .do")
    parser.add_argument("-o", "--output", required=True, help="where to write")
    parser.add_argument("--kernels", default=",".join(BACK_ENDS), help="back ends (%(default)s), or an empty text for none")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME=MODULE:FUNCTION", help="a kernel of your own")
    parser.add_argument("--layers", help="names with commas; all by default")
    parser.add_argument("--device", default="cuda", help="of PyTorch (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace the file that is there")
    given = parser.parse_args(arguments)
    try:
        if os.path.exists(given.output) and not given.force:
            raise Refused(f"{given.output}: exists; --force replaces it")
        outcome = observe(
            given.capture,
            given.output,
            kernels=[k for k in given.kernels.split(",") if k],
            functions=dict(_function(text) for text in given.kernel),
            layers=given.layers.split(",") if given.layers else None,
            device=given.device,
            say=lambda line: print(line, file=sys.stderr),
        )
    except ImportError as error:
        print(f"observe: needs torch and safetensors ({error})", file=sys.stderr)
        return 1
    except Refused as error:
        print(f"observe: {error}", file=sys.stderr)
        return 2
    # A kernel that ran nowhere is a request that was not met; one that cannot do some layer is said above.
    kernels = {kernel for _, kernel in outcome}
    return 1 if any(all(outcome[key] is not None for key in outcome if key[1] == kernel) for kernel in kernels) else 0


if __name__ == "__main__":
    sys.exit(main())
