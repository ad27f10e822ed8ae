"""Every case of the corpus: verdict, format, version, step, kind, key paths, shapes, dtypes, hashes, and damage.

`expected.json` of a case is the judge. Where it names things otherwise than we do, or cannot be met from metadata
alone, a table here says so with the reason; everything else must be as it says.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

import wherry
from wherry.core.keypath import render
from wherry.errors import CorruptError, NotFoundError, WherryError
from wherry.formats.registry import formats

ROOT = Path(os.environ.get("WHERRY_CORPUS", Path(__file__).resolve().parents[3] / "shared/corpus"))
WHOLE = ("ok", "ok-but-altered")
EXIT = {"ok": 0, "incomplete": 5, "corrupt": 5, "malicious": 6, "not-a-checkpoint": 4, "unsupported": 4}

# Damage that no structure shows: `detect` reads metadata only and says ok; whoever reads the bytes says corrupt,
# because the container recorded a checksum of them.
SEEN_IN_BYTES = {"defect-dcp-bitflip", "defect-torch-zip-bitflip"}
# The corpus calls some trees of parameters alone `other`, and others like them `params`.
PARAMS_ALONE = {"orbax-0110-nnx-state", "orbax-0523-nnx-state", "orbax-0128-manager-best"}
# The folder's name says 2000, the tree in it 1000: that is the damage.
STEP_OF_NAME = {"defect-t5x-step-mismatch": 2000}
# What the corpus calls a layout and what we call it.
VERSIONS = {
    "GGUF v3, F32 and F16": {"GGUF v3", "GGUF v3, F32 and F16"},
    "DCP + params.json + train_state_<rank>.json + consolidated/": {
        "DCP + params.json + train_state_<rank>.json"
    },
    # the file alone, which is an alternative URI, is a torch archive
    "consolidated.pth + params.json": {"consolidated.pth + params.json", "zip, version 3"},
    "flax.training.checkpoints, one msgpack file": {"one msgpack file"},
    "msgpack with GDA placeholders + zarr2 directories": {"msgpack with GDA placeholders and zarr2 folders"},
    # Penzai's and upstream's cases are named after what was saved, or after the test they are from
    "label -> NamedArray": {"label dict, ocdbt zarr2"},
    "label -> array, axis names in custom_metadata": {"ocdbt zarr2 + axis names"},
    "tuple of ParameterValue, positional": {"parameter tuple, ocdbt zarr2"},
    "whole frozen model": {"frozen model, ocdbt zarr2"},
    "pre-OCDBT aggregate": {"per-array directories zarr2 + msgpack"},
    "v0 composite": {"ocdbt zarr2", "ocdbt zarr2, no _METADATA"},
    "v0 direct": {"ocdbt zarr2", "ocdbt zarr2, no _METADATA"},
}


def cases():
    for path in sorted(ROOT.glob("*/expected.json")):
        yield pytest.param((path.parent, json.loads(path.read_text())), id=path.parent.name)


CASES = list(cases())
SOUND = [case for case in CASES if case.values[0][1]["verdict"] in WHOLE]
DAMAGED = [case for case in CASES if case.values[0][1]["verdict"] not in WHOLE]
pytestmark = pytest.mark.skipif(not CASES, reason="the corpus is not here; set WHERRY_CORPUS to its folder")


@pytest.fixture
def checkpoint(request, tmp_path, monkeypatch):
    """The case's checkpoint, copied where it needs empty folders that git does not keep."""
    folder, expected = request.param
    root = folder / "checkpoint"
    if expected.get("make_dirs"):
        shutil.copytree(root, tmp_path / "copy")
        root = tmp_path / "copy"
        for name in expected["make_dirs"]:
            (root / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return root, expected


def verdicts(expected):
    accepted = {expected["verdict"], *expected.get("accepted_verdicts", ())} - {"ok-but-altered"}
    return accepted | ({"ok"} if expected["verdict"] == "ok-but-altered" else set())


def kinds(expected):
    return {expected["kind"]} | ({"params"} if expected["case"] in PARAMS_ALONE else set())


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_formats_of_the_corpus_are_those_of_the_registry():
    named = {case.values[0][1]["format"] for case in CASES}
    assert named - {"none"} <= set(formats())


@pytest.mark.parametrize("checkpoint", CASES, indirect=True)
def test_detection(checkpoint):
    root, expected = checkpoint
    accepted = verdicts(expected) | ({"ok"} if expected["case"] in SEEN_IN_BYTES else set())
    for uri in (expected["uri"], *expected.get("alternative_uris", ())):
        found = wherry.detect(root / uri)
        assert found.verdict in accepted, found.reason
        assert found.format in {expected["format"], *expected.get("format_accepts", ())}
        assert found.evidence or found.format == "none"
        if found.verdict != "ok":
            assert found.reason
            known = {None, expected["step"], STEP_OF_NAME.get(expected["case"])}
            assert found.step in known  # the file that says it may be the one that is missing
            continue
        assert found.kind in kinds(expected)
        assert found.format_version in VERSIONS.get(expected["layout_version"], {expected["layout_version"]})
        if uri == expected["uri"] or found.step is not None:
            assert found.step == expected["step"]


@pytest.mark.parametrize("checkpoint", SOUND, indirect=True)
def test_contents(checkpoint):
    root, expected = checkpoint
    for uri in (expected["uri"], *expected.get("alternative_uris", ())):
        found = wherry.inspect(root / uri, sha256=True)
        seen = {
            path: (list(spec.shape), spec.dtype, found.sha256[path])
            for path, spec in found.manifest.tensors.items()
        }
        wanted = {
            tuple(row["path"]): (row["shape"], row["dtype"], row["sha256"])
            for row in expected["tensors"]
            if row["dtype"] != "string"  # a text is no tensor: see the next test
        }
        assert seen == wanted
        assert found.manifest.kind in kinds(expected)
        if uri == expected["uri"]:
            assert found.manifest.step == expected["step"]


TEXTS = [
    case
    for case in SOUND
    if case.values[0][1].get("string_leaves")
    or any(row["dtype"] == "string" for row in case.values[0][1]["tensors"])
]


@pytest.mark.parametrize("checkpoint", TEXTS, indirect=True)
def test_texts_become_values(checkpoint):
    """Texts are values of the manifest."""
    root, expected = checkpoint
    found = wherry.inspect(root / expected["uri"])
    texts = {tuple(row["path"]) for row in expected["tensors"] if row["dtype"] == "string"}
    texts |= set(map(tuple, expected.get("string_leaves", ())))
    assert texts <= set(found.manifest.values)


@pytest.mark.parametrize("checkpoint", DAMAGED, indirect=True)
def test_damage_ends_a_conversion_and_leaves_nothing(checkpoint, tmp_path):
    root, expected = checkpoint
    before = listing(root)
    with pytest.raises(WherryError) as caught:
        wherry.convert(root / expected["uri"], "never", to="torch-zip", lineage=False)
    assert caught.value.exit_code in {EXIT[verdict] for verdict in verdicts(expected)}
    assert caught.value.what
    assert listing(tmp_path / "work") == []
    assert listing(root) == before
    for marker in expected.get("must_not_create", ()):
        assert not list(tmp_path.rglob(marker))


@pytest.mark.parametrize("checkpoint", DAMAGED, indirect=True)
def test_damage_is_the_verdict_of_verify(checkpoint):
    root, expected = checkpoint
    try:
        verdict = wherry.verify(root / expected["uri"], level="digest").verdict
    except NotFoundError:
        pytest.fail("the damage was not seen")
    except WherryError as error:
        verdict = error.verdict
    assert verdict in verdicts(expected)


# Where single tensors are damaged they are named; where a whole file cannot be opened that is all that can be said.
NAMED = {
    *SEEN_IN_BYTES,
    "defect-dcp-missing-distcp",
    "defect-maxtext-gpt3-ocdbt-data-file-missing",
    "defect-maxtext-one-of-4-hosts",
    "defect-orbax-zarr2-missing-chunk",
    "defect-paxml-missing-chunk",
    "defect-paxml-one-of-4-hosts",
    "defect-t5x-missing-chunk",
    "defect-t5x-path-escape",
}


@pytest.mark.parametrize("checkpoint", [case for case in DAMAGED if case.id in NAMED], indirect=True)
def test_the_damaged_tensors_are_named(checkpoint):
    root, expected = checkpoint
    level = "digest" if expected["case"] in SEEN_IN_BYTES else "present"
    failed = {one.path for one in wherry.verify(root / expected["uri"], level=level).failed}
    tensors = {render(tuple(row["path"])): row.get("damaged", False) for row in expected["tensors"]}
    # what else failed are objects that lie in the same file and are no tensors
    assert failed & set(tensors) == {name for name, damaged in tensors.items() if damaged} != set()


@pytest.mark.parametrize("case", ["dcp-torch-2-13-0", "torch-train-ckpt"])
def test_what_only_its_container_has_checksums_of_is_read(case):
    """Nothing else was ever recorded of these; every byte is compared with the archives' own CRCs."""
    expected = json.loads((ROOT / case / "expected.json").read_text())
    found = wherry.verify(ROOT / case / "checkpoint" / expected["uri"], level="digest")
    assert (found.verdict, found.checked) == ("read", len(expected["tensors"]))
    assert found.nbytes


@pytest.mark.parametrize("case", sorted(SEEN_IN_BYTES))
def test_nobody_reads_over_a_flipped_bit(case):
    expected = json.loads((ROOT / case / "expected.json").read_text())
    for how in ({"sha256": True}, {"digest": True}):
        with pytest.raises(CorruptError, match="CRC"):
            wherry.inspect(ROOT / case / "checkpoint" / expected["uri"], **how)


DISCOVERY = [case for case in CASES if "discovery" in case.values[0][1]]


@pytest.mark.parametrize("checkpoint", DISCOVERY, indirect=True)
def test_discovery(checkpoint):
    root, expected = checkpoint
    run = root / expected["discovery"]["uri"]
    skipped = []
    found = list(wherry.discover(run, on_skip=skipped.append))
    assert sorted(one.step for one in found if one.step is not None) == expected["discovery"]["steps"]
    assert all(one.reason for one in skipped)
    latest = wherry.detect(run)
    assert latest.step == expected["discovery"]["latest"]
    assert latest.verdict != "ok" or any("newest complete" in one.seen for one in latest.evidence)
