"""Every T5X case of the corpus: verdict, format, step, kind, key paths, shapes, dtypes and hashes, from every path."""

import shutil

import pytest

import wherry
from tests.support.formats import CORPUS, expected
from wherry.errors import WherryError
from wherry.formats.format import Glimpse
from wherry.integrations.formats.t5x import FORMATS
from wherry.storage.stores import locate

EXIT = {"incomplete": 5, "corrupt": 5, "malicious": 6, "not-a-checkpoint": 4, "unsupported": 4}
CASES = [path.parent.name for path in sorted(CORPUS.glob("*t5x*/expected.json"))]
WHOLE = [case for case in CASES if expected(case)["verdict"] == "ok"]
BAD = [case for case in CASES if case not in WHOLE]
pytestmark = pytest.mark.skipif(not CASES, reason="the corpus is not here; set WHERRY_CORPUS to its folder")


@pytest.fixture
def root(request, tmp_path):
    """The case's folder, copied where it needs empty folders that git does not keep."""
    case = request.param
    place = CORPUS / case / "checkpoint"
    if expected(case).get("make_dirs"):
        shutil.copytree(place, tmp_path / "copy")
        place = tmp_path / "copy"
        for name in expected(case)["make_dirs"]:
            (place / name).mkdir(parents=True, exist_ok=True)
    return place, expected(case)


@pytest.mark.parametrize("root", CASES, indirect=True)
def test_verdict(root):
    place, row = root
    found = wherry.detect(place / row["uri"])
    assert found.verdict in {row["verdict"], *row.get("accepted_verdicts", ())}, found.reason
    if row["format"] == "none":
        assert found.format == "none"
        return
    assert found.format == row["format"]
    assert found.evidence
    if found.verdict == "ok":
        assert (found.step, found.kind) == (row["step"], row["kind"])
        assert found.format_version == row["layout_version"]
    else:
        assert found.reason


@pytest.mark.parametrize("root", WHOLE, indirect=True)
def test_contents_from_every_path(root):
    place, row = root
    wanted = {tuple(one["path"]): (one["shape"], one["dtype"], one["sha256"]) for one in row["tensors"]}
    # The run folder and the msgpack file lead there as well.
    others = {row["uri"], *row["alternative_uris"]} if "alternative_uris" in row else {row["uri"]}
    others |= {f"{uri}/checkpoint" for uri in list(others) if (place / uri / "checkpoint").is_file()} | {"."}
    uris = {wherry.detect(place / uri).uri for uri in others}
    assert uris == {str(place / row["uri"])}
    for uri in sorted(others):
        found = wherry.inspect(place / uri, sha256=True)
        seen = {
            path: (list(spec.shape), spec.dtype, found.sha256[path])
            for path, spec in found.manifest.tensors.items()
        }
        assert seen == wanted, uri
        assert found.manifest.step == row["step"]


@pytest.mark.parametrize("root", BAD, indirect=True)
def test_what_is_not_whole_is_not_converted(root, tmp_path):
    place, row = root
    with pytest.raises(WherryError) as caught:
        wherry.convert(place / row["uri"], tmp_path / "never", to="safetensors", lineage=False)
    verdicts = {row["verdict"], *row.get("accepted_verdicts", ())}
    assert caught.value.exit_code in {EXIT[verdict] for verdict in verdicts if verdict in EXIT}
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("root", BAD, indirect=True)
def test_the_reason_names_what_is_wrong(root):
    place, row = root
    names = {
        "defect-t5x-missing-chunk": "target/decoder/layers_1/mlp/wo/kernel",
        "defect-t5x-path-escape": "../../outside/bias",
        "defect-t5x-step-mismatch": "step mismatch: 2000 in the folder's name, 1000 in state/step",
        "defect-t5x-uncommitted-tmp": "never committed",
        "t5x-upstream-tiny-orbax": "shape",
        "t5x-upstream-pinned-ckpt-dir": "not a checkpoint",
    }
    assert names[row["case"]] in wherry.detect(place / row["uri"]).reason


@pytest.mark.parametrize("root", CASES, indirect=True)
def test_discovery(root):
    place, row = root
    skipped = []
    found = list(wherry.discover(place, on_skip=skipped.append))
    fine = {row["verdict"], *row.get("accepted_verdicts", ())} & {"ok", "corrupt", "malicious"} or (
        row["case"] in ("defect-t5x-missing-chunk", "t5x-upstream-tiny-orbax")
    )
    assert [one.format for one in found] == ([row["format"]] if fine else [])
    assert fine or skipped or row["format"] == "none"


def test_other_systems_are_not_taken_for_t5x():
    for case in (path.parent.name for path in sorted(CORPUS.glob("*/expected.json"))):
        row = expected(case)
        place = CORPUS / case / "checkpoint" / row["uri"]
        if row["format"].startswith("t5x") or not place.exists():
            continue
        for path in {place, *(place.glob("*") if place.is_dir() else ())}:
            assert [one.detect(Glimpse(locate(path))) for one in FORMATS] == [None, None], path
