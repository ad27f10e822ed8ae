"""The examples run: each script as a user starts it, each notebook cell by cell; no output is stored in them."""

from __future__ import annotations

import ast
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.registry import model_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run(script, *words, folder):
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, words)], cwd=folder, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_three_scripts_and_two_notebooks():
    assert (len(list(EXAMPLES.glob("*.py"))), len(NOTEBOOKS)) == (3, 2)


def test_a_checkpoint_is_converted_and_verified(tmp_path):
    source = model_folder(tmp_path / "source")
    text = run("convert_and_verify.py", source, tmp_path / "target", folder=tmp_path)
    assert f"ok: 2 tensors are equal to those of {source}" in text
    assert "lossless: True" in text


def test_training_resumes_where_it_was_exported(tmp_path):
    text = run("export_while_training.py", tmp_path / "run", folder=tmp_path)
    assert "resumed at step 200" in text
    weights = ast.literal_eval(text.partition("weights are now ")[2])
    assert all(abs(weight - 1) < 0.1 for weight in weights), "it has learnt the line"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"100", "200", "300"}


def test_checkpoints_are_listed_as_csv(tmp_path):
    for name in ("a", "b"):
        model_folder(tmp_path / "models" / name)
    rows = list(csv.DictReader(io.StringIO(run("list_checkpoints.py", tmp_path / "models", folder=tmp_path))))
    assert [(Path(row["uri"]).name, row["format"], row["parameters"], row["verdict"]) for row in rows] == [
        ("a", "huggingface", "2053", "ok"), ("b", "huggingface", "2053", "ok"),
    ]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    notebook = json.loads(path.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["cells"][0]["cell_type"]) == (4, "markdown")
    names, shown = {}, []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None), "outputs are not stored"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}[{number}]", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"{path.name}[{number}]", "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert any(text.startswith("<div>") for text in shown), "an object shows itself as a table"
