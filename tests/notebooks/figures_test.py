# SPDX-License-Identifier: Apache-2.0
import os
import shutil

import h5py
import pytest

from faultline.figures import figures
from faultline.figures.__main__ import main


def test_every_figure_of_an_attribution_is_drawn(attribution, tmp_path, capsys):
    assert main([attribution, "-o", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for kind in figures("attribution"):
        written = [name for name in os.listdir(tmp_path) if name.startswith(kind.name)]
        assert any(name.endswith(".pdf") for name in written) and any(name.endswith(".png") for name in written), kind
    for name in os.listdir(tmp_path):
        with open(tmp_path / name, "rb") as file:
            assert file.read(4) == (b"%PDF" if name.endswith("pdf") else b"\x89PNG")


def test_every_figure_of_runs_is_drawn_and_two_are_compared(runs, tmp_path, capsys):
    assert main([*runs, "-o", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "injected: the file has no steps/injected_rms" in said and "--inject" in said
    assert "guard: no guard switched" in said
    drawn = {kind.name for kind in figures("run")} - {"guard"}
    for kind in drawn:
        where = tmp_path if kind == "loss" else tmp_path / "fault"
        assert (where / f"{kind}.pdf").stat().st_size > 1000 and (where / f"{kind}.png").exists(), kind


def test_what_a_file_lacks_is_said_with_the_command_that_records_it(attribution, tmp_path, capsys):
    poor = tmp_path / "poor.h5"
    shutil.copy(attribution, poor)
    with h5py.File(poor, "a") as file:
        for part in ("tiles", "rows", "counterfactual", "corrections"):
            del file[f"layer1/{part}"]
    assert main([str(poor), "-o", str(tmp_path / "f")]) == 1
    said = capsys.readouterr().err
    assert "tiles: the file has no tiles; record it with: faultline attribute" in said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["missing.h5"], "missing.h5"),
        ([], "no FILE given"),
        (["x.h5", "--only", "nothing"], "no figure is named 'nothing'"),
    ],
)
def test_bad_requests_end_with_2_and_a_sentence(arguments, sentence, capsys):
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err
