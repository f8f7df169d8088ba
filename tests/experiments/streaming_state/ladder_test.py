# SPDX-License-Identifier: Apache-2.0
"""experiments/ladder.py: which records it takes, means worked out by hand, and the committed picture from the committed table. In the
repository's root. 77: h5py is missing."""
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

try:
    import h5py
except ImportError:
    print("SKIPPED: no h5py")
    sys.exit(77)

SCRIPT = "experiments/ladder.py"
spec = importlib.util.spec_from_file_location("ladder", SCRIPT)
ladder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ladder)
PLAN = "plan-plans-streaming64-all-both.toml"


class Names(unittest.TestCase):
    def test_of_a_sweep(self):
        self.assertEqual(ladder.state_of("none__none__seed3__27d2312403fc.h5"), (3, "none"))
        self.assertEqual(ladder.state_of(PLAN + "__none__seed0__28e7ba2600d5.h5"), (0, "all"))
        self.assertEqual(ladder.state_of(PLAN + "-layers-0-1-2-3__none__seed11__cacfcdc5b248.h5"), (11, "0,1,2,3"))
        self.assertEqual(ladder.state_of("x=1__" + PLAN + "-layers-6__none__seed0__0.h5"), (0, "6"))

    def test_of_other_runs(self):
        for name in ("plan-plans-streaming64-lse.toml__none__seed0__0.h5", "none__qk_norm__seed0__0.h5", "sweep.h5",
                     PLAN + "__none__seed0__0.log"):
            self.assertIsNone(ladder.state_of(name))


class Table(unittest.TestCase):
    def test_takes_the_place_of_what_was_there_and_keeps_the_rest(self):
        with tempfile.TemporaryDirectory() as folder:
            run, table = os.path.join(folder, PLAN + "-layers-6__none__seed1__0.h5"), os.path.join(folder, "t.csv")
            with h5py.File(run, "w") as file:
                file["steps/loss"] = [float(i) for i in range(1, 660)]  # the mean of (step - 50, step] is step - 24.5
            with open(table, "w") as file:
                file.write("seed,layers,600,625\n0,none,1.5000,1.2500\n1,6,9.0000,9.0000\n")
            subprocess.run([sys.executable, SCRIPT, "--runs", run, "-o", table], check=True)
            with open(table) as file:
                self.assertEqual(file.read(), "seed,layers,600,625,650\n0,none,1.5000,1.2500,\n1,6,575.5000,600.5000,625.5000\n")


class Picture(unittest.TestCase):
    def test_is_the_committed_one(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.svg")
            subprocess.run([sys.executable, SCRIPT, "docs/figures/data/ladder-eight.csv", "-o", path], check=True)
            lines = xml.etree.ElementTree.parse(path).findall(".//{*}polyline")
            self.assertEqual(len(lines), len(ladder.read("docs/figures/data/ladder-eight.csv")))
            with open(path) as drawn, open("docs/figures/ladder-eight.svg") as committed:
                self.assertEqual(drawn.read(), committed.read())


if __name__ == "__main__":
    unittest.main()
