"""Legacy T5X checkpoints of every form, made with flax and tensorstore, and what is wrong with others."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
from flax import serialization

import wherry
from tests.support import t5x
from tests.support.corpus import CORPUS, expected, needs_corpus
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError
from wherry.store.location import MOST_CONFIG
from wherry.testing.readers import check_reader


def tensors(uri, **options) -> dict[str, np.ndarray]:
    with wherry.open(uri, **options) as found:
        assert found.detection.format == "t5x-legacy"
        return {"/".join(path): found.read(path) for path in found.manifest.tensors}


FORMS = {
    "gzip": {},
    "zstd": {"compressor": {"id": "zstd", "level": 1}},
    "raw": {"compressor": {}},
    "old path": {"old_path": True},
    "dtype of zarr": {"zarr_dtype": True},
    "sharded": {"chunks": {"target/encoder/mlp/wi/kernel": (6, 4), "target/decoder/norm/scale": (5,)}},
    "all in the file": {"is_stored": lambda _name: False},
    "all outside": {"is_stored": lambda _name: True},
    "placeholders": {"placeholders": True},
    "orbax trial": {"placeholders": True, "prefix": "optimizer."},
    "lists as maps": {"to_bytes": True},
    "lists as maps, all outside": {"to_bytes": True, "is_stored": lambda _name: True},
    "no version": {"version": None},
    "version 2": {"version": 2},
    "newer version": {"version": 4},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(tmp_path, form):
    folder = t5x.save(tmp_path / "run" / "checkpoint_7", t5x.arrays(), **FORMS[form])
    for uri in (folder, folder / "checkpoint", tmp_path / "run"):
        t5x.assert_same(tensors(uri), t5x.arrays())
    found = wherry.detect(folder / "checkpoint")
    assert (found.uri, found.verdict, found.step, found.kind) == (str(folder), "ok", 7, "train-state")
    with wherry.open(folder) as opened:
        check_reader(wherry.formats.format.Opened(opened.detection, opened.manifest, opened.reader))


@pytest.mark.parametrize(
    "form", ["gzip", "raw", "old path", "dtype of zarr", "sharded", "lists as maps, all outside"]
)
def test_lost_dot_files_are_rebuilt_from_the_specs(tmp_path, form):
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), **FORMS[form])
    removed = [file.unlink() for file in folder.rglob(".zarray")]
    assert removed
    t5x.assert_same(tensors(folder), t5x.arrays())
    found = wherry.detect(folder)
    assert found.format_version == "t5x v3, zarr2 directories without .zarray"


def test_without_dot_files_placeholders_say_too_little(tmp_path):
    folder = t5x.save(
        tmp_path / "checkpoint_7", t5x.arrays(), placeholders=True, is_stored=lambda _name: True
    )
    for file in folder.rglob(".zarray"):
        file.unlink()
    with pytest.raises(IncompleteError, match="shape or dtype"):
        wherry.open(folder)


def test_a_file_alone_under_any_name(tmp_path):
    folder = t5x.save(tmp_path / "made", t5x.arrays(), is_stored=lambda _name: False)
    for name in ("checkpoint_7", "model.t5x", "checkpoint"):
        shutil.copy(folder / "checkpoint", tmp_path / name)
        t5x.assert_same(tensors(tmp_path / name), t5x.arrays())
    sorted_keys = serialization.msgpack_serialize(
        serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    )
    assert sorted_keys[1:10].endswith(b"optimizer"[:8])
    (tmp_path / "sorted").write_bytes(sorted_keys)
    t5x.assert_same(tensors(tmp_path / "sorted"), t5x.arrays())


def test_a_large_file_with_sorted_keys(tmp_path):
    leaves = t5x.arrays() | {f"target/layers_{n}/w": np.full((30, 30), n, np.float32) for n in range(20)}
    content = {"optimizer": {}, "version": 3}
    for name, array in leaves.items():
        node = content["optimizer"]
        *parts, last = name.split("/")
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = array
    (tmp_path / "any").write_bytes(serialization.msgpack_serialize(content, in_place=True))
    t5x.assert_same(tensors(tmp_path / "any"), leaves)


def test_version_2_hides_bfloat16_in_uint16(tmp_path):
    wanted = t5x.arrays() | {
        "state/param_states/w/m": np.arange(6).astype(ml_dtypes.bfloat16),
        "state/param_states/w/v": np.arange(3).astype(np.float32),
        "flax_mutables/counts": np.arange(5, dtype=np.uint16),
    }
    hidden = {
        name: array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
        for name, array in wanted.items()
    }
    folder = t5x.save(tmp_path / "checkpoint_7", hidden, version=2)
    t5x.assert_same(tensors(folder), wanted)
    found = wherry.detect(folder)
    assert any("bfloat16 stored as uint16" in one.seen for one in found.evidence)
    with wherry.open(folder) as opened:
        check_reader(wherry.formats.format.Opened(opened.detection, opened.manifest, opened.reader))
    kept = t5x.save(tmp_path / "three", hidden, version=3)
    t5x.assert_same(tensors(kept), hidden)
    assert any("tensors stay uint16" in one.seen for one in wherry.detect(kept).evidence)


def test_a_train_state_that_was_saved_whole(tmp_path):
    leaves = {f"_optimizer/{name}": array for name, array in t5x.arrays().items()}
    extra = {"params_axes": None, "flax_mutables": None, "_optimizer/empty": {}}
    t5x.save(
        tmp_path / "7",
        leaves,
        version=None,
        placeholders=True,
        extra=extra,
        is_stored=lambda name: "wi" in name,
    )
    with wherry.open(tmp_path / "7") as found:
        assert (found.detection.format, found.manifest.step) == ("t5x-orbax", 7)
        assert found.manifest.kind == "train-state"
        t5x.assert_same({"/".join(path): found.read(path) for path in found.manifest.tensors}, leaves)
        assert found.manifest.empties[("params_axes",)] == "none"


@pytest.mark.parametrize("version", [0, 1])
def test_versions_before_2_are_refused_in_t5x_words(tmp_path, version):
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), version=version)
    found = wherry.detect(folder)
    words = f"Checkpoint versions earlier than 2 are not supported. Got version: {version}"
    assert (found.format, found.verdict, found.reason) == ("t5x-legacy", "unsupported", words)
    with pytest.raises(UnsupportedError, match="earlier than 2"):
        wherry.open(folder)


def test_other_leaves(tmp_path):
    extra = {"state/param_states/untouched": None, "flax_mutables/empty": {}, "state/note": "a text"}
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), extra=extra)
    with wherry.open(folder) as found:
        assert found.manifest.empties == {
            ("state", "param_states", "untouched"): "none", ("flax_mutables", "empty"): "dict",
        }  # fmt: skip
        assert found.manifest.values == {("state", "note"): "a text"}


def test_the_optimizer_state_may_stay_behind(tmp_path):
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays())
    for child in folder.glob("state.*"):
        shutil.rmtree(child)
    found = wherry.detect(folder)
    assert (found.verdict, found.step) == ("incomplete", 7)
    assert "state/param_states/decoder/norm/scale/v" in found.reason
    with wherry.open(folder) as opened:
        assert (
            opened.read("target/encoder/mlp/wi/kernel") == t5x.arrays()["target/encoder/mlp/wi/kernel"]
        ).all()
    with pytest.raises(IncompleteError):
        wherry.convert(folder, tmp_path / "all", to="npz", lineage=False)
    wherry.convert(folder, tmp_path / "out", to="t5x-legacy", only="params", lineage=False)
    assert set(tensors(tmp_path / "out")) == {name for name in t5x.arrays() if name.startswith("target/")}
    shutil.rmtree(folder / "target.decoder.norm.scale")
    with pytest.raises(IncompleteError, match="target/decoder/norm/scale"):
        wherry.convert(folder, tmp_path / "none", to="t5x-legacy", only="params", lineage=False)


def test_files_next_to_the_arrays(tmp_path):
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays())
    (folder / "train_ds-000-of-001.index").write_bytes(b"iterator")
    (folder / "dataset").mkdir()
    (folder / "dataset" / "more").write_bytes(b"x")
    (folder / "PINNED").write_bytes(b"1")
    with wherry.open(folder) as found:
        names = {one.name for one in found.manifest.companions}
        assert names == {"train_ds-000-of-001.index", "dataset/more"}
        assert found.reader.companion("train_ds-000-of-001.index").read_whole(MOST_CONFIG) == b"iterator"
        assert found.manifest.origin["pinned"]
        assert any(one.file == "PINNED" for one in found.detection.evidence)


def spec_of(**changes) -> dict:
    plain = {"shape": [2], "chunks": [2], "compressor": None}
    return {
        "driver": "zarr", "dtype": "float32", "kvstore": {"driver": "file", "path": "target.w/"}, "metadata": plain,
    } | changes  # fmt: skip


WHOLE = {"input_inclusive_min": [0], "input_exclusive_max": [[2]]}
BAD_SPECS = {
    "other storage": (spec_of(kvstore={"driver": "http", "path": "target.w/"}), HostileError),
    "no name": (spec_of(kvstore={"driver": ["file"], "path": "target.w/"}), HostileError),
    "no driver": (spec_of(kvstore={"driver": None, "path": "target.w/"}), HostileError),
    "database": (spec_of(kvstore={"driver": "ocdbt", "base": "file:///etc/"}), HostileError),
    "absolute": (spec_of(kvstore={"driver": "file", "path": "/etc/passwd"}), HostileError),
    "above": (spec_of(kvstore={"driver": "gcs", "bucket": "b"}, path="../w"), HostileError),
    "other driver": (spec_of(driver="cast"), UnsupportedError),
    "view": (spec_of(transform={"input_exclusive_max": [1]}), UnsupportedError),
    "unknown word": (spec_of(base={}), UnsupportedError),
    "no path": (spec_of(kvstore={"driver": "file"}), CorruptError),
    "enormous": (
        spec_of(metadata={"shape": [1 << 62], "chunks": [1 << 62], "compressor": None}),
        HostileError,
    ),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_specs_that_are_refused(tmp_path, name):
    spec, error = BAD_SPECS[name]
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), extra={"target/w": spec})
    assert wherry.detect(folder).verdict == {"HostileError": "malicious"}.get(error.__name__, error.verdict)
    with pytest.raises(error):
        wherry.open(folder)


def test_a_transform_that_says_no_more_than_the_shape(tmp_path):
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), extra={"target/w": spec_of(transform=WHOLE)})
    (folder / "target.w").mkdir()
    (folder / "target.w" / "0").write_bytes(np.arange(2, dtype=np.float32).tobytes())
    assert tensors(folder)["target/w"].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["PLACEHOLDER:///etc/w", "AGGREGATED://../w", "PLACEHOLDER://a/../../w"])
def test_placeholders_stay_inside(tmp_path, name):
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), extra={"target/w": name})
    assert wherry.detect(folder).verdict == "malicious"


def test_two_leaves_in_one_array(tmp_path):
    same = spec_of(kvstore={"driver": "file", "path": "target.decoder.norm.scale"})
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), extra={"target/decoder.norm": {"scale": same}})
    with pytest.raises(CorruptError, match="have the same array"):
        wherry.open(folder)


def test_what_a_killed_save_leaves(tmp_path):
    folder = t5x.save(tmp_path / "checkpoint_7.tmp-1716000000", t5x.arrays())
    assert wherry.detect(folder).verdict == "incomplete"
    assert wherry.detect(folder).step == 7
    done = t5x.save(tmp_path / "run" / "checkpoint_7", t5x.arrays())
    for content in (b"", None):
        (done / "checkpoint").write_bytes(content) if content is not None else (done / "checkpoint").unlink()
        found = wherry.detect(done)
        assert (found.format, found.verdict) == ("t5x-legacy", "incomplete")
    earlier = t5x.save(
        tmp_path / "run" / "checkpoint_6", t5x.arrays() | {"state/step": np.asarray(6, np.int32)}
    )
    assert wherry.detect(tmp_path / "run").uri == str(earlier)


def test_a_cut_tree_and_a_cut_chunk(tmp_path):
    folder = t5x.save(tmp_path / "checkpoint_7", t5x.arrays(), compressor={})
    chunk = folder / "target.encoder.mlp.wi.kernel" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-4])
    with wherry.open(folder) as found, pytest.raises(CorruptError):
        found.read("target/encoder/mlp/wi/kernel")
    whole = (folder / "checkpoint").read_bytes()
    (folder / "checkpoint").write_bytes(whole[: len(whole) // 2])
    assert wherry.detect(folder).verdict == "corrupt"


def test_the_step_inside_counts(tmp_path):
    folder = t5x.save(tmp_path / "checkpoint_8", t5x.arrays())
    assert wherry.detect(folder).verdict == "corrupt"
    folder = t5x.save(tmp_path / "any name", t5x.arrays())
    assert (wherry.detect(folder).verdict, wherry.detect(folder).step) == ("ok", 7)


def test_a_file_with_the_name_of_an_array_is_no_remains(tmp_path):
    """T5X's arrays are folders: a list of build targets, for example, makes no checkpoint of the folder around it."""
    (tmp_path / "target.list").write_text("all\n")
    assert wherry.detect(tmp_path).format == "none"
    (tmp_path / "target.decoder.logits_dense.kernel").mkdir()
    assert wherry.detect(tmp_path).format == "t5x-legacy"


CASES = [path.parent.name for path in sorted(CORPUS.glob("*t5x*/expected.json"))]
WHOLE_OF_CORPUS = [case for case in CASES if expected(case)["verdict"] == "ok"]
BAD = [case for case in CASES if case not in WHOLE_OF_CORPUS]


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


@needs_corpus
@pytest.mark.parametrize("root", WHOLE_OF_CORPUS, indirect=True)
def test_the_run_folder_and_the_msgpack_file_lead_there_as_well(root):
    place, row = root
    uris = {row["uri"], *row.get("alternative_uris", ())}
    uris |= {f"{uri}/checkpoint" for uri in uris if (place / uri / "checkpoint").is_file()} | {"."}
    assert {wherry.detect(place / uri).uri for uri in uris} == {str(place / row["uri"])}


@needs_corpus
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
