#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an option of `faultline train` costs: variants of one run in turns (A B C A B C …), each a process of its own, and of each the
median rate, its spread, and what it takes of the first variant's; where spectra are found beside the steps, what that took.

    bench/gpt_device/side_by_side.py --rounds 5 --options '--device cuda --layers 4 …' \\
        none='--no-monitors --monitor-every 0' all='--monitor-every 10' former=/other/faultline:'--monitor-every 10'

A variant is NAME=OPTIONS, or NAME=PROGRAM:OPTIONS where it is another program's. -o FILE adds a line of JSON for each rate. The card is to
be nobody else's meanwhile.
"""
import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time


def run(program, options):
    done = subprocess.run([program, "train", *shlex.split(options), "--json", "--quiet"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{program}: status {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="NAME=[PROGRAM:]OPTIONS")
    parser.add_argument("--program", default="build/cuda/experiments/cli/faultline")
    parser.add_argument("--options", default="", help="of all variants")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=float, default=1.0, help="of a step, to print steps/s; 1: tokens/s")
    parser.add_argument("-o", dest="out")
    arguments = parser.parse_args()
    variants = []
    for text in arguments.variants:
        name, _, options = text.partition("=")
        program, colon, rest = options.partition(":")
        own = bool(colon) and "/" in program and not program.startswith("-")
        variants.append((name, program if own else arguments.program, rest if own else options))
    rates = {name: [] for name, _, _ in variants}
    begin = time.time()
    for turn in range(arguments.rounds):
        for name, program, options in variants:
            done = run(program, f"{arguments.options} {options}")
            rate = done["tokens_per_second"] / arguments.tokens
            rates[name].append(rate)
            spectra = done.get("spectra")
            text = (f", spectra {1e3 * spectra['seconds_each']:.1f} ms on {spectra['threads']} threads, steps waited "
                    f"{1e3 * spectra['seconds_waited']:.1f} ms" if spectra else "")
            print(f"[{time.time() - begin:6.1f}] round {turn}: {name} {rate:,.1f}{text}", flush=True)
            if arguments.out:
                with open(arguments.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"variant": name, "round": turn, "rate": rate, "spectra": spectra}) + "\n")
    base = statistics.median(rates[variants[0][0]])
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:24} median {middle:12,.1f}   from {min(values):,.1f} to {max(values):,.1f}   "
              f"{100 * (1 - middle / base):+.1f}% of {variants[0][0]}")


if __name__ == "__main__":
    main()
