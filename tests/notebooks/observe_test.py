# SPDX-License-Identifier: Apache-2.0
"""faultline.observe: what a kernel of PyTorch returns for the tensors of a capture stands beside them."""

import contextlib
import importlib.util
import io
import os
import types

import pytest

from faultline import observe

HAVE_TORCH = importlib.util.find_spec("torch") is not None


def run(*arguments, cwd=None):
    """As the command line does; within this process, since importing torch takes seconds."""
    errors = io.StringIO()
    here = os.getcwd()
    with contextlib.redirect_stderr(errors):
        try:
            os.chdir(cwd or here)
            status = observe.main([str(argument) for argument in arguments])
        finally:
            os.chdir(here)
    return types.SimpleNamespace(returncode=status, stderr=errors.getvalue())


@pytest.mark.skipif(HAVE_TORCH, reason="torch is installed")
def test_without_torch_a_sentence(tmp_path):
    done = run(tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    assert done.returncode == 1
    assert "needs torch" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


if HAVE_TORCH:
    import torch
    from safetensors.torch import load_file, save_file

needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="needs torch")


def write(path, *, heads=4, kv_heads=2, queries=24, d=16, metadata=None, **more):
    torch.manual_seed(3)
    tensors = {
        "a.q": torch.randn(2, heads, queries, d, dtype=torch.bfloat16),
        "a.k": torch.randn(2, kv_heads, queries, d, dtype=torch.bfloat16),
        "a.v": torch.randn(2, kv_heads, queries, d, dtype=torch.bfloat16),
        "a.do": torch.randn(2, heads, queries, d, dtype=torch.bfloat16),
        **more,
    }
    save_file(tensors, path, metadata={"causal": "true", "scale": "0.25"} if metadata is None else metadata)
    return tensors


@needs_torch
def test_outputs_are_those_of_the_call(tmp_path):
    tensors = write(tmp_path / "in.safetensors")
    done = run(tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--kernels", "math", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")
    q, k, v = (tensors[f"a.{name}"].clone().requires_grad_() for name in "qkv")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    o.backward(tensors["a.do"])
    for name, expected in {"o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
        assert torch.equal(found[f"a.math.{name}"], expected), name
    for name, expected in tensors.items():
        assert torch.equal(found[name], expected), name


@needs_torch
def test_causal_unless_there_is_a_mask(tmp_path):
    """The problem is the one that attribute reads: no word of causal and no mask is causal, the corner at the lower right."""
    tensors = write(tmp_path / "in.safetensors", heads=2, metadata={})
    tensors["a.q"] = tensors["a.q"][:, :, 7:].contiguous()
    tensors["a.do"] = tensors["a.do"][:, :, 7:].contiguous()
    hidden = torch.ones(17, 24, dtype=torch.bool).triu(8)
    files = tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors"
    q, k, v = (tensors[f"a.{name}"].float() for name in "qkv")
    for mask, causal in ((None, None), (None, "false"), ("some", "true"), ("some", None)):
        given = dict(tensors)
        shown = torch.zeros(17, 24)
        if mask:
            diagonal = torch.eye(17, 24, dtype=torch.bool)
            given["a.mask"] = shown = torch.zeros(1, 1, 17, 24).masked_fill(diagonal, -float("inf"))
        save_file(given, tmp_path / "in.safetensors", metadata={} if causal is None else {"causal": causal})
        done = run(*files, "--force", "--kernels", "math", "--device", "cpu")
        assert done.returncode == 0, done.stderr
        if causal == "true" or (causal is None and not mask):
            shown = shown.masked_fill(hidden, -float("inf"))
        expected = torch.softmax(q @ k.transpose(-1, -2) / 4 + shown, -1) @ v
        found = load_file(tmp_path / "out.safetensors")["a.math.o"].float()
        assert (found - expected).norm() < 2**-6 * expected.norm(), (mask, causal)


@needs_torch
def test_a_kernel_of_ones_own(tmp_path):
    write(tmp_path / "in.safetensors")
    (tmp_path / "kernels_of_ones_own.py").write_text(
        "def partial(q, k, v, *, causal, scale):\n"
        "    assert causal and scale == 0.25\n"
        "    return 2 * q\n"
        "def whole(q, k, v, *, causal, scale):\n"
        "    return q + (k + v).repeat_interleave(2, 1)\n"
    )
    common = ["in.safetensors", "-o", "out.safetensors", "--device", "cpu", "--kernels", "", "--kernel"]
    done = run(*common, "partial=kernels_of_ones_own:partial", cwd=tmp_path)
    assert done.returncode == 1  # it does not use k, so k has no gradient
    assert "a.partial: not run: " in done.stderr
    done = run(*common, "mine=kernels_of_ones_own:whole", "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["a.mine.dq"], found["a.do"])
    # In bf16 the two query heads of a key head add with one rounding.
    assert torch.equal(found["a.mine.dk"], found["a.do"].unflatten(1, (2, 2)).float().sum(2).bfloat16())


@needs_torch
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("a.k"), "no tensor a.k"),
        (lambda t: t.update({"a.softcap": torch.ones(1)}), "a.softcap"),
        (lambda t: t.update({"a.cu_seqlens": torch.ones(3, dtype=torch.int32)}), "a.cu_seqlens"),
        (lambda t: t.update({"a.q": torch.ones(3, 4)}), "a.q has shape [3, 4], expected"),
        (lambda t: t.update({"a.v": torch.ones(2, 2, 24, 16, dtype=torch.uint8)}), "a.v is torch.uint8, expected"),
        (lambda t: t.clear() or t.update({"b": torch.ones(1)}), "no tensor LAYER.q"),
    ],
)
def test_bad_captures(tmp_path, change, words):
    tensors = write(tmp_path / "in.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "in.safetensors")
    done = run(tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--kernels", "math", "--device", "cpu")
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.safetensors").exists()


@needs_torch
def test_bad_requests(tmp_path):
    write(tmp_path / "in.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"no safetensors")
    (tmp_path / "there.safetensors").write_bytes(b"kept")
    good = [tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--device", "cpu"]
    for arguments, words in [
        ([tmp_path / "missing", *good[1:]], "no safetensors file"),
        ([tmp_path / "no.safetensors", *good[1:]], "no safetensors file"),
        ([*good, "--kernels", "falsh"], "'falsh' is unknown, expected some of flash"),
        ([*good, "--layers", "b"], "no layer 'b', expected some of a"),
        ([*good, "--kernel", "x"], "expected NAME=MODULE:FUNCTION"),
        ([*good, "--kernel", "x=no_such_module:f"], "no_such_module"),
        ([good[0], "-o", tmp_path / "there.safetensors", "--device", "cpu"], "exists"),
        ([good[0], "-o", tmp_path / "no" / "folder", "--device", "cpu", "--kernels", "math"], "cannot be written"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert words in done.stderr.splitlines()[-1]
        assert not (tmp_path / "out.safetensors").exists()
    assert (tmp_path / "there.safetensors").read_bytes() == b"kept"


@needs_torch
@pytest.mark.skipif(not HAVE_TORCH or not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_back_end_on_a_device(tmp_path):
    write(tmp_path / "in.safetensors", kv_heads=4, queries=128, d=64)
    done = run(tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")
    for kernel in ("flash", "cudnn", "efficient", "math"):
        for name in ("o", "dq", "dk", "dv"):
            exact = found[f"a.math.{name}"].double()
            error = (found[f"a.{kernel}.{name}"].double() - exact).norm() / exact.norm()
            assert error < 2**-6, (kernel, name, error)  # they differ by bf16's roundings, not by what they compute
