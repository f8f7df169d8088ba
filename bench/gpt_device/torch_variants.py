#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What makes PyTorch's step of GPT-2 (torch_peer.py) as fast as it is: one variant after the other in one process, each with its
tokens/s, its time on the host and its peak memory; --profile adds the kernels of the step.

    bench/gpt_device/torch_variants.py experiments/configs/gpt2-124m.toml [base,nobias,cudnn,graphs]

base: torch.compile, FlashAttention-2 back end, with biases; also with uniform ids, without clipping, without optimizer. nobias: without
biases. cudnn: SDPA asked for cuDNN. graphs: mode reduce-overhead (CUDA graphs).
"""
import argparse
import math
import time
import tomllib

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_peer import torch_model


class Variants:
    def __init__(self, c, profile):
        self.c, self.profile_rows, self.begin = c, profile, time.time()
        self.batch, self.context = c["batch"], c["context"]
        source = torch.Generator().manual_seed(1)
        ids = torch.exp(torch.rand(4_000_000, generator=source) * math.log(50257)).long() - 1
        self.words = ids.clamp(0, 50256).cuda()  # frequencies of words
        self.uniform = torch.randint(50257, (4_000_000,), generator=source).cuda()
        self.places = torch.arange(self.context, device="cuda")

    def say(self, *what):
        print(f"[{time.time() - self.begin:5.1f}]", *what, flush=True)

    def setup(self, c, **compile_arguments):
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = torch_model(c, 0)
        parameters = list(model.parameters())
        groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                  {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
        found = parameters, optimizer, torch.compile(model, **compile_arguments)
        self.step(found, self.words)
        torch.cuda.synchronize()
        self.say("compiled")
        return found

    def step(self, of, data, clip=True, update=True):
        parameters, optimizer, compiled = of
        at = torch.randint(len(data) - self.context - 1, (self.batch, 1), device="cuda") + self.places
        x, y = data[at], data[at + 1]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(x, y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        if update:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed(self, name, of, data, steps=25, **how):
        for _ in range(5):
            self.step(of, data, **how)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self.step(of, data, **how)
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / steps
        self.say(f"{name:32} {self.batch * self.context / seconds:9.0f} tokens/s {1e3 * seconds:7.2f} ms  host "
                 f"{1e3 * host / steps:6.2f} ms  {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB  loss {float(loss):.3f}")

    def profile(self, of):
        if not self.profile_rows:
            return
        steps = 3
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                self.step(of, self.words)
            torch.cuda.synchronize()
        events = sorted(found.key_averages(), key=lambda e: -e.device_time_total)
        self.say(f"kernels' sum {sum(e.device_time_total for e in events) / steps / 1e3:.2f} ms a step")
        for e in events[:self.profile_rows]:
            print(f"   {e.device_time_total / steps / 1e3:8.3f} ms {e.count / steps:7.1f} x  {e.key[:110]}", flush=True)

    def run(self, which):
        flash, cudnn = [SDPBackend.FLASH_ATTENTION], [SDPBackend.CUDNN_ATTENTION]
        variants = {"base": ("with biases", self.c, flash, {}), "nobias": ("without biases", {**self.c, "bias": False}, flash, {}),
                    "cudnn": ("SDPA asked for cuDNN", self.c, cudnn, {}),
                    "graphs": ("reduce-overhead", self.c, flash, {"mode": "reduce-overhead"})}
        name, c, backend, how = variants[which]
        with sdpa_kernel(backend):
            of = self.setup(c, **how)
            self.timed(name, of, self.words)
            if which == "base":
                self.timed("uniform ids", of, self.uniform)
                self.timed("no clip", of, self.words, clip=False)
                self.timed("no optimizer, no clip", of, self.words, clip=False, update=False)
            self.profile(of)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("config")
    p.add_argument("variants", nargs="?", default="base,nobias,cudnn,graphs")
    p.add_argument("--profile", type=int, default=0, metavar="ROWS")
    a = p.parse_args()
    with open(a.config, "rb") as file:
        c = tomllib.load(file)["train"]
    of = Variants(c, a.profile)
    of.say("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.get_device_name())
    for which in a.variants.split(","):
        of.run(which)


if __name__ == "__main__":
    main()
