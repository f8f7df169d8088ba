# SPDX-License-Identifier: Apache-2.0
"""faultline.capture on a small GPT of real PyTorch: what is recorded is what the kernel got and returned, and training
goes on bit for bit as without it."""

import json
import os
import subprocess
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("safetensors", reason="needs safetensors")

import torch.nn.functional as F  # noqa: E402
from safetensors import safe_open  # noqa: E402

import faultline  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


class Block(torch.nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, width // heads
        self.q = torch.nn.Linear(width, heads * self.d)
        self.kv = torch.nn.Linear(width, 2 * kv_heads * self.d)
        self.out = torch.nn.Linear(width, width)
        self.ffn = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.d).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.kv_heads, self.d).permute(2, 0, 3, 1, 4)
        options = {"enable_gqa": True} if self.kv_heads != self.heads else {}
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, width))
        return x + self.ffn(x)


class Gpt(torch.nn.Module):
    def __init__(self, width=128, heads=2, kv_heads=2, layers=2):
        super().__init__()
        self.embed = torch.nn.Embedding(256, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


def train(device, count=3, compiled=False, autocast=None, kv_heads=2, **capture):
    """Losses and final weights of a few steps, with a capture where options for it are given."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = Gpt(kv_heads=kv_heads).to(device)
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1)).to(device)
    losses = []

    def run():
        for _ in range(count):
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                logits = called(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if capture:
        with faultline.capture(called, **capture):
            run()
    else:
        run()
    return losses, {n: p.detach().cpu().clone() for n, p in model.named_parameters()}


def tensors(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [2, 1], ids=["mha", "gqa"])
def test_eager_training_is_unchanged_to_the_bit(device, autocast, kv_heads, tmp_path):
    bare = train(device, autocast=autocast, kv_heads=kv_heads)
    seen = train(device, autocast=autocast, kv_heads=kv_heads, path=tmp_path / "c.safetensors")
    assert bare[0] == seen[0]
    for name, weights in bare[1].items():
        assert torch.equal(weights, seen[1][name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [2, 1], ids=["mha", "gqa"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_recorded_is_what_the_kernel_got_and_gave(device, autocast, kv_heads, compiled, tmp_path):
    path = tmp_path / "c.safetensors"
    train(device, compiled=compiled, autocast=autocast, kv_heads=kv_heads, path=path)
    found, metadata = tensors(path)
    assert metadata == {"causal": "true"}
    kernels = {name.split(".")[1] for name in found if name.endswith(".dq")}
    assert len(kernels) == 1, found.keys()
    kernel = kernels.pop()
    for layer in ("layer0", "layer1"):
        q, k, v, do = (found[f"{layer}.{n}"] for n in ("q", "k", "v", "do"))
        assert q.dtype == (autocast or torch.float32)
        assert q.shape == (2, 2, 64, 64) and k.shape == (2, kv_heads, 64, 64)
        # The same call again, on what was recorded, returns what was recorded: bit for bit, save what the kernel itself
        # does in another order (atomic adds into dq on a card).
        q, k, v = (t.to(device).requires_grad_() for t in (q, k, v))
        options = {"enable_gqa": True} if kv_heads != 2 else {}
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        again = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do.to(device))), o=o.detach())
        for name, value in again.items():
            there = found[f"{layer}.{kernel}.{name}"]
            assert there.shape == value.shape, name
            if device == "cpu":
                assert torch.equal(there, value.cpu()), (layer, name)
            else:
                unit = torch.finfo(value.dtype).eps
                assert (there - value.cpu()).abs().max() <= 2 * unit * value.abs().max(), (layer, name)


def test_layers_and_steps_are_chosen(tmp_path):
    path = tmp_path / "c.safetensors"
    train("cpu", path=path, layers=[1], steps=[0, 2], kernel="mine")
    found, _ = tensors(path)
    assert {name.split(".")[0] for name in found} == {"step0_layer1", "step2_layer1"}
    assert not torch.equal(found["step0_layer1.q"], found["step2_layer1.q"])
    assert "step2_layer1.mine.dq" in found


def test_the_layers_input_is_what_makes_its_queries(tmp_path):
    path = tmp_path / "c.safetensors"
    torch.manual_seed(0)
    model = Gpt()
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1))
    with faultline.capture(model, inputs=[block.q for block in model.blocks], path=path):
        model(tokens).sum().backward()
    found, _ = tensors(path)
    for layer, block in enumerate(model.blocks):
        q = block.q(found[f"layer{layer}.x"]).view(2, 64, 2, 64).transpose(1, 2)
        assert torch.equal(q.detach(), found[f"layer{layer}.q"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with faultline.capture(model, inputs=[torch.nn.Linear(1, 1)], path=tmp_path / "n.safetensors"):
            model(tokens).sum().backward()
    assert sum("it has no x" in str(w.message) for w in said) == 2
    with pytest.raises(TypeError, match="inputs holds a int, expected torch.nn.Modules"):
        faultline.capture(model, inputs=[1])


def test_a_mask_is_stored_as_what_is_added(tmp_path):
    path = tmp_path / "c.safetensors"
    keep = torch.ones(8, 8, dtype=torch.bool).tril()

    class One(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=keep, scale=0.5)

    x = torch.randn(1, 1, 8, 16, requires_grad=True)
    module = One()
    with faultline.capture(module, path=path):
        module(x).sum().backward()
    found, metadata = tensors(path)
    assert metadata == {"causal": "false", "scale": "0.5"}
    assert torch.equal(found["layer0.mask"], torch.zeros(8, 8).masked_fill(~keep, -float("inf")))


def test_nothing_recorded_dropout_and_missing_gradients_are_said(tmp_path):
    model = Gpt()
    with pytest.raises(ValueError, match="nothing recorded in 0 forward passes"):
        with faultline.capture(model, path=tmp_path / "c.safetensors"):
            pass

    class Dropping(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    module = Dropping()
    with pytest.raises(ValueError, match="dropout_p = 0.1"):
        with faultline.capture(module):
            module(torch.randn(1, 1, 8, 16))
    with pytest.raises(TypeError, match="torch.nn.Module"):
        faultline.capture(lambda x: x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with faultline.capture(model, path=tmp_path / "f.safetensors"), torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
    assert any("no gradient reached layer0" in str(w.message) for w in said)


def test_attribute_reads_it(program, tmp_path):
    path = tmp_path / "c.safetensors"
    train("cpu", autocast=torch.bfloat16, path=path, layers=[1])
    run = subprocess.run(
        [program, "attribute", str(path), "--json", "--quiet", "--sites", "o_cast", "--correction", "none"],
        capture_output=True, text=True, check=True,
    )
    dq = json.loads(run.stdout)["layers"][0]["outputs"]["dq"]
    assert len(dq["observed"]) == 1
    assert all(0 < seen["rel_error"] < 0.05 for seen in dq["observed"].values())
