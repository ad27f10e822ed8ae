"""The demo: the story runs to its end, what it shows is true, and it can run again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.demo import first_story, tell
from tests.support.infra import load
from wherry.core.digest import LEAF
from wherry.errors import MismatchError
from wherry.nightly.routes import load_config
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar

TENSOR = "embeddings.word_embeddings.weight"
CHAPTERS = (
    "1. Two training systems", "2. The routes", "3. The nightly flow", "4. Promotion reads", "5. Two more teams",
    "6. A bit of the champion flips", "7. The audit flow", "8. Promotion refuses", "9. Where did it come from",
    "10. What is affected", "11. A copy of a checkpoint arrives",
)  # fmt: skip


@pytest.fixture
def site(monkeypatch):
    return load("demo_site", monkeypatch)


@pytest.fixture
def small(tmp_path, site, monkeypatch):
    """A package with a small model in place of the real one: the damaged tensor has its nine leaves all the same."""
    package = tmp_path / "package"
    package.mkdir()
    tensors = {TENSOR: np.arange(9 * LEAF // 4, dtype="f4"), "embeddings.LayerNorm.bias": np.ones(384, "f4")}
    save_file(tensors, package / "model.safetensors", metadata={"format": "pt"})
    (package / "config.json").write_text("{}")
    monkeypatch.setattr(site, "packaged_model", lambda: package)
    return package


def test_the_runs_lie_there_as_training_systems_leave_them(tmp_path, site, small):
    folder = tmp_path / "demo"
    site.prepare(folder)
    found = {one.uri: one for one in wherry.discover(folder / "runs")}
    assert sorted((one.format, one.step) for one in found.values() if one.step) == [
        ("orbax", 1000),
        ("orbax", 2000),
    ]
    assert sorted(one.format for one in found.values()) == ["huggingface", "orbax", "orbax"]
    assert all(read_sidecar(locate(uri)) is None for uri in found), "nothing says that wherry wrote them"
    bias = [
        wherry.open(folder / "runs" / "orbax" / site.TUNED / str(step)).read(("embeddings.LayerNorm.bias",))[
            0
        ]
        for step in site.STEPS
    ]
    assert len({1.0, *map(float, bias)}) == 3, "each step has values of its own"
    assert not list(folder.glob("draft*"))


def test_preparing_again_changes_nothing(tmp_path, site, small):
    folder = tmp_path / "demo"
    site.prepare(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    site.prepare(folder)
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")} == before


def test_the_routes_file_is_valid(tmp_path, site):
    (tmp_path / "wherry.toml").write_text(site.routes_file())
    routes = {route.name: route for route in load_config(tmp_path / "wherry.toml").routes}
    assert [routes["pretrained"].model, routes["tuned"].model] == [site.JAX_MODEL, site.SERVING_MODEL]


def test_a_bit_flips_without_a_trace_and_is_put_back(tmp_path, site, small):
    folder = tmp_path / "demo"
    folder.mkdir()
    made = wherry.convert(small, tmp_path / "made", to="orbax").target.uri
    before = wherry.verify(made, level="digest")
    done = site.flip(folder, made)
    assert before.ok
    assert wherry.verify(made, level="present").ok, "metadata says nothing"
    [failed] = wherry.verify(made, level="digest").failed
    assert (failed.path, failed.leaf) == (TENSOR, site.LEAF)
    assert (done.before ^ done.after).bit_count() == 1
    site.mend(folder)
    assert wherry.verify(made, level="digest").ok
    site.mend(folder)


def test_a_copy_is_cut_off_and_removed(tmp_path, site, small):
    folder = tmp_path / "demo"
    site.prepare(folder)
    assert wherry.detect(site.cut_off(folder)).verdict in ("corrupt", "incomplete")
    site.prepare(folder)
    assert site.CUT not in {Path(one.uri).name for one in wherry.discover(folder / "runs")}


def test_a_bit_flips_in_a_store_too(tmp_path, site, small):
    folder, made = tmp_path / "demo", "memory://demo/made.safetensors"
    folder.mkdir()
    wherry.convert(small, made, to="safetensors")
    done = site.flip(folder, made)
    assert done.file == made
    [failed] = wherry.verify(made, level="digest").failed
    assert (failed.path, failed.leaf) == (TENSOR, site.LEAF)
    site.mend(folder)
    assert not wherry.verify(made, level="digest").ok, "what a store has replaced stays replaced"


def test_training_is_not_the_packaged_model(tmp_path, site, small):
    file = tmp_path / "copy.safetensors"
    file.write_bytes((small / "model.safetensors").read_bytes())
    site._nudge(file, 2.0)
    assert (load_file(file)["embeddings.LayerNorm.bias"] == 2).all()


@pytest.mark.server
def test_the_story_runs_to_its_end():
    folder, text, code = first_story()
    assert code == 0, text
    places = [text.index(chapter) for chapter in CHAPTERS]
    assert places == sorted(places)
    assert "2 converted, 1 not taken" in text
    assert "minilm-jax version 1 is champion" in text
    assert re.search(rf"tensor +{re.escape(TENSOR)}, leaf 7", text)
    assert re.search(r"affected +dcp at", text)
    assert re.search(r"affected +flax-msgpack at", text)
    assert "valid offline" in text
    assert re.search(r"refused +the checkpoint differs from the registered one", text)
    loads, refused = (
        text.count('mlflow.pyfunc.load_model("models:/minilm-jax@champion")'),
        text.partition("8. Promo")[2],
    )
    assert loads == 2
    assert re.search(r"a tensor begins with +-?0\.\d{4}, ", text)
    assert re.search(r"refused +the copy differs from the record", refused)
    bad = text.partition("at the webhook")[2]
    assert re.search(r"warning: 0 converted, 1 damaged: \S+/minilm-copied: ", bad)
    assert re.search(r"in the UI +0 converted, 1 damaged: \S+/minilm-copied", text)
    assert "Traceback" not in text
    assert f"{folder / 'lineage.html'}" in text
    assert all(words in text for words in ("prefect server start", "mlflow server"))


@pytest.mark.server
def test_what_the_story_leaves_is_true(monkeypatch):
    folder = first_story().folder
    monkeypatch.setenv("WHERRY_HOME", str(folder / "wherry"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    champion = folder / "models" / "minilm-l6-v2" / "orbax"
    with pytest.raises(MismatchError):
        wherry.promote("models:/minilm-jax@champion", alias="production")
    answer = wherry.impact(str(champion))
    assert {Path(uri).name for uri in answer.places} == {"minilm-torch", "minilm-flax.msgpack"}
    assert all(name in " ".join(answer.versions) for name in ("minilm-jax", "minilm-torch", "minilm-flax"))
    assert "altered" in (folder / "lineage.html").read_text()
    flipped = json.loads((folder / "flipped.json").read_text())
    assert Path(flipped["file"]).is_relative_to(champion)


@pytest.mark.server
@pytest.mark.parametrize("protocol", [pytest.param(name, marks=pytest.mark.slow) for name in ("gs", "s3")])
def test_the_story_runs_in_a_bucket(tmp_path, protocol):
    """Nothing of the storage remains, so a second story in the same folder begins anew."""
    folder, text, code = tell(tmp_path / "demo", protocol)
    assert code == 0, text
    places = [text.index(chapter) for chapter in CHAPTERS]
    assert places == sorted(places)
    models = f"{protocol}://wherry-demo/models"
    assert f'uri = "{models}/{{run}}/{{format}}"' in text
    for name in ("minilm-l6-v2/orbax", "minilm-torch", "minilm-flax.msgpack"):
        assert f"location            {models}/{name}" in text
    assert not (folder / "models").exists()
    assert re.search(rf"tensor +{re.escape(TENSOR)}, leaf 7", text)
    assert re.search(rf"affected +dcp at {models}", text)
    assert re.search(r"traces +its size is unchanged", text)
    assert re.search(r"refused +the checkpoint differs from the registered one", text)
    assert re.search(r"refused +the copy differs from the record", text)
    assert "Traceback" not in text
    assert "routes check" not in text, "of a storage that is gone"


@pytest.mark.slow
@pytest.mark.server
def test_a_second_run_of_the_story_does_nothing_twice():
    folder, text, code = tell(first_story().folder)
    assert code == 0, text
    assert "2 done, 1 not taken" in text
    assert "it was set already" in text
    assert "version 2" not in text
    assert re.search(rf"tensor +{re.escape(TENSOR)}, leaf 7", text)
    assert len(list((folder / "evidence").glob("*.zip"))) == 2


def test_an_environment_that_was_interrupted_is_made_anew(tmp_path, monkeypatch):
    environment = load("environment", monkeypatch)
    monkeypatch.setenv("WHERRY_VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("WHERRY_PYTHON", sys.executable)
    ran = []

    def interrupted(command):
        ran.append(command)
        (tmp_path / "venv" / "bin").mkdir(exist_ok=True)
        (tmp_path / "venv" / "bin" / "python").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_must", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            environment.ensure(environment.DEMO)
    assert len(ran) == 2, "what is half made is neither used nor taken for somebody else's"
