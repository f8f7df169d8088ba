# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
import subprocess

import h5py
import matplotlib.colors
import matplotlib.figure
import matplotlib.text
import numpy as np
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg

import faultline
from faultline.figures import draw, figures
from faultline.figures.__main__ import main
from faultline.figures.probes import similarity_numbers
from faultline.figures.style import colours_of, distinct


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
    assert f"{runs[0]}: injected: the file has no steps/injected_rms" in said and "--inject" in said
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
    assert main([changed, "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert f"{changed}: site-shares: cannot be drawn (" in said.err and "expected a file as faultline writes it" in said.err
    assert said.out
    shutil.copy(runs[0], changed)
    with h5py.File(changed, "a") as file:
        del file["steps/step"]
    assert main([changed, "-o", str(tmp_path / "out")]) == 2
    assert "steps/step: is missing" in capsys.readouterr().err


def test_files_of_one_name_are_told_apart(runs, tmp_path, capsys):
    for folder, run in zip(("a", "b"), runs):
        (tmp_path / folder).mkdir()
        shutil.copy(run, tmp_path / folder / "run.h5")
    paths = [str(tmp_path / folder / "run.h5") for folder in "ab"]
    assert main([*paths, "-o", str(tmp_path / "out"), "--only", "saturation"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / run / "saturation.pdf") for run in ("run", "run#2")]
    assert not [name for _, _, names in os.walk(tmp_path / "out") for name in names if "partial" in name]


def test_a_layer_may_have_any_name(attribution, tmp_path, capsys):
    path = str(tmp_path / "a.h5")
    shutil.copy(attribution, path)
    with h5py.File(path, "a") as file:
        file.move("layer1", "model/layer 1")
    assert main([path, "-o", str(tmp_path / "out"), "--only", "rows"]) == 0
    assert os.listdir(tmp_path / "out") and (tmp_path / "out" / "rows-model-layer-1.png").exists()


@pytest.mark.parametrize("output", ["file", "file/below", "/proc/nothing"])
def test_an_output_that_is_no_folder_is_a_sentence(runs, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    assert main([runs[0], "-o", output, "--only", "saturation"]) == 2
    assert capsys.readouterr().err.startswith(f"{output}: cannot be written (")
    assert (tmp_path / "file").read_text() == "kept"


def conservation(sources, errors):
    """A group as faultline probe writes it: one head, one sequence."""
    data = np.array(errors, float)[:, None, None, :]
    return xr.Dataset({"delta_error": (("source", "head", "sequence", "row"), data)}, {"source": sources, "head": [0]})


def test_delta_errors_of_captures_are_joined_by_layer_and_by_source():
    one = xr.DataTree.from_dict({"/": xr.Dataset(attrs={"inputs": ["c"]}), "/enc/l0/conservation": conservation(["exact", "fa2"], [[0, 0], [1, 1]]),
                                 "/dec/l0/conservation": conservation(["exact", "fa2"], [[0, 0], [2, 2]])})
    drawn = draw("delta-error", one)
    assert [d.axes[0].get_lines()[0].get_ydata().tolist() for d in drawn] == [[1, 2], [2, 4]]
    three = {f"/c{i}/l0/conservation": conservation(["exact", "fa2", "flash"], [[0, 0], [1, 1], [3, 3]]) for i in (0, 2)}
    three["/c1/l0/conservation"] = conservation(["exact", "fa2", "late"], [[0, 0], [1, np.nan], [5, 5]])
    order = ["/c0/l0/conservation", "/c1/l0/conservation", "/c2/l0/conservation"]
    tree = xr.DataTree.from_dict({"/": xr.Dataset(attrs={"inputs": ["c0", "c1", "c2"]}), **{name: three[name] for name in order}})
    (drawn,) = draw("delta-error", tree)
    lines = {line.get_label(): line.get_ydata() for line in drawn.axes[0].get_lines()}
    nan = np.nan
    np.testing.assert_array_equal(lines["flash"], [3, 6, nan, nan, 9, 12])
    np.testing.assert_array_equal(lines["late"], [nan, nan, 5, 10, nan, nan])
    np.testing.assert_array_equal(lines["fa2"], [1, 2, 3, nan, nan, nan])  # a NaN stays in all sums behind it
    assert "not finite from there on (fa2)" in drawn._suptitle.get_text()


def test_many_lines_have_a_colour_each():
    for count in (1, 7, 8, 12, 48):
        assert len(set(colours_of(count))) == count
    assert len(set(distinct(24))) == 24 and not {colour for colour, _ in distinct(24)} & {"#000000"}


def test_tiles_are_those_of_the_largest_share():
    tiles = {f"/l/tiles/s{i}": xr.Dataset({name: (("head", "q", "k"), np.full((1, 2, 2), value)) for name, value in
                                           (("rms", 10.0**-i), ("value_rms", 1.0), ("signed_mean", 0.0))}) for i in range(6)}
    effects = xr.Dataset({"share": (("site", "output"), [[0.0], [0.0], [0.1], [-0.4], [0.2], [0.3]])},
                         {"site": [f"s{i}" for i in range(6)], "output": ["dq"]})
    tree = xr.DataTree.from_dict({"/": xr.Dataset(), "/l/outputs": xr.Dataset(), "/l/counterfactual": effects, **tiles})
    (drawn,) = draw("tiles", tree)
    titles = [axes.get_title() for axes in drawn.axes if axes.get_title()]
    assert titles == ["s3\n-40% of dq", "s5\n30% of dq", "s4\n20% of dq", "s2\n10% of dq"]


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


def test_the_marks_of_seeds_are_the_outcomes(dissociation):
    tree = faultline.open(dissociation)
    outcome = tree["outcome"].to_dataset()
    (drawn,) = draw("seeds", tree)
    for column, source in enumerate(("ds:fixed:0.3", "delta:multiplicative:0.5")):
        for row, quantity in enumerate(("sigma_ratio", "loss_ratio")):
            axis = drawn.axes[2 * row + column]
            (marks,) = [line for line in axis.get_lines() if line.get_label() == "seed 0"]
            found = outcome[quantity].sel(source=source, seed=0).values
            np.testing.assert_array_equal(marks.get_ydata(), found[np.isfinite(found)])
    low, high = drawn.axes[2].get_ylim()
    assert sum(low <= tick <= high for tick in drawn.axes[2].get_yticks()) >= 2  # of losses 1.0 to 1.4 times the control's, say


def outcomes(ratios, interventions):
    """A dissociation of one seed as far as the matrix reads it: two sources, one runaway where the ratio is above 2."""
    ratios = np.array(ratios, float)[..., None]
    dims = ("source", "intervention", "seed")
    verdict = np.where(np.isfinite(ratios), ratios > 2, np.nan)
    data = {"sigma_ratio": (dims, ratios), "runaway": (dims, verdict), "loss_failed": (dims, 0 * verdict)}
    outcome = xr.Dataset(data, {"source": ["none", "delta:fixed:1", "ds:fixed:1"], "intervention": interventions, "seed": [0]})
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs={"sigma_ratio": 2.0}), "/outcome": outcome})


def test_colours_of_a_matrix_are_the_same_ratios_in_every_file():
    healthy = outcomes([[1, 1], [1.07, 0.9], [0.8, 1.0]], ["none", "project"])
    failed = outcomes([[1] * 5, [7.9, 1.07, 2, 90, 0.1], [3, 1, 1, 1, np.nan]], ["none", "project", "qk_norm", "guard", "repair"])
    images = []
    for tree in (healthy, failed):
        (drawn,) = draw("matrix", tree)
        (image,) = drawn.axes[0].get_images()
        assert (image.norm.vmin, image.norm.vmax) == (0.2, 20) and image.norm(2.0) == pytest.approx(0.5)
        assert "above the limit, 2" in drawn.axes[1].get_ylabel()
        assert ("not run" in drawn.axes[1].get_ylabel()) == (tree is failed)
        assert {2, 20} <= set(drawn.axes[1].get_yticks())
        images.append(image)
        for text in drawn.axes[0].texts:  # contrast by WCAG 2.1: 4.5 and more for text of this size
            column, row = text.get_position()
            value = image.get_array()[row, column]
            assert bool(text.get_text()) == bool(np.isfinite(value))
            if not text.get_text():
                continue
            ground, ink = (luminance(colour) for colour in (image.cmap(image.norm(value)), text.get_color()))
            assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 4.5, text.get_text()
    colour = [image.cmap(image.norm(1.07)) for image in images]
    assert colour[0] == colour[1] and colour[0][2] > colour[0][0]  # blue: below the limit
    red = images[1].cmap(images[1].norm(7.9))
    assert red[0] > red[2]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_no_line_of_the_channel_hides_another_and_each_has_its_control():
    runs = {("none", "none"): 1.0, ("none", "qk_norm"): 1.5, ("ds:fixed:1", "none"): 4, ("ds:fixed:1", "qk_norm"): 1.6, ("ds:fixed:1", "guard"): 4}
    sigma = np.array([np.geomspace(0.5, end, 6) for end in runs.values()])
    names = {"source": ("run", [s for s, _ in runs]), "intervention": ("run", [i for _, i in runs]), "seed": ("run", [0] * 5)}
    tree = xr.DataTree.from_dict({"/series": xr.Dataset({"sigma_q": (("run", "step"), sigma), **names}, {"step": range(6)})})
    (drawn,) = draw("channel", tree)
    lines = drawn.axes[0].get_lines()
    by_name = {line.get_label(): line for line in lines}
    below, above = by_name["none"], by_name["guard"]
    assert lines.index(below) < lines.index(above) and below.get_linewidth() > 2 * above.get_linewidth()
    assert by_name["qk_norm"].get_linewidth() == above.get_linewidth()
    (control,) = [line for line in lines if line.get_ydata()[-1] == 1.5]
    assert control.get_color() == by_name["qk_norm"].get_color() and control.get_linestyle() != by_name["qk_norm"].get_linestyle()
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["no fault", "none", "qk_norm", "guard", "no fault, with the intervention"]


def test_each_panel_of_a_fault_has_a_legend_of_its_own(runs):
    (drawn,) = draw("injected", faultline.open(runs[1]))
    assert not drawn.legends
    names = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn.axes]
    assert names == [["rms", "|mean|", "rms asked for"], ["layer 0", "layer 1"]]
    wide, _, asked = drawn.axes[0].get_lines()  # a multiplicative fault has the size that it was asked for: one on the other
    assert asked.get_zorder() >= wide.get_zorder() and wide.get_linewidth() > asked.get_linewidth()
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    renderer = canvas.get_renderer()
    for axes in drawn.axes:
        over = axes.get_legend().get_window_extent(renderer)
        assert not any(over.overlaps(other.yaxis.label.get_window_extent(renderer)) for other in drawn.axes)


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
