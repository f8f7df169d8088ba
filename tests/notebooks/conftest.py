# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "notebooks"))


@pytest.fixture(scope="session")
def program():
    """The program under test; FAULTLINE_PROGRAM names it."""
    path = os.environ.get("FAULTLINE_PROGRAM")
    if not path or not os.path.exists(path):
        pytest.skip("FAULTLINE_PROGRAM names no built program")
    return path


@pytest.fixture(scope="session")
def attribution(program, tmp_path_factory):
    """An attribution of the capture that the repository ships, few sites and corrections for speed."""
    path = str(tmp_path_factory.mktemp("recorded") / "a.h5")
    capture = os.path.join(ROOT, "tests", "data", "collapsed-layer.safetensors")
    sites = ["o_cast", "p_cast", "ds_cast", "delta", "exp_argument"]
    command = [program, "attribute", capture, "--quiet", "-o", path, "--correction", "zero_sum_weighted"]
    for site in sites:
        command += ["--sites", site]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.fixture(scope="session")
def runs(program, tmp_path_factory):
    """Two short training runs on the project's own prose: without a fault, and with one."""
    folder = tmp_path_factory.mktemp("runs")
    paths = []
    for name, fault in (("control", []), ("fault", ["--inject", "delta:multiplicative:0.3"])):
        paths.append(str(folder / f"{name}.h5"))
        command = [program, "train", "--quiet", "--steps", "25", "--monitor-every", "5", "-o", paths[-1], *fault]
        command += ["--data", os.path.join(ROOT, "docs"), "--data-format", "text", "--validate-every", "10"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return paths
