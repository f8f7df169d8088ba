#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/card/check_card.py's verdicts, on programs that print what they are told to; the lines have the form of an H200's."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path("bench/card/check_card.py").resolve()

FORWARD = """NVIDIA H200
B8 H16/16 N4096 d128 causal bf16  fused                           0.992 ms   {} TFLOP/s
B8 H16/16 N4096 d128 causal bf16  fused by mma                    1.897 ms   289.9 TFLOP/s
B32 H12/12 N1024 d64 causal bf16  fused                           0.167 ms   {} TFLOP/s
"""
TORCH = """B8 H16/16 N4096 d128 causal bf16  flash_attention         1.763 ms   311.9 TFLOP/s
B8 H16/16 N4096 d128 causal bf16  cudnn_attention         1.052 ms   522.6 TFLOP/s
B32 H12/12 N1024 d64 causal bf16  flash_attention         0.255 ms   202.0 TFLOP/s
"""
RECORDER = "B8 forward  recorder on {}: 1.0190 ms, without 0.9909 ms, {} times (middle half 1.0246 to 1.0269)\n"
RULE = "hopper-{}: 92274688 dot products, {} differ\n"


class Verdicts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = Path(folder.name) / "build"

    def program(self, path, text, status=0):
        file = self.build / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\ncat <<'E'\n{text}E\nexit {status}\n")
        file.chmod(0o755)
        return str(file)

    def status_of(self, only, *options):
        done = subprocess.run([sys.executable, SCRIPT, self.build, self.build / "results", "--only", only, *options],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def test_a_recorder_that_costs_too_much_is_said(self):
        for lines, status in ((((1, 1.87), (0.01, 1.026), (0.1, 1.2), ("1e-09", 1.05)), 0), (((1, 2.1),), 1),
                              (((0.01, 1.031),), 1), (((1, 1.9), (1, 3.0)), 1)):
            self.program("bench/tensor_kernel/tensor_recorder_bench", "".join(RECORDER.format(*line) for line in lines))
            self.assertEqual(self.status_of("recorder")[0], status, lines)

    def test_kernels_stand_beside_pytorchs(self):
        torch = self.program("python", TORCH)  # and says yes where it is asked to import torch
        for at_128, at_64, status in (("554.3", "307.8", 0), ("300.0", "307.8", 1), ("554.3", "201.9", 1)):
            self.program("bench/tensor_kernel/tensor_attention_bench", FORWARD.format(at_128, at_64))
            self.assertEqual(self.status_of("forward,forward-torch", "--torch", torch)[0], status, (at_128, at_64))

    def test_a_rule_has_no_differences(self):
        rules = "kernels/cuda/hardware_probe/hardware_probe"
        for lines, exits, status in (((("mma-bf16", 0), ("mma-fp16-f16acc", 0)), 0, 0), ((("mma-fp16-f16acc", 4),), 1, 1), ((("mma-bf16", 1),), 1, 1),
                                     ((("wgmma-e4m3-f16acc", 1),), 1, 1), ((("mma-bf16", 0),), 2, 1)):
            self.program(rules, "".join(RULE.format(*line) for line in lines), exits)
            code, said = self.status_of("rule")
            self.assertEqual(code, status, said)

    def test_what_is_not_built_is_left_out(self):
        code, said = self.status_of("selftest")
        self.assertEqual(code, 0)
        self.assertIn("left out: there is no", said)

    def test_the_list_wants_nothing(self):
        done = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(os.path.join("build", "cuda"), done.stdout)


if __name__ == "__main__":
    unittest.main()
