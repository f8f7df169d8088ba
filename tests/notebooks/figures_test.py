# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
import subprocess

import h5py
import matplotlib.figure
import matplotlib.text
import numpy as np
import pytest

import faultline
from faultline.figures import draw, figures
from faultline.figures.__main__ import main
from faultline.figures.probes import similarity_numbers


@pytest.fixture
def saved(monkeypatch):
    """The matplotlib figures that a test writes; behind it, every one's text is found to be 8 points and larger, and every
    axis to have a name, or to count names, or to stand in a row or column with one that has."""
    figures_of_test = []
    save = matplotlib.figure.Figure.savefig

    def savefig(figure, path, **options):
        if str(path).endswith(".png"):
            figures_of_test.append(figure)
        return save(figure, path, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
    yield figures_of_test
    assert figures_of_test
    for figure in figures_of_test:
        for text in figure.findobj(matplotlib.text.Text):
            assert not text.get_text() or text.get_fontsize() >= 8, text.get_text()
        panels = [axes for axes in figure.axes if axes.get_subplotspec() is not None and axes.axison and axes.has_data()]
        for which, span in (("x", "colspan"), ("y", "rowspan")):
            place = {axes: getattr(axes.get_subplotspec(), span) for axes in panels}
            for axes in panels:
                beside = [getattr(other, f"{which}axis") for other in panels if place[other] == place[axes]]
                assert any(axis.get_label_text() or has_categories(axis) for axis in beside), (which, axes.get_title())


def has_categories(axis):
    return any(label.get_text().strip("$−-.0123456789") for label in axis.get_ticklabels())


def test_every_figure_of_an_attribution_is_drawn(attribution, saved, tmp_path, capsys):
    assert main([attribution, "-o", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for kind in figures("attribution"):
        written = [name for name in os.listdir(tmp_path) if name.startswith(kind.name)]
        assert any(name.endswith(".pdf") for name in written) and any(name.endswith(".png") for name in written), kind
    for name in os.listdir(tmp_path):
        with open(tmp_path / name, "rb") as file:
            assert file.read(4) == (b"%PDF" if name.endswith("pdf") else b"\x89PNG")


def test_every_figure_of_runs_is_drawn_and_two_are_compared(runs, saved, tmp_path, capsys):
    assert main([*runs, "-o", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "injected: the file has no steps/injected_rms" in said and "--inject" in said
    assert "guard: no guard switched" in said
    drawn = {kind.name for kind in figures("run")} - {"guard"}
    for kind in drawn:
        where = tmp_path if kind in ("loss", "gradient-norm") else tmp_path / "fault"
        assert (where / f"{kind}.pdf").stat().st_size > 1000 and (where / f"{kind}.png").exists(), kind


def test_a_changed_file_is_a_sentence_and_other_figures_are_drawn(runs, attribution, tmp_path, capsys):
    changed = str(tmp_path / "changed.h5")
    shutil.copy(attribution, changed)
    with h5py.File(changed, "a") as file:
        for layer in [name for name in file if "counterfactual" in file[name]]:
            del file[f"{layer}/counterfactual/share"]
    assert main([changed, "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "cannot be drawn (" in said.err and "expected a file as faultline writes it" in said.err
    assert said.out
    shutil.copy(runs[0], changed)
    with h5py.File(changed, "a") as file:
        del file["steps/step"]
    assert main([changed, "-o", str(tmp_path / "out")]) == 2
    assert "cannot be read (" in capsys.readouterr().err


def test_what_a_file_lacks_is_said_with_the_command_that_records_it(attribution, tmp_path, capsys):
    poor = tmp_path / "poor.h5"
    shutil.copy(attribution, poor)
    with h5py.File(poor, "a") as file:
        for part in ("tiles", "rows", "counterfactual", "corrections"):
            del file[f"layer1/{part}"]
    assert main([str(poor), "-o", str(tmp_path / "f")]) == 1
    said = capsys.readouterr().err
    assert "tiles: the file has no tiles; record it with: faultline attribute" in said


@pytest.mark.parametrize("name, kind", [("terms", "capture"), ("weights", "checkpoint"), ("warning", "run")])
def test_every_figure_of_probes_is_drawn(recorded, saved, name, kind, tmp_path, capsys):
    assert main([str(recorded / f"{name}.h5"), "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    assert figures(f"probe {kind}")
    for figure in figures(f"probe {kind}"):
        assert any(path.startswith(figure.name) and path.endswith(".png") for path in os.listdir(tmp_path)), figure.name


def test_similarity_in_the_figure_is_that_of_the_probe(program, recorded):
    printed = subprocess.run(
        [program, "probe", "fault.step000080.safetensors", "fault.step000081.safetensors", "--probe", "similarity",
         "--layers", "layer1", "--terms", "12", "--json"], capture_output=True, text=True, check=True, cwd=recorded,
    )
    results = json.loads(printed.stdout)["results"]
    tree = faultline.open(recorded / "terms.h5")
    assert [result["place"] for result in results] == ["layer1"]
    for result in results:
        data = tree[f"{result['place']}/similarity"].to_dataset()
        assert "x" in data  # the trainer's captures have the layer's input
        for head in range(data.sizes["head"]):
            numbers = dict(similarity_numbers(data.isel(head=head)))
            for name in ("mean cosine", "mean |cosine|", "energy in the first", "energy in the first 3", "effective rank"):
                assert numbers[name] == pytest.approx(result["values"][name]["values"][head], rel=1e-9), name
            assert numbers["resultant"] == pytest.approx(result["values"]["resultant with the coefficients"]["values"][head], rel=1e-9)


def test_projections_over_growing_keys(recorded):
    (drawn,) = draw("projections", *(faultline.open(recorded / f"mean{head}.h5") for head in (10, 0, 5)))
    lines = {line.get_label(): line.get_xydata() for line in drawn.axes[0].get_lines()}
    assert set(lines) == {"no projection", "zero_sum_uniform", "zero_sum_weighted", "level of the format"}
    bare, uniform = lines["no projection"], lines["zero_sum_uniform"]
    np.testing.assert_allclose(bare[:, 0], np.sqrt(32) * 2.0 ** np.array([-2, 3, 8]), rtol=0.35)  # of 48 keys: and noise
    # What is planted: the leak grows with the mean, and the projection takes it off.
    assert bare[2, 1] > 10 * bare[0, 1] and bare[2, 1] > 10 * uniform[2, 1] and uniform[2, 1] < 2 * uniform[0, 1]


def test_every_figure_of_a_dissociation_is_drawn(dissociation, saved, tmp_path, capsys):
    assert main([dissociation, "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    for figure in figures("dissociation"):
        assert any(path.startswith(figure.name) and path.endswith(".png") for path in os.listdir(tmp_path)), figure.name


def test_what_a_probe_file_lacks_is_said_with_the_command_that_records_it(recorded, tmp_path, capsys):
    assert main([str(recorded / "scores.h5"), "-o", str(tmp_path)]) == 0  # of the probe saturation alone
    said = capsys.readouterr()
    assert "winner-exponent.pdf" in said.out
    for name in ("similarity", "delta-error", "output-error", "running-error"):
        probe = {"delta-error": "conservation", "running-error": "output-error"}.get(name, name)
        assert f"{name}: the file has no {probe}; record it with: faultline probe CAPTURE --probe {probe} -o FILE.h5" in said.err
    with pytest.raises(faultline.NotRecorded, match="no run of this file diverged"):
        draw("early-warning", healthy(faultline.open(recorded / "warning.h5")))


def healthy(tree):
    tree["runs/early-warning/divergence"].values[:] = np.nan
    return tree


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
