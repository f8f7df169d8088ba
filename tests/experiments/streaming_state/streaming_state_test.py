# SPDX-License-Identifier: Apache-2.0
"""experiments/streaming_state.py: what it calls separated, on series worked out by hand, and that it runs, stops, goes on and
sums up. With the environment variable FAULTLINE_PROGRAM, in the repository's root. 77: h5py is missing."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree

try:
    import h5py
except ImportError:
    print("SKIPPED: no h5py")
    sys.exit(77)

SCRIPT = "experiments/streaming_state.py"
spec = importlib.util.spec_from_file_location("streaming_state", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def series(*values):
    return {"steps": len(values), "mean_loss": list(values)}


class Separation(unittest.TestCase):
    control = series(2.0, 2.0, 2.0, 2.0, 2.0, 2.0)

    def test_is_the_first_step_from_which_the_gap_stays(self):
        self.assertEqual(script.separation(series(2.0, 2.5, 2.0, 2.31, 2.4, 3.0), self.control), 3)

    def test_a_gap_that_closes_is_none(self):
        self.assertIsNone(script.separation(series(2.0, 3.0, 3.0, 3.0, 3.0, 2.3), self.control))

    def test_ends_with_the_shorter_of_the_two(self):
        self.assertEqual(script.separation(series(2.0, 2.0, 2.5), self.control), 2)
        self.assertEqual(script.separation(series(3.0, 3.0, 3.0), self.control), 0)

    def test_the_running_mean_is_of_the_last_steps(self):
        values = [float(i) for i in range(2 * script.WINDOW)]
        self.assertAlmostEqual(script.running_mean(values)[-1], 1.5 * script.WINDOW - 0.5)
        self.assertAlmostEqual(script.running_mean(values)[2], 1.0)


class Logits(unittest.TestCase):
    def test_the_median_is_over_layers_of_the_largest_of_their_heads(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "none-seed0.h5")
            with h5py.File(path, "w") as file:
                steps = 600
                logits = [[[step, 1.0], [2.0, 3.0 * step], [5.0, 4.0]] for step in range(1, steps + 1)]  # [step, layer, head]
                file["steps/max_logit"] = logits
                for name in ("loss", "validation_loss", "grad_norm"):
                    file["steps/" + name] = [1.0] * steps
            self.assertEqual(script.read(path)["median_logit"], {"500": 500.0})


class Devices(unittest.TestCase):
    def of(self, *more, **environment):
        with unittest.mock.patch.dict(os.environ, environment, clear=True), \
                unittest.mock.patch.object(sys, "argv", [SCRIPT, "--faultline", "x", "--out", "y", *more]):
            return script.arguments().devices

    def test_are_those_that_the_environment_leaves_unless_named(self):
        self.assertEqual(self.of(), "0")
        self.assertEqual(self.of(CUDA_VISIBLE_DEVICES="3,5"), "3,5")
        self.assertEqual(self.of("--devices", "1", CUDA_VISIBLE_DEVICES="3,5"), "1")


class Figure(unittest.TestCase):
    def test_panels_stand_in_rows_within_the_page(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "losses.svg")
            runs = {("none", 0): series(*[2.0] * 100), ("lse", 0): series(*[5.0] * 100)}
            script.figure([(f"rate {i}", runs) for i in range(script.PANELS_IN_A_ROW + 1)], path)
            root = xml.etree.ElementTree.parse(path).getroot()
            wide, high = [float(x) for x in root.get("viewBox").split()[2:]]
            lines = [line.get("points").split() for line in root.iter() if line.tag.endswith("polyline")]
            self.assertEqual(len(lines), 2 * (script.PANELS_IN_A_ROW + 1))
            points = [[float(c) for c in point.split(",")] for line in lines for point in line]
            self.assertTrue(all(0 < x < wide and 0 < y < high for x, y in points))
            self.assertEqual(len({(line[0], line[-1]) for line in lines}), len(lines))  # none lies on another

    def test_by_seed_each_run_stands_in_its_seeds_panel(self):
        runs = {("none", 0): series(1.0), ("lse", 0): series(2.0), ("none", 3): series(3.0)}
        self.assertEqual(script.by_seed([("", runs), ("slow", {("none", 1): series(4.0)})]),
                         [("seed 0", {("none", 0): series(1.0), ("lse", 0): series(2.0)}),
                          ("seed 3", {("none", 3): series(3.0)}), ("slow seed 1", {("none", 1): series(4.0)})])


class Runs(unittest.TestCase):
    """One layer of one head on the CPU; the control of 120 steps, the other of 60."""

    def call(self, folder, *more, may_fail=False):
        command = [sys.executable, SCRIPT, "--faultline", os.environ["FAULTLINE_PROGRAM"], "--out", folder, "--device",
                   "cpu", "--runs", "none:0", "lse:0", "--at-once", "2", "--threads", "1", "--steps", "60",
                   "--control-steps", "120", *more, "--", "--layers", "1", "--width", "64", "--heads", "1", "--batch",
                   "1", "--warmup", "10", "--monitor-every", "20", "--validate-every", "0", "--data",
                   "docs/numerics-truth.md"]
        done = subprocess.run(command, capture_output=True, text=True)
        if not may_fail:  # nothing to sum up where no run has got far
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_recipes_have_folders_and_their_own_options(self):
        with tempfile.TemporaryDirectory() as folder:
            text = self.call(folder, "--recipe", "slow=--lr 0.0001", "--recipe", "2e-2=--lr 0.02 --clip 2")
            self.assertIn("4 runs, 4 to do", text)
            rates = {}
            for name in ("slow", "2e-2"):
                self.assertTrue(os.path.exists(os.path.join(folder, name, "summary.json")))
                with h5py.File(os.path.join(folder, name, "lse-seed0.h5"), "r") as file:
                    rates[name] = float(file["steps/learning_rate"][-1])
            self.assertEqual(rates, {"slow": 0.0001, "2e-2": 0.02})

    def test_a_recipe_without_a_name_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, SCRIPT, "--faultline", "x", "--out", folder, "--recipe", "=--lr 1"],
                                  capture_output=True, text=True)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("expected NAME=OPTIONS", done.stderr)

    def losses(self, folder, plan):
        with h5py.File(os.path.join(folder, plan + "-seed0.h5"), "r") as file:
            return [float(x) for x in file["steps/loss"][:].reshape(-1)]

    def test_stops_goes_on_and_sums_up(self):
        with tempfile.TemporaryDirectory() as folder:
            self.call(folder)
            whole = self.losses(folder, "none"), self.losses(folder, "lse")
            self.assertFalse([name for name in os.listdir(folder) if "checkpoint" in name])
            self.assertIn("2 runs, 0 to do", self.call(folder))
            with open(os.path.join(folder, "summary.json")) as file:
                rows = json.load(file)["runs"]
            self.assertEqual([(r["plan"], r["seed"], r["steps"]) for r in rows], [("none", 0, 120), ("lse", 0, 60)])
            mean = lambda values: sum(values[10:60]) / 50
            self.assertAlmostEqual(rows[1]["gap"], mean(whole[1]) - mean(whole[0]), places=6)
            self.assertIsNone(rows[1]["separation_step"])
            with open(os.path.join(folder, "losses.svg")) as file:
                self.assertEqual(file.read().count("<polyline"), 2)
        with tempfile.TemporaryDirectory() as folder:
            self.call(folder, "--time-limit", "0.4", may_fail=True)  # wherever that finds the runs
            self.call(folder)
            self.assertEqual((self.losses(folder, "none"), self.losses(folder, "lse")), whole)


if __name__ == "__main__":
    unittest.main()
