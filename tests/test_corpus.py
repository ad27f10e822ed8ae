"""Every case of the corpus that this version reads: verdict, key paths, shapes, dtypes and hashes."""

import json
import os
from pathlib import Path

import pytest

import wherry
from wherry.errors import WherryError

ROOT = Path(os.environ.get("WHERRY_CORPUS", Path(__file__).resolve().parents[2] / "shared/corpus"))
READ = {"safetensors", "huggingface", "orbax", "maxtext", "penzai"}
# Orbax before it wrote `_METADATA`, and aggregated files: their tree is in msgpack, which a later issue reads.
LATER = ("no _METADATA", "aggregate", "pre-OCDBT")
EXIT = {"ok": 0, "incomplete": 5, "corrupt": 5, "malicious": 6, "not-a-checkpoint": 4, "unsupported": 4}


def cases():
    for folder in sorted(ROOT.glob("*/expected.json")):
        expected = json.loads(folder.read_text())
        if expected["format"] in READ and not any(word in expected["layout_version"] for word in LATER):
            yield pytest.param((folder.parent, expected), id=folder.parent.name)


CASES = list(cases())
pytestmark = pytest.mark.skipif(not CASES, reason="the corpus is not here; set WHERRY_CORPUS to its folder")


@pytest.fixture
def checkpoint(request, tmp_path):
    """The case's checkpoint, copied where it needs empty folders that git does not keep."""
    folder, expected = request.param
    root = folder / "checkpoint"
    if expected.get("make_dirs"):
        import shutil

        shutil.copytree(root, tmp_path / "copy")
        root = tmp_path / "copy"
        for name in expected["make_dirs"]:
            (root / name).mkdir(parents=True, exist_ok=True)
    return root, expected


@pytest.mark.parametrize("checkpoint", CASES, indirect=True)
def test_verdict(checkpoint):
    root, expected = checkpoint
    found = wherry.detect(root / expected["uri"])
    verdict = {"ok-but-altered": "ok"}.get(expected["verdict"], expected["verdict"])
    accepted = {verdict, *expected.get("accepted_verdicts", ())}
    assert found.verdict in accepted, found.reason
    assert found.format in {expected["format"], "orbax", *expected.get("format_accepts", ())} | (
        {"none"} if verdict == "malicious" else set()
    )
    assert found.evidence or found.verdict != "ok"
    if found.verdict != "ok":
        assert found.reason


@pytest.mark.parametrize("checkpoint", CASES, indirect=True)
def test_contents(checkpoint):
    root, expected = checkpoint
    if expected["verdict"] not in ("ok", "ok-but-altered"):
        with pytest.raises(WherryError) as caught:
            wherry.convert(root / expected["uri"], root / "never", to="hf", lineage=False)
        allowed = {EXIT[verdict] for verdict in (expected["verdict"], *expected.get("accepted_verdicts", ()))}
        assert caught.value.exit_code in allowed
        assert not (root / "never").exists()
        return
    for uri in (expected["uri"], *expected.get("alternative_uris", ())):
        found = wherry.inspect(root / uri, sha256=True)
        seen = {
            path: (list(spec.shape), spec.dtype, found.sha256[path])
            for path, spec in found.manifest.tensors.items()
        }
        wanted = {
            tuple(row["path"]): (row["shape"], row["dtype"], row["sha256"]) for row in expected["tensors"]
        }
        assert seen == wanted
        assert set(map(tuple, expected.get("string_leaves", ()))) <= set(found.manifest.values)


DISCOVERY = [case for case in CASES if "discovery" in case.values[0][1]]


@pytest.mark.parametrize("checkpoint", DISCOVERY, indirect=True)
def test_discovery(checkpoint):
    root, expected = checkpoint
    run = root / expected["discovery"]["uri"]
    skipped = []
    found = list(wherry.discover(run, on_skip=skipped.append))
    assert sorted(one.step for one in found if one.step is not None) == expected["discovery"]["steps"]
    assert wherry.detect(run).step == expected["discovery"]["latest"]
