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


@pytest.fixture(scope="session")
def recorded(program, tmp_path_factory):
    """A folder of files of a model that trains in a second: two healthy runs, one that diverges, and what probes find in
    them; generated inputs; and attributions of keys with a growing mean."""
    folder = tmp_path_factory.mktemp("probed")

    def record(*arguments):
        subprocess.run([program, *arguments, "--quiet"], check=True, stdout=subprocess.DEVNULL, cwd=folder)

    model = ["--width", "16", "--context", "32", "--batch", "8", "--lr", "0.01", "--warmup", "20"]
    model += ["--data", os.path.join(ROOT, "docs"), "--data-format", "text", "--monitor-every", "5", "--validate-every", "0"]
    # A coherent error of the score gradient, and at step 100 so large a one of the updates that the loss surely rises.
    fault = ["--inject", "ds:fixed:0.3", "--inject", "optimizer_update:random:20:from=100", "--capture", "80,81"]
    for name, more in (("control", []), ("other", ["--seed", "1", "--capture", "80", "--capture-sequences", "8"]), ("fault", fault)):
        record("train", "--steps", "160", *model, *more, "-o", f"{name}.h5")
    record("probe", "fault.step000080.safetensors", "fault.step000081.safetensors", "--layers", "layer1",
           "--terms", "12", "-o", "terms.h5")
    record("probe", "control.checkpoint.safetensors", "fault.checkpoint.safetensors", "-o", "weights.h5")
    record("probe", "control.h5", "other.h5", "fault.h5", "--probe", "early-warning", "--rise", "0.2", "-o", "warning.h5")
    record("probe", "other.step000080.safetensors", "--probe", "saturation", "-o", "scores.h5")
    record("generate", "power-sweep,repeated-max", "--heads", "1", "--kv-heads", "1", "--seq", "64", "-o", "made.safetensors")
    record("probe", "made.safetensors", "--terms", "16", "-o", "made.h5")
    record("generate", "key-mean-sweep", "--heads", "11", "--kv-heads", "11", "--seq", "48", "-o", "sweep.safetensors")
    for head in (0, 5, 10):
        record("attribute", "sweep.safetensors", "--plan", "fa3", "--heads", str(head), "--outputs", "dq", "--sites", "ds_cast",
               "--correction", "zero_sum_uniform", "--correction", "zero_sum_weighted", "-o", f"mean{head}.h5")
    (folder / "weighted.toml").write_text('name = "fa2-weighted"\nbase = "fa2"\n[schedule]\nzero_sum = "weighted"\n')
    # Names of the notebook, one fault and few steps: what is drawn is whether the files can be compared.
    fault = ["--inject", "delta:multiplicative:0.3:until=4"]
    choice = ["--attention", "fa2", "--layer-attention", "0=weighted.toml"]
    for name, more in (("layer0", []), ("layer1", []), ("both", []), ("none", []), ("projected0", choice), ("projected", choice)):
        record("train", "--steps", "8", *model, *fault, *more, "-o", f"{name}.h5")
    return folder


@pytest.fixture(scope="session")
def dissociation(program, tmp_path_factory):
    """A matrix of a small model at a high rate: sources, interventions and a guard that switches, in a second."""
    folder = tmp_path_factory.mktemp("dissociated")
    path = str(folder / "d.h5")
    command = [program, "dissociate", "--quiet", "-o", path, "--steps", "60", "--monitor-every", "5", "--lr", "0.03"]
    command += ["--warmup", "5", "--width", "16", "--context", "32", "--batch", "4", "--seeds", "0", "--control", "project"]
    command += ["--data", os.path.join(ROOT, "docs"), "--data-format", "text"]
    for source in ("ds:fixed:0.3", "delta:multiplicative:0.5"):
        command += ["--source", source]
    for intervention in ("none", "project", "project:removal=elsewhere", "project:removal=shrink", "guard:threshold=2"):
        command += ["--intervention", intervention]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return path
