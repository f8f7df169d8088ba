# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import shutil
import subprocess
import time
from decimal import Decimal

import h5py
import numpy as np
import pytest

import faultline
from conftest import ROOT
from faultline.files import Wide


def test_groups_and_dimensions_have_names(attribution):
    tree = faultline.open(attribution)
    assert tree.attrs["kind"] == "attribution"
    effects = tree["layer1/counterfactual"].to_dataset()
    assert effects["share"].dims == ("site", "output")
    assert effects["share"].sel(site="o_cast", output="dq") > 0.5
    assert tree["layer1/rows"].to_dataset()["p_max"].dims == ("head", "row")


def test_every_value_is_that_of_h5py(attribution):
    tree = faultline.open(attribution)
    seen = 0
    with h5py.File(attribution) as file:
        for output in ("o", "dq", "dk", "dv"):
            for name, data in file[f"layer1/outputs/{output}"].items():
                if data.dtype.kind == "f":
                    np.testing.assert_array_equal(tree[f"layer1/outputs/{output}/{name}"].values, data[()])
                    seen += 1
    assert seen > 20


def bf16_tensor(path, name):
    """A bf16 tensor of a safetensors file, as float64."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
        assert entry["dtype"] == "BF16"
        file.seek(8 + size + entry["data_offsets"][0])
        codes = np.frombuffer(file.read(entry["data_offsets"][1] - entry["data_offsets"][0]), np.uint16)
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(float).reshape(entry["shape"])


def test_what_a_run_records_of_a_step_is_what_the_probe_finds_in_its_capture(recorded):
    """Online the monitors are computed in float inside the attention kernel, offline in binary64 from the capture."""
    run = faultline.open(recorded / "other.h5")["steps"].to_dataset().sel(step=80)
    unit, d, keys = 2.0**-24, 8, 32
    for layer in range(2):
        probe = faultline.open(recorded / "scores.h5")[f"layer{layer}/saturation"].to_dataset()
        seen = probe.isel(row=slice(1, None))  # the rows that see two keys and more
        assert seen.sizes["sequence"] == 8 and seen.sizes["row"] == keys - 1
        q, k = (bf16_tensor(recorded / "other.step000080.safetensors", f"layer{layer}.{name}") for name in "qk")
        for head in range(2):
            online, offline = run.isel(layer=layer, head=head), seen.isel(head=head)
            # A score is d float fmas and a scaling: off by at most (d + 1) units of |q||k| / sqrt(d). Differences of two
            # scores make p: twice that, and some 4 units of exp, of the sum's keys and of the quotient.
            norms = [np.linalg.norm(x[:, head], axis=-1).max() for x in (q, k)]
            of_score = (d + 1) * unit * norms[0] * norms[1] / np.sqrt(d)
            of_p = 2 * of_score + (4 + keys) * unit
            # The entropy's differential is -sum dp (log p + 1), with sum p |log p| the entropy itself.
            of_entropy = of_p * (np.log(keys) + 1)
            assert of_entropy < 1e-3  # so that a row more or less, or another logarithm, would show
            assert float(online["entropy"]) == pytest.approx(float(offline["entropy"].mean()), abs=of_entropy)
            assert abs(float(online["max_logit"]) - float(probe["max_logit"].isel(head=head).max())) <= of_score
            threshold = 1 - 2.0**-9
            undecided = float((np.abs(offline["p_max"] - threshold) <= of_p).mean())
            saturated = float((offline["p_max"] > threshold).mean())
            assert abs(float(online["saturated_fraction"]) - saturated) <= undecided + 1e-12


@pytest.mark.parametrize("plan", ["fa2", "llmc", "standard-bf16"])  # the scale after ds, before its cast, and after it
def test_the_sum_of_the_score_gradient_is_one_number_online_and_offline(program, tmp_path, plan):
    """Of a step's record, of probe and of attribute on that step's capture, under the plan that ran: nat/logit in all."""
    name = f"{plan}.h5"
    model = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "32", "--batch", "4", "--seed", "1"]
    data = ["--data", os.path.join(ROOT, "docs"), "--data-format", "text", "--validate-every", "0"]
    commands = [["train", "--steps", "3", *model, *data, "--attention", plan, "--capture", "2", "--capture-sequences", "4", "-o", name],
                ["probe", f"{plan}.step000002.safetensors", "--plan", plan, "--probe", "conservation", "-o", "probe.h5"],
                ["attribute", f"{plan}.step000002.safetensors", "--plan", plan, "--outputs", "dq", "--sites", "ds_cast",
                 "--correction", "none", "-o", "attribute.h5"]]
    for command in commands:
        subprocess.run([program, *command, "--quiet"], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)
    run = faultline.open(tmp_path / name)["steps"].to_dataset().sel(step=2).isel(layer=0)
    probe = faultline.open(tmp_path / "probe.h5")["layer0/conservation"].to_dataset().sel(source=plan)
    rows = faultline.open(tmp_path / "attribute.h5")["layer0/rows"].to_dataset()
    assert rows["zero_sum"].attrs["units"] == probe["gradient_sum"].attrs["units"] == "nat/logit"
    for head in range(2):
        terms = float(run["zero_sum_abs"].isel(head=head))
        assert terms > 1e-3
        magnitude = probe["gradient_abs"].isel(head=head)
        # One code, sums in another order: some 2^-40 of the terms.
        assert float(magnitude.sum()) == pytest.approx(terms, rel=1e-12)
        total = float(run["zero_sum"].isel(head=head))
        assert float(probe["gradient_sum"].isel(head=head).sum()) == pytest.approx(total, abs=1e-12 * terms)
        # attribute's heads are those of every batch element, one after the other
        mine = rows["zero_sum"].values[head::2]
        np.testing.assert_allclose(mine.ravel(), probe["gradient_sum"].isel(head=head).values.ravel(), atol=1e-12 * terms)
        relative = rows["zero_sum_relative"].values[head::2][:, 1:]
        assert np.sqrt((relative**2).mean()) < 0.1, "the first row, of one key, is no row to judge by"


def test_a_run_is_read_to_its_last_completed_step(runs, tmp_path):
    path = tmp_path / "killed.h5"
    shutil.copy(runs[0], path)
    with h5py.File(path, "a") as file:  # killed between two datasets of step 25
        file["steps/loss"].resize(26, 0)
    steps = faultline.open(path)["steps"].to_dataset()
    assert steps.sizes["step"] == 25 and np.isfinite(steps["loss"]).all()
    with h5py.File(path, "a") as file:
        file["steps/loss"].resize(20, 0)
    with pytest.raises(ValueError, match=r"killed.h5: steps/loss: 20 numbers over step: expected 25, one for each step"):
        faultline.open(path)
    with h5py.File(path, "a") as file:
        del file["steps/loss"]
        file["steps/loss"] = np.zeros(25)
    with pytest.raises(ValueError, match="steps/loss: 25 numbers over loss_0: expected 25"):
        faultline.open(path)


def test_a_run_whose_writer_was_killed_opens(program, tmp_path):
    command = [program, "train", "--quiet", "--steps", "1000000", "--layers", "1", "--width", "16", "--heads", "1", "--context", "16"]
    command += ["--batch", "1", "--data", os.path.join(ROOT, "docs"), "--data-format", "text", "-o", "live.h5"]
    writer = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        count = 0
        for _ in range(600):
            time.sleep(0.1)
            try:
                count = faultline.open(tmp_path / "live.h5")["steps"].sizes["step"]
            except (OSError, KeyError, RuntimeError, ValueError):  # not begun, or caught while its structure is made
                continue
            if count > 3:
                break
        assert count > 3
    finally:
        writer.kill()
        writer.wait()
    assert faultline.open(tmp_path / "live.h5")["steps"].sizes["step"] >= count


@pytest.mark.parametrize(
    "attributes, sentence",
    [
        ({"schema_version": 99}, r"x.h5: attribute schema_version: 99: expected 1 \(a newer faultline wrote it\)"),
        ({"schema_version": "one"}, "x.h5: attribute schema_version: one: expected 1"),
        ({"schema_version": None}, "x.h5: attribute schema_version: is missing: expected 1"),
        ({"schema": "other.program"}, "x.h5: attribute schema: 'other.program': expected 'faultline.KIND'"),
    ],
)
def test_a_layout_that_is_not_known_is_refused(attribution, attributes, sentence, tmp_path):
    path = tmp_path / "x.h5"
    shutil.copy(attribution, path)
    with h5py.File(path, "a") as file:
        for name, value in attributes.items():
            del file.attrs[name]
            if value is not None:
                file.attrs[name] = value
    with pytest.raises(ValueError, match=sentence):
        faultline.open(path)


def test_low_precision_codes_are_decoded(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.attrs.update(kind="capture", schema="faultline.capture", schema_version=1)
        for name, encoding, codes in (
            ("b", "bfloat16", np.array([0x3F80, 0xC049, 0x7F80, 0x0001], np.uint16)),
            ("e4", "float8_e4m3fn", np.array([0x38, 0x7E, 0x01, 0x80, 0x7F], np.uint8)),
            ("e5", "float8_e5m2", np.array([0x3C, 0x7B, 0x01, 0xFC], np.uint8)),
        ):
            file[name] = codes
            file[name].attrs["encoding"] = encoding
    tree = faultline.open(path)
    np.testing.assert_array_equal(tree["b"].values, [1.0, -3.140625, math.inf, 2.0**-133])
    # OCP 8-bit floating point specification, table 1: largest 448 and 57344, smallest subnormal 2^-9 and 2^-16
    np.testing.assert_array_equal(tree["e4"].values, [1.0, 448.0, 2.0**-9, -0.0, math.nan])
    np.testing.assert_array_equal(tree["e5"].values, [1.0, 57344.0, 2.0**-16, -math.inf])


def test_numbers_beyond_a_double(attribution):
    norm = faultline.wide(faultline.open(attribution)["layer1/outputs/dq"], "truth_norm")
    assert float(norm) == pytest.approx(1.24e-6, rel=5e-3)
    assert str(Wide(0.5, -6616)) == f"{Decimal(2) ** -6617:.2e}"
    assert Wide(0.5, -6616).log10 == pytest.approx(-6617 * math.log10(2))
    assert float(Wide(-0.5, 6616)) == -math.inf
    with pytest.raises(faultline.NotRecorded, match="nothing_mantissa"):
        faultline.wide(faultline.open(attribution)["layer1/outputs/dq"], "nothing")


def test_other_files_are_refused(tmp_path):
    text = tmp_path / "x.h5"
    text.write_text("text")
    with pytest.raises(OSError, match="not an HDF5 file"):
        faultline.open(text)
    other = tmp_path / "y.h5"
    h5py.File(other, "w").close()
    with pytest.raises(ValueError, match="no attribute 'schema'"):
        faultline.open(other)
