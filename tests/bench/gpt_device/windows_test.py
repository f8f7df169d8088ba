# SPDX-License-Identifier: Apache-2.0
"""bench/gpt_device: the ids that torch_loss.py writes are read as they are, windows.py names the windows that `faultline train`
takes, and what torch_loss.py says of losses, worked out by hand. With the environment variable FAULTLINE_PROGRAM, in the
repository's root. 77: h5py is missing."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import h5py
except ImportError:
    print("SKIPPED: no h5py")
    sys.exit(77)

sys.path.insert(0, "bench/gpt_device")
import torch_loss  # noqa: E402
from windows import philox4x32, training_windows, validation_windows  # noqa: E402

CONTEXT, BATCH, SEED = 16, 3, 7


class Windows(unittest.TestCase):
    def setUp(self):
        self.folder, self.runs = tempfile.mkdtemp(), tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.addCleanup(shutil.rmtree, self.runs)
        with open("docs/numerics-truth.md", "rb") as file:
            self.text = file.read()
        self.sizes = torch_loss.write_ids(self.text, self.folder)

    def train(self, steps, *more):
        """(losses, validation losses)"""
        path = os.path.join(self.runs, "run.h5")
        subprocess.run([os.environ["FAULTLINE_PROGRAM"], "train", "--data", self.folder, "--data-format", "nanogpt", "--layers", "1",
                        "--width", "16", "--heads", "1", "--context", str(CONTEXT), "--batch", str(BATCH), "--seed", str(SEED),
                        "--steps", str(steps), "--vocab", "256", "--monitor-every", "0", "--quiet", "--force", "-o", path, *more],
                       check=True, stdout=subprocess.DEVNULL)
        with h5py.File(path, "r") as file:
            return [[float(x) for x in file["steps/" + name][()]] for name in ("loss", "validation_loss")]

    def replay(self, steps):
        path = os.path.join(self.runs, "offsets.txt")
        with open(path, "w") as file:
            file.writelines(",".join(map(str, offsets)) + "\n" for offsets in steps)
        return ["--replay", path]

    def test_of_a_step_are_those_that_a_run_takes(self):
        named = [training_windows(SEED, step, BATCH, self.sizes["train"], CONTEXT) for step in range(5)]
        self.assertEqual(self.train(5, "--validate-every", "0")[0],
                         self.train(5, "--validate-every", "0", *self.replay(named))[0])

    def test_of_the_validation_are_those_that_a_run_takes(self):
        # Held-out text that is the text, and weights that hardly move: the loss of a step on the windows of a batch is that batch's.
        shutil.copy(os.path.join(self.folder, "train.bin"), os.path.join(self.folder, "val.bin"))
        named = [validation_windows(SEED, batch, BATCH, self.sizes["train"], CONTEXT) for batch in range(2)]
        losses, held = self.train(2, "--lr", "1e-12", "--validate-every", "1", "--validation-batches", "2", *self.replay(named))
        self.assertNotAlmostEqual(losses[0], losses[1], places=4)
        self.assertAlmostEqual(held[1], sum(losses) / 2, places=6)

    def test_numbers_are_those_of_the_paper(self):
        # Known answers of Random123, file kat_vectors: philox4x32 10.
        self.assertEqual(philox4x32((0, 0, 0, 0), 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8))
        self.assertEqual(philox4x32((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822),
                         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))


class SummedUp(unittest.TestCase):
    def test_the_gap_is_held_against_the_larger_spread(self):
        found = {(side, what): values for what in ("train", "validation") for side, values in
                 (("faultline", {0: 1.0, 1: 1.25, 2: 1.5}), ("PyTorch", {0: 1.5, 1: 1.75, 2: 1.75}))}
        of = torch_loss.summed_up(found)["train"]
        self.assertEqual(of["spreads"], {"faultline": 0.5, "PyTorch": 0.25})
        self.assertAlmostEqual(of["gap"], -1.25 / 3)
        self.assertEqual(of["gaps"], [-0.5, -0.5, -0.25])
        self.assertTrue(of["within"])
        found["PyTorch", "train"] = {0: 2.0, 1: 2.0, 2: 2.0}
        self.assertFalse(torch_loss.summed_up(found)["train"]["within"])

    def test_a_side_with_more_seeds_has_the_spread_of_all_and_the_gap_of_those_of_both(self):
        found = {(side, what): values for what in ("train", "validation") for side, values in
                 (("faultline", {0: 1.0, 1: 1.25, 2: 1.5}), ("PyTorch", {2: 1.75, 7: 1.8}))}
        of = torch_loss.summed_up(found)["validation"]
        self.assertEqual((of["seeds of both"], of["gaps"], of["spreads"]["faultline"]), ([2], [-0.25], 0.5))

    def test_ends_are_of_whole_runs(self):
        run = lambda *losses: {"loss": list(losses), "validation": {"2": 9.0, "4": losses[-1] + 1}}
        kept = {"faultline 1": run(5, 4, 3, 2), "PyTorch 1": run(5, 4, 3, 3), "faultline 10": run(5, 4, 1, 1),
                "PyTorch 2": run(5, 4, 3)}
        self.assertEqual(torch_loss.ends_of(kept, 2),
                         {("faultline", "train"): {1: 2.5, 10: 1}, ("PyTorch", "train"): {1: 3},
                          ("faultline", "validation"): {1: 3, 10: 2}, ("PyTorch", "validation"): {1: 4}})

    def test_the_rate_rises_and_falls_as_a_runs_does(self):
        rate = torch_loss.rate_of({"lr": 0.5, "final-lr": 0.25}, 12, 4)
        self.assertEqual([rate(step) for step in (0, 3, 4, 8)], [0.125, 0.5, 0.5, 0.375])


if __name__ == "__main__":
    unittest.main()
