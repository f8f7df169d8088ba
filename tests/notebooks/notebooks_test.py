# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom on files that the program recorded here."""

import os

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from conftest import ROOT  # noqa: E402


def run(name, monkeypatch, **files):
    for variable, path in files.items():
        monkeypatch.setenv(variable, path)
    folder = os.path.join(ROOT, "notebooks")
    monkeypatch.setenv("PYTHONPATH", folder)
    notebook = nbformat.read(os.path.join(folder, name), 4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    pictures = [out for cell in notebook.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    return len(pictures)


def test_attribution(attribution, monkeypatch):
    assert run("attribution.ipynb", monkeypatch, FAULTLINE_ATTRIBUTION=attribution) >= 6


def test_training(runs, monkeypatch):
    assert run("training.ipynb", monkeypatch, FAULTLINE_CONTROL=runs[0], FAULTLINE_FAULT=runs[1]) >= 6


def test_probes(recorded, monkeypatch):
    assert run("probes.ipynb", monkeypatch, FAULTLINE_FOLDER=str(recorded)) == 9


def test_backward(recorded, monkeypatch):
    assert run("backward.ipynb", monkeypatch, FAULTLINE_FOLDER=str(recorded)) == 4


def test_dissociation(dissociation, monkeypatch):
    assert run("dissociation.ipynb", monkeypatch, FAULTLINE_DISSOCIATION=dissociation) >= 6
