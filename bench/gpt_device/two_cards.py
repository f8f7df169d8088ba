#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training of GPT-2 on the cards of one host against one card, in one call: speed, what of a step is
communication, whether the run is the run of one card, PyTorch's DistributedDataParallel beside it, and a sweep with a run a card.

    bench/gpt_device/two_cards.py build/cuda/experiments/cli/faultline --config experiments/configs/gpt2-124m.toml -o two-cards.md

Needs h5py, and for the rows with NCCL one (FAULTLINE_NCCL, the loader's libnccl.so.2, or that of an installed PyTorch). --cards N
(default: all that nvidia-smi lists), with 1 what one card can show; --share-card: two ranks on one card in place of that, which shows
whether their run is the run of one, and no speed. Every part has a time limit and is left out, with the reason,
where it fails. Exit status: 0; 1 where a part failed or did not hold its bound; 2, with a sentence and before -o is touched, for a
request that cannot be run.

What is compared. With R cards a step has R micro-batches of the configuration's batch, with one card for each rank or all R on one
card. One card adds its micro-batches' gradients in ascending order in fp32; ranks that gather add theirs in the order of ranks, which
have a micro-batch each: the same additions, and every other operation is the same kernel on the same shape. So with --deterministic
every loss, gradient norm and weight has the same bits: the bound is 0. NCCL, which adds for more than two ranks unless --reduce gather
is asked for, adds g0 + g1 or g1 + g0 of two, the same number; of more it has another order: each of the R - 1 additions rounds by at
most 2^-24 of the sum of magnitudes sum_i |g_i|, which the norm of the sum does not bound, as the terms cancel, and which no run records:
no bound is derived, and the differences are printed.
"""
import argparse
import datetime
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from torch_peer import torch_run, write_tokens  # noqa: E402


def find_nccl():
    """PyTorch's, where nobody has said otherwise."""
    if os.environ.get("FAULTLINE_NCCL"):
        return
    for folder in sys.path:
        for path in glob.glob(os.path.join(folder, "nvidia", "nccl", "lib", "libnccl.so.2")):
            os.environ["FAULTLINE_NCCL"] = path
            return


PARTS = ("speed", "agreement", "sweep", "torch")
ROWS = ("alone", "during", "end", "nccl", "bf16")


class Refused(Exception):
    """A request that cannot be run, in one sentence."""


def cards_here():
    """The names of those that nvidia-smi lists, one at least."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"nvidia-smi: {getattr(error, 'strerror', None) or 'says nothing for 60 s'}: expected it in PATH, to list the "
                      "cards") from None
    lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    if said.returncode != 0:
        why = (lines + said.stderr.split("\n"))[0].strip()
        raise Refused(f"nvidia-smi: exit status {said.returncode}{': ' + why if why else ''}: expected the names of the cards")
    names = [line for line in lines if line != "No devices were found"]  # which stands on stdout, as a name would
    if not names:
        raise Refused("nvidia-smi: lists no card: expected one at least")
    return names


def checked(a):
    """The names of the cards; Refused where something in the request is wrong. Writes nothing."""
    for option, text, known in (("--rows", a.rows, ROWS), ("--only", a.only, PARTS)):
        for word in text.split(","):
            if word not in known:
                raise Refused(f"{option}: '{word}': expected some of {', '.join(known)}, with commas between")
    for option, value, least in (("--cards", a.cards, 0), ("--steps", a.steps, 1), ("--rounds", a.rounds, 1),
                                 ("--compared-steps", a.compared_steps, 1), ("--torch-steps", a.torch_steps, 1)):
        if value < least:
            raise Refused(f"{option}: {value}: expected {least} or more")
    program = shutil.which(a.program)
    if program is None:
        raise Refused(f"PROGRAM: {a.program}: expected a program that can be run (build/cuda/experiments/cli/faultline)")
    a.program = os.path.abspath(program)
    for option, path in (("--config", a.config), ("--sweep", a.sweep)):
        try:
            if path is not None:
                with open(path, "rb") as file:
                    tomllib.load(file)
        except (OSError, ValueError) as error:
            raise Refused(f"{option}: {path}: {getattr(error, 'strerror', None) or error}: expected a file of TOML") from None
    with open(a.config, "rb") as file:
        train = tomllib.load(file).get("train")
    for key in ("batch", "context"):
        if not isinstance(train, dict) or not isinstance(train.get(key), int) or train[key] < 1:
            raise Refused(f"--config: {a.config}: [train] {key}: expected a whole number, 1 or more")
    names = cards_here()
    if a.share_card and a.cards > 1:
        raise Refused(f"--share-card: is beside --cards {a.cards}: expected one card with it")
    if a.cards > len(names):
        raise Refused(f"--cards: {a.cards}: expected {len(names)} at most, as many as nvidia-smi lists")
    return names


def ended(process, limit):
    """What it said. One that takes longer is told to end, and then killed, with all that it started."""
    try:
        return process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        stop(process)
        _, err = process.communicate()
        raise RuntimeError(f"took more than {limit} s: {err.strip()[-500:]}") from None


def stop(process):
    """The group of a process that was started as the first of one: SIGTERM, 20 s later SIGKILL."""
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def all_ended(processes, finish):
    """finish(process) of each; where one fails none is left."""
    try:
        return [finish(process) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                stop(process)
                process.communicate()


class Bench:
    def __init__(self, a, folder):
        self.a, self.folder = a, os.path.join(folder, "tokens")
        self.results = folder
        self.failed = False
        os.mkdir(self.folder)
        write_tokens(self.folder)
        with open(a.config, "rb") as file:
            self.config = tomllib.load(file)["train"]
        self.micro_tokens = self.config["batch"] * self.config["context"]

    def say(self, line=""):
        print(line, flush=True)
        if self.a.output:  # line by line: what was measured is kept where the rest is cut off
            with open(self.a.output, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def ranks(self, cards):
        """Of the runs with several."""
        return 2 if self.a.share_card else cards

    def command(self, steps, accumulate, ranks, more):
        if self.a.share_card and ranks > 1:
            more = [*more, "--share-card"]
        return [self.a.program, "train", "--config", self.a.config, "--device", "cuda", "--data", self.folder, "--data-format",
                "nanogpt", "--json", "--steps", str(steps), "--accumulate", str(accumulate), "--ranks", str(ranks),
                "--monitor-every", "0", "--warmup", "20", "--schedule", "constant", *more]

    def start(self, card, *arguments):
        environment = dict(os.environ)
        if card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(card)
        return subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=environment, start_new_session=True)

    def finish(self, process, limit=150):
        out, err = ended(process, limit)
        if process.returncode != 0:
            raise RuntimeError(err.strip()[-500:])
        return json.loads(out), err

    def run(self, card, *arguments):
        return self.finish(self.start(card, *arguments))

    # ---- speed

    def speed(self, cards):
        self.say("## Speed")
        ranks = self.ranks(cards)
        self.say(f"{self.a.steps} steps each, in this order in one call; a step of one rank is {self.config['batch']} x "
                 f"{self.config['context']} tokens, of {ranks} ranks {ranks} times as many.")
        if self.a.share_card:
            self.say("Ranks, and runs of their own, share one card in turns: these are no figures of two cards.")
        self.say()
        quiet = ["--validate-every", "0", "--no-monitors"]
        wanted = self.a.rows.split(",")
        for name, options in (("the same bits each time", ["--deterministic"]), ("fastest", ["--no-deterministic"])):
            self.say(f"| {name} | tokens/s | ms/step | times one card |")
            self.say("|---|---:|---:|---:|")
            took = {}

            def row(key, what, rate, ranks):
                took[key] = 1e3 * self.micro_tokens * ranks / rate
                self.say(f"| {what} | {rate:,.0f} | {took[key]:.2f} | {rate / base:.3f} |")

            def by_ranks(key, what, *more):
                if key in wanted:
                    got = self.run(None, steps, ranks, ranks, [*quiet, *options, *more])[0]["tokens_per_second"]
                    row(key, f"{ranks} ranks, {what}", got, ranks)
            for again in range(self.a.rounds):
                steps = self.a.steps
                base = self.run(0, steps, 1, 1, [*quiet, *options])[0]["tokens_per_second"]
                row("one", "one card", base, 1)
                if ranks == 1:
                    continue
                if "alone" in wanted:
                    together = [self.start(rank % cards, steps, 1, 1, [*quiet, *options]) for rank in range(ranks)]
                    rates = all_ended(together, lambda p: self.finish(p)[0]["tokens_per_second"])
                    row("alone", f"{ranks} runs of their own" if self.a.share_card else f"{cards} cards, each a run of its own",
                        sum(rates), ranks)
                by_ranks("during", "added up during the backward")
                by_ranks("end", "added up at its end", "--no-overlap")
                if self.a.share_card:  # NCCL takes no two ranks on one card
                    continue
                by_ranks("nccl", "added up by NCCL", "--reduce", "fp32")
                if name == "fastest":
                    by_ranks("bf16", "added up by NCCL in bf16", "--reduce", "bf16")
            self.say()
            apart = {"during": "added up during the backward", "end": "at its end", "nccl": "by NCCL"}
            if "alone" in took and any(key in took for key in apart):
                said = ", ".join(f"{took[key] - took['alone']:+.2f} ms {what}" for key, what in apart.items() if key in took)
                self.say(f"{name}, the last round: a step takes {took['alone']:.2f} ms where the cards do not speak to each other; {said}.")
                self.say()

    # ---- the same run

    def agreement(self, cards):
        import h5py
        import numpy as np

        many_ranks = self.ranks(cards)
        if many_ranks == 1:
            return
        self.say(f"## The run of {many_ranks} ranks and of one, {self.a.compared_steps} steps of the same {many_ranks} micro-batches")
        runs = {}
        for ranks, what in ((1, "one rank"), (many_ranks, f"{many_ranks} ranks")):
            path = os.path.join(self.results, f"ranks{ranks}.h5")
            got, _ = self.run(None if ranks > 1 else 0, self.a.compared_steps, many_ranks, ranks,
                              ["--validate-every", "100", "--deterministic", "-o", path])
            with h5py.File(path) as file:
                runs[ranks] = {k: file["steps"][k][()] for k in
                               ("loss", "grad_norm", "validation_loss", "max_logit", "qk_rms", "zero_sum")}
                reductions = file.attrs["reductions"]
            with open(path.replace(".h5", ".checkpoint.safetensors"), "rb") as file:
                runs[ranks]["checkpoint"] = file.read()
            self.say(f"- {what}: loss {runs[ranks]['loss'][0]:.6f} at the first step, {got['loss']:.6f} at the last; sums: "
                     f"{reductions}")
        one, many = runs[1], runs[many_ranks]
        self.say()
        self.say("| | largest difference, relative | steps with the same bits |")
        self.say("|---|---:|---:|")
        good = True
        for key, a in one.items():
            if key == "checkpoint":
                continue
            b = many[key]
            scale = np.where(np.isfinite(a), np.abs(a), 0).max(axis=tuple(range(1, a.ndim)), keepdims=True)  # of a step's heads
            # A value that is none in one run alone is a difference as large as there is.
            there, as_there = np.isfinite(a), np.isfinite(a) == np.isfinite(b)
            apart = np.abs(np.where(there, a, 0) - np.where(there & as_there, b, 0)) / np.where(scale > 0, scale, 1)
            off = np.where(as_there, np.where(there, apart, 0), np.inf).reshape(len(a), -1).max(axis=1)
            steps = (there | ~as_there).reshape(len(a), -1).any(axis=1)
            self.say(f"| {key} | {off.max():.3g} | {int((off[steps] == 0).sum())} of {int(steps.sum())} |")
            good &= bool((off == 0).all())
        # Behind the header, which names the number of ranks, come the tensors.
        def tensors(b):
            return b[8 + int.from_bytes(b[:8], "little"):]
        same = tensors(one["checkpoint"]) == tensors(many["checkpoint"])
        self.say()
        held = "no bound derived for more than two" if many_ranks > 2 else f"bound 0: {'held' if good and same else 'NOT HELD'}"
        self.failed |= many_ranks == 2 and not (good and same)
        self.say(f"Weights and moments at the end: {'the same bits' if same else 'other bits'}; {held}.")
        self.say()

    # ---- a sweep, a run a card

    def sweep(self, cards):
        self.say("## Runs side by side, one a card")
        if not self.a.sweep:
            self.say("No --sweep FILE.toml was given.")
            self.say()
            return
        for used in sorted({1, cards}):
            devices = ",".join(map(str, range(used)))
            line = [self.a.program, "sweep", self.a.sweep, "-o", os.path.join(self.results, f"sweep{used}"), "--devices", devices,
                    *self.a.sweep_options.split()]
            begin = time.perf_counter()
            said = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
            out, err = ended(said, 240)
            seconds = time.perf_counter() - begin
            self.failed |= said.returncode != 0
            self.say(f"`faultline sweep {Path(self.a.sweep).name} --devices {devices} {self.a.sweep_options}`: {seconds:.1f} s, "
                     f"exit status {said.returncode}")
            self.say("```")
            for text in (out if said.returncode == 0 else err).rstrip().splitlines()[-30:]:
                self.say(text)
            self.say("```")
        self.say()

    # ---- PyTorch

    def torch(self, cards):
        self.say("## PyTorch: torch.compile, FlashAttention-2 back end, fused AdamW; DistributedDataParallel")
        self.say("| run | tokens/s | ms/step | times one card |")
        self.say("|---|---:|---:|---:|")
        base = None
        for ranks in sorted({1, cards}):
            port = str(29500 + os.getpid() % 1000 + ranks)
            workers = [subprocess.Popen(
                [sys.executable, __file__, self.a.program, "--config", self.a.config, "--torch-steps", str(self.a.torch_steps)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                     "NCCL_NVLS_ENABLE": "0", "TWO_CARDS_TOKENS": self.folder}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, start_new_session=True) for rank in range(ranks)]
            outputs = all_ended(workers, self.finish_worker)
            seconds = max(o["seconds"] for o in outputs)
            rate = ranks * self.micro_tokens / seconds
            base = base or rate
            self.say(f"| PyTorch {outputs[0]['version']}, {ranks} card{'s' if ranks > 1 else ''} | {rate:,.0f} | "
                     f"{1e3 * seconds:.2f} | {rate / base:.3f} |")
        self.say()

    def finish_worker(self, process):
        out, err = ended(process, 200)
        if process.returncode != 0:
            raise RuntimeError(err.strip()[-700:])
        return json.loads(out.strip().splitlines()[-1])


def torch_worker(a):
    """One rank of PyTorch's run."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    wrap = lambda model: model  # noqa: E731
    if size > 1:
        distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
        # Gradients are views of the buckets that are added up, so none is copied.
        wrap = lambda model: DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)  # noqa: E731
    with open(a.config, "rb") as file:
        config = tomllib.load(file)["train"]
    a.torch_attention = "flash"
    seconds, memory, loss, version = torch_run(a, config, os.environ["TWO_CARDS_TOKENS"], wrap)
    print(json.dumps({"seconds": seconds, "memory": memory, "loss": loss, "version": version}))
    if size > 1:
        distributed.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("program")
    p.add_argument("--config", required=True)
    p.add_argument("-o", "--output", help="the results as Markdown")
    p.add_argument("--cards", type=int, default=0)
    p.add_argument("--share-card", action="store_true", help="two ranks on one card, in turns")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--rows", default=",".join(ROWS), help="of the tables of speed, beside one card")
    p.add_argument("--compared-steps", type=int, default=200)
    p.add_argument("--torch-steps", type=int, default=60)
    p.add_argument("--sweep", help="a sweep file")
    p.add_argument("--sweep-options", default="", help="more for faultline sweep")
    p.add_argument("--only", default=",".join(PARTS), help="parts, in their order")
    a = p.parse_args()
    if "TWO_CARDS_TOKENS" in os.environ:
        return torch_worker(a)
    find_nccl()
    try:
        names = checked(a)
        if a.output:  # emptied when all else is known to be good
            try:
                Path(a.output).write_text("", encoding="utf-8")
            except OSError as error:
                raise Refused(f"-o: {a.output}: {error.strerror}: expected the name of a file to write") from None
    except Refused as wrong:
        print(f"two_cards.py: {wrong}", file=sys.stderr)
        return 2
    cards = a.cards or (1 if a.share_card else len(names))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(a, folder)
        against = "Two ranks on one card against one" if a.share_card else f"{cards} card{'s' if cards > 1 else ''} against one"
        bench.say(f"# {against}: {', '.join(names[:cards])}, {datetime.date.today().isoformat()}")
        bench.say(f"`bench/gpt_device/two_cards.py PROGRAM {' '.join(sys.argv[2:])}`")
        bench.say()
        for part in a.only.split(","):
            started = time.perf_counter()
            try:
                getattr(bench, part)(cards)
            except Exception as error:  # a part that fails is said, and the others go on
                bench.failed = True
                bench.say(f"{part} was not finished: {error}")
                bench.say()
            print(f"[{part}: {time.perf_counter() - started:.0f} s]", flush=True)
        bench.say(f"{time.perf_counter() - begin:.0f} s in all.")
        return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
