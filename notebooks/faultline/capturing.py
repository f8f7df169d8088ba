# SPDX-License-Identifier: Apache-2.0
"""Records what scaled_dot_product_attention got and returned, forward and backward, in a file that attribute reads.

torch is imported when a capture starts, not before.
"""

from __future__ import annotations

import contextlib
import warnings

_OUTPUTS = ("o", "dq", "dk", "dv")


class capture(contextlib.AbstractContextManager):
    """Records the attention of a model while the block runs.

        with faultline.capture(model, layers=[1], steps=[100], path="run7.safetensors") as recorded:
            train(model)

    model: the module whose forward passes are counted. It is not changed.
    layers: which calls of scaled_dot_product_attention within one forward pass, counted from 0; None: all.
    steps: which forward passes of the model within the block, counted from 0 (with gradient accumulation there are
        several to an optimizer step); by default the first alone, for every pass keeps its tensors in memory.
    path: where to write when the block ends; or call `save`.
    kernel: the name that the outputs are stored under; by default the back end that PyTorch chooses for the call.
    inputs: the modules that make q (or q, k and v) out of the layer's input, one for each call of attention within one
        forward pass in the order of the calls: [block.attn.c_attn for block in model.blocks]. What each receives is stored
        as LAYER.x [batch, sequence, width], of which `faultline probe` makes the terms of W_Q's gradient error. Of a model
        that is compiled already, hooks of its modules may not run; `save` says which layers have no x.

    Tensors: LAYER.q, .k, .v, .do and LAYER.KERNEL.o, .dq, .dk, .dv as the kernel saw and returned them, in its own
    precision (under autocast: after its cast), [batch, heads, sequence, head_dim]. LAYER is layer1, or step100_layer1
    where several passes are recorded.

    Results do not change: the tensors that pass are copied, not replaced. Under torch.compile the call is taken out of
    the compiled graph (a graph break), so what is compiled around it may be fused otherwise than without a capture.
    Calls that run again in the backward pass (activation checkpointing) are not recorded twice; their gradients are
    then missing, which `save` says.

    Raises ValueError for a call with dropout: its outputs are those of a random mask that nobody can see.
    """

    def __init__(self, model, *, layers=None, steps=(0,), path=None, kernel=None, inputs=None):
        import torch

        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"capture: model is a {type(model).__name__}, expected a torch.nn.Module")
        self._torch = torch
        self._model = model
        self._layers = None if layers is None else frozenset(layers)
        self._steps = frozenset(steps)
        self._path = path
        self._kernel = kernel
        self._inputs = list(inputs or ())
        for module in self._inputs:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"capture: inputs holds a {type(module).__name__}, expected torch.nn.Modules")
        self._x = {}  # layer -> its input, in this pass
        self._pass = -1  # of the model, in this block
        self._call = None  # of attention, in this pass; None outside of a pass
        self.records = {}  # (step, layer) -> {"tensors": …, "causal": …, "scale": …, "kernel": …}

    def __enter__(self):
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin_pass),
            self._model.register_forward_hook(self._end_pass, always_call=True),
        ]
        for layer, module in enumerate(self._inputs):
            self._hooks.append(module.register_forward_pre_hook(self._keep_input(layer)))
        self._mode = _watching(self._torch, self._attention)
        self._mode.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        self._mode.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        if kind is None and self._path is not None:
            self.save(self._path)
        return False

    def _begin_pass(self, *_):
        self._pass += 1
        self._call = 0
        self._x = {}

    def _end_pass(self, *_):
        self._call = None

    def _wanted(self, layer):
        return self._pass in self._steps and (self._layers is None or layer in self._layers)

    def _keep_input(self, layer):
        def hook(_, args):
            # None: activation checkpointing runs the module again in the backward pass.
            if self._call is None or not self._wanted(layer) or not args:
                return
            if args[0].dim() != 3:
                raise ValueError(
                    f"capture: the input of layer {layer} has shape {list(args[0].shape)}, expected [batch, sequence, width]"
                )
            self._x[layer] = _copy(args[0])

        return hook

    def _attention(self, function, args, kwargs):
        if self._call is None:
            return function(*args, **kwargs)
        layer, self._call = self._call, self._call + 1
        if not self._wanted(layer):
            return function(*args, **kwargs)
        return self._record(self._pass, layer, function, *args, **kwargs)

    def _record(self, step, layer, function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                scale=None, enable_gqa=False):
        torch = self._torch
        if dropout_p:
            raise ValueError(f"capture: layer {layer} is called with dropout_p = {dropout_p}, expected 0")
        device = query.device.type
        if torch.is_autocast_enabled(device):  # what the call itself does first, so nothing changes
            lower = torch.get_autocast_dtype(device)
            query, key, value = (t.to(lower) if t.is_floating_point() else t for t in (query, key, value))
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        if enable_gqa:
            options["enable_gqa"] = True
        kernel = self._kernel or _back_end(torch, query, key, value, options)
        tensors = {"q": _copy(query), "k": _copy(key), "v": _copy(value)}
        if attn_mask is not None:
            tensors["mask"] = _additive(torch, attn_mask, query.dtype)
        if layer in self._x:
            tensors["x"] = self._x.pop(layer)
        record = {"tensors": tensors, "causal": bool(is_causal), "scale": scale, "kernel": kernel}
        self.records[step, layer] = record

        def keep(name):
            def store(gradient):
                tensors[name] = _copy(gradient)

            return store

        tap = _tap(torch)
        query, key, value = (
            tap.apply(t, keep(f"{kernel}.{name}")) for t, name in ((query, "dq"), (key, "dk"), (value, "dv"))
        )
        out = function(query, key, value, **options)
        tensors[f"{kernel}.o"] = _copy(out)
        return tap.apply(out, keep("do"))

    def save(self, path):
        """Writes what is recorded. Raises ValueError where nothing is, or where the calls are of two kinds that one
        file cannot hold (causal and not, two scales)."""
        from safetensors.torch import save_file

        if not self.records:
            raise ValueError(
                f"capture: nothing recorded in {self._pass + 1} forward passes: the model does not call "
                "scaled_dot_product_attention there, or not in the layers and steps asked for"
            )
        metadata = {}
        for what in ("causal", "scale"):
            kinds = {record[what] for record in self.records.values()}
            if len(kinds) > 1:
                raise ValueError(f"capture: layers with {what} = {sorted(map(str, kinds))}; record them one by one")
            kind = kinds.pop()
            if kind is not None:
                metadata[what] = str(kind).lower() if isinstance(kind, bool) else repr(float(kind))
        several = len({step for step, _ in self.records}) > 1
        tensors = {}
        for (step, layer), record in sorted(self.records.items()):
            name = f"step{step}_layer{layer}" if several else f"layer{layer}"
            if "do" not in record["tensors"]:
                warnings.warn(f"capture: no gradient reached {name}: its forward alone is written", stacklevel=2)
            if self._inputs and "x" not in record["tensors"]:
                warnings.warn(f"capture: no module of inputs ran before {name}: it has no x", stacklevel=2)
            for tensor, values in record["tensors"].items():
                tensors[f"{name}.{tensor}"] = values
        save_file(tensors, path, metadata=metadata)


def _copy(tensor):
    return tensor.detach().to("cpu", copy=True).contiguous()


def _additive(torch, mask, dtype):
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -float("inf"))
    return _copy(mask)


def _back_end(torch, query, key, value, options):
    """The name of the back end that the call will run on."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return "sdpa"
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
    try:
        return names.get(int(choose(query, key, value, **options)), "sdpa")
    except (RuntimeError, TypeError):
        return "sdpa"


_taps = {}


def _tap(torch):
    """The identity, whose gradient is shown to a function on its way."""
    if "tap" not in _taps:

        class Tap(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tensor, show):
                ctx.show = show
                return tensor.view_as(tensor)

            @staticmethod
            def backward(ctx, gradient):
                ctx.show(gradient)
                return gradient, None

        _taps["tap"] = Tap
    return _taps["tap"]


def _watching(torch, attention):
    """A mode in which every call of scaled_dot_product_attention, however it was imported, goes through `attention`."""
    watched = torch.nn.functional.scaled_dot_product_attention
    outside_of_graphs = torch.compiler.disable(attention)

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is watched:
                return outside_of_graphs(function, args, kwargs or {})
            return function(*args, **(kwargs or {}))

    return Watching()
