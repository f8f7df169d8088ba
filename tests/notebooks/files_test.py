# SPDX-License-Identifier: Apache-2.0
import json
import math
from decimal import Decimal

import h5py
import numpy as np
import pytest

import faultline
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


def test_low_precision_codes_are_decoded(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.attrs["schema"] = "faultline.capture"
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
