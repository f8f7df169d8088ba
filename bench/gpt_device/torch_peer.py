#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training of GPT-2 by `faultline train --device cuda` and by PyTorch (torch.compile, bf16 autocast, FlashAttention-2 back
end, fused AdamW, clip 1) on one card, in turns in one run, with the same model, batch and tokens.

    bench/gpt_device/torch_peer.py build/cuda/experiments/cli/faultline --config experiments/configs/gpt2-124m.toml

Prints tokens/s, ms/step and peak memory of each. --steps N of each; PyTorch's first ten, which compile, are not counted, nor
are ours until the first step is done (--json's seconds begin with it). --write-tokens FILE writes the tokens alone.
"""
import argparse
import array
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import tomllib


def write_tokens(folder, count=4_000_000, vocabulary=50257):
    """nanoGPT's files: ids with the frequencies of words (Zipf), so that the embedding's gradient meets repeated ids."""
    source = random.Random(1)
    ids = [min(vocabulary - 1, int(math.exp(source.random() * math.log(vocabulary))) - 1) for _ in range(count)]
    for name in ("train", "val"):
        with open(os.path.join(folder, name + ".bin"), "wb") as file:
            array.array("H", ids if name == "train" else ids[:200_000]).tofile(file)


def torch_model(c, seed, device="cuda"):
    """GPT-2 as faultline has it, its start drawn alike."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, heads, layers, context = c["width"], c["heads"], c["layers"], c["context"]
    bias = c.get("bias", False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
            self.fc, self.proj = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

        def forward(self, x):
            b, n, w = x.shape
            q, k, v = (y.view(b, n, heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(w, -1))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, w)
            x = x + self.out(o)
            return x + self.proj(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.place = nn.Embedding(c["vocab"], width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(width, bias=bias)
            for name, p in self.named_parameters():
                if p.dim() > 1:
                    branch = name.endswith(("out.weight", "proj.weight"))
                    nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if branch else 0.02)
                elif name.endswith("bias"):
                    nn.init.zeros_(p)

        def forward(self, ids, targets):
            x = self.token(ids) + self.place.weight
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.token.weight)
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    return Gpt().to(device)


def torch_steps(c, folder, steps, seed=0, attention="flash", rate=None, after=None, wrap=lambda model: model,
                reuse=None, windows=None, validation=None, device="cuda"):
    """Trains and returns the losses (of a step each, on the card); rate(step): the learning rate; after(step) is called when a
    step is launched; reuse: a dictionary that keeps what was compiled for the next call, which draws its own weights;
    windows(step): offsets in train.bin of the step's windows, which are drawn where it is None; validation: (every, batches of
    offsets in val.bin, a dictionary), and the dictionary gets the mean loss of the batches after each `every` steps."""
    import numpy
    import torch
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context, batch = c["context"], c["batch"]
    model = wrap(torch_model(c, seed, device))
    if reuse:
        reuse["model"].load_state_dict(model.state_dict())
        model = reuse["model"]
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    decay = c.get("weight-decay", 0.1)
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=c.get("lr", 6e-4), betas=(0.9, 0.95), fused=device == "cuda")
    compiled = reuse["compiled"] if reuse else torch.compile(model)
    if reuse is not None:
        reuse.update(model=model, compiled=compiled)

    def ids(name):  # on the card, so that the host never holds it up
        return torch.from_numpy(numpy.fromfile(os.path.join(folder, name), dtype=numpy.uint16).astype(numpy.int64)).to(device)

    data = ids("train.bin")
    places = torch.arange(context, device=device)

    def loss_of(text, offsets):
        at = offsets + places
        with torch.autocast(device, dtype=torch.bfloat16):
            return compiled(text[at], text[at + 1])

    if windows is not None:  # all of them in one copy
        drawn = torch.tensor([windows(step) for step in range(steps)]).unsqueeze(-1).to(device)
    if validation is not None:
        every, held, means = validation
        val, held = ids("val.bin"), torch.tensor(held).unsqueeze(-1).to(device)
    backend = {"flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION]}[attention]
    losses = []
    with sdpa_kernel(backend):
        for step in range(steps):
            if rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate(step)
            loss = loss_of(data, torch.randint(len(data) - context - 1, (batch, 1), device=device) if windows is None
                           else drawn[step])
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            if validation is not None and (step + 1) % every == 0:
                # With gradients, which nobody takes: without, the model would be compiled once more.
                means[step + 1] = sum(float(loss_of(val, offsets).detach()) for offsets in held) / len(held)
            if after is not None:
                after(step)
    if device == "cuda":
        torch.cuda.synchronize()
    return losses


def torch_run(a, c, folder, wrap=lambda model: model):
    import torch

    warm, begin = 10, 0.0

    def after(step):
        nonlocal begin
        if step == warm - 1:
            torch.cuda.synchronize()
            begin = time.perf_counter()

    losses = torch_steps(c, folder, warm + a.torch_steps, attention=a.torch_attention, after=after, wrap=wrap)
    seconds = (time.perf_counter() - begin) / a.torch_steps
    return seconds, torch.cuda.max_memory_allocated() / 2**30, float(losses[-1]), torch.__version__


def our_run(a, folder, deterministic):
    said = subprocess.run(
        [a.program, "train", "--config", a.config, "--device", "cuda", "--data", folder, "--data-format", "nanogpt", "--json",
         "--steps", str(a.steps), "--deterministic" if deterministic else "--no-deterministic", "--validate-every", "0",
         "--monitor-every", "0", "--no-monitors"], capture_output=True, text=True)
    if said.returncode != 0:
        print(said.stderr)
        return None
    memory = next((line for line in said.stderr.splitlines() if "memory " in line), "")
    return json.loads(said.stdout), memory


def main():
    p = argparse.ArgumentParser()
    p.add_argument("program")
    p.add_argument("--config", required=True)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--torch-attention", default="flash", choices=("flash", "cudnn"))
    p.add_argument("--torch-steps", type=int, default=60)
    p.add_argument("--no-torch", action="store_true")
    a = p.parse_args()
    with open(a.config, "rb") as file:
        c = tomllib.load(file)["train"]
    tokens = c["batch"] * c["context"] * c.get("accumulate", 1)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(folder)
        for _ in range(a.rounds):
            for deterministic in (True, False):
                got = our_run(a, folder, deterministic)
                if got is not None:
                    rate = got[0]["tokens_per_second"]
                    print(f"faultline, {'the same bits each time' if deterministic else 'fastest':24} {rate:10.0f} tokens/s "
                          f"{1e3 * tokens / rate:8.2f} ms/step  loss {got[0]['loss']:.3f}  {got[1]}", flush=True)
        if not a.no_torch:
            seconds, memory, loss, version = torch_run(a, c, folder)
            print(f"PyTorch {version}, {a.torch_attention:25} {tokens / seconds:10.0f} tokens/s {1e3 * seconds:8.2f} ms/step  "
                  f"loss {loss:.3f}  memory {memory:.2f} GiB at its peak", flush=True)
        got = our_run(a, folder, False)
        if got is not None:
            rate = got[0]["tokens_per_second"]
            print(f"faultline, fastest, again           {rate:10.0f} tokens/s {1e3 * tokens / rate:8.2f} ms/step")


if __name__ == "__main__":
    main()
