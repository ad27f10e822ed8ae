"""What is found: discovery, signs, ambiguity, fingerprints."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Self

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import wherry
from tests.support.corpus import every_case, home, needs_corpus
from tests.support.formats import CORPUS, expected
from wherry.cli import cli
from wherry.cli.format_list import dtype_words
from wherry.core.detection import Detection
from wherry.core.steps import step_number, unfinished_reason
from wherry.errors import AmbiguousError, NotFoundError, WherryError
from wherry.formats import registry
from wherry.formats.checkpoint import fingerprint
from wherry.formats.detect import look
from wherry.formats.format import Glimpse
from wherry.formats.registry import FormatFacts, formats, modules, rows_of
from wherry.store.local_store import locate
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import Entry
from wherry.testing import samples, writers

STEPS = 10_000


class Listings:
    """Counts the folders that are listed and the files that are opened while it is active."""

    def __init__(self) -> None:
        self.folders: Counter[str] = Counter()
        self.files: Counter[str] = Counter()
        self.active = False
        sys.addaudithook(self._hear)  # cannot be taken away again, hence `active`

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.active and event == "os.scandir":
            self.folders[str(Path(f"/proc/self/fd/{arguments[0]}").readlink())] += 1
        if self.active and event == "open" and not arguments[2] & os.O_DIRECTORY:
            self.files[str(arguments[0])] += 1

    def __enter__(self) -> Self:
        self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        self.active = False


def model(path, **arrays) -> None:
    path.mkdir(parents=True)
    save_file(arrays or {"w": np.ones((2, 3), "f4")}, path / "model.safetensors", metadata={"format": "pt"})


def walked(root, **options):
    skipped = []
    found = list(wherry.discover(root, on_skip=skipped.append, **options))
    inside = {Path(row.uri).relative_to(root).as_posix(): row.reason for row in skipped}
    return [Path(one.uri).relative_to(root).as_posix() for one in found], inside


def copies(step, run, numbers) -> None:
    """The same step many times, its files linked."""
    for number in numbers:
        for folder, _names, files in os.walk(step):
            target = run / str(number) / Path(folder).relative_to(step)
            target.mkdir(parents=True)
            for file in files:
                os.link(Path(folder) / file, target / file)


def test_ten_thousand_steps_are_listed_but_not_what_they_hold(tmp_path):
    step = tmp_path / "step"
    (step / "default" / "d").mkdir(parents=True)
    leaf = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    (step / "default" / "_METADATA").write_text(
        json.dumps({"tree_metadata": {"('w',)": leaf}, "use_ocdbt": True})
    )
    (step / "default" / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3a\x2a")
    (step / "default" / "d" / "data").write_bytes(b"x")
    copies(step, tmp_path / "run", range(STEPS))
    listings = Listings()
    seen = 0
    with listings:
        for number, one in enumerate(wherry.discover(tmp_path / "run")):
            assert one.format == "orbax"
            seen += 1
            if number == 9:
                listed = len(listings.folders)
                assert listed <= 1 + 2 * 10, "the first are given before the others are looked at"
    assert seen == STEPS
    assert not [folder for folder in listings.folders if folder.endswith("/d")]
    assert max(listings.folders.values()) <= 3
    assert sum(listings.folders.values()) <= 1 + 4 * STEPS
    assert not [file for file in listings.files if file.endswith("/data")]


FAMILIES = [
    "orbax-0128-noocdbt-zarr2", "orbax-0128-sharded8", "orbax-017-default", "maxtext-llama31-l3-scan",
    "dcp-fsdp2-w2-fp32", "lingua-noshard-w2", "t5x-legacy-v3-f32-head", "t5x-orbax-ocdbt-head",
    "paxml-gpt3-l3-v11-gda-zarr", "penzai-llama-unroll-plain", "hf-llama-sharded-fp32",
]  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_no_family_is_entered_or_reported_twice(tmp_path, case):
    if not (CORPUS / case).exists():
        pytest.skip("the corpus is not here; set WHERRY_CORPUS to its folder")
    source = CORPUS / case / "checkpoint" / expected(case)["uri"]
    root = tmp_path / "root"
    target = root / source.name
    shutil.copytree(source, target)
    listings = Listings()
    with listings:
        found = list(wherry.discover(root))
    assert len(found) == 1, [(one.format, one.uri) for one in found]
    assert found[0].format in {expected(case)["format"], *expected(case).get("format_accepts", ())}
    assert max(listings.folders.values()) <= 4
    depth = max(len(Path(folder).relative_to(root).parts) for folder in listings.folders)
    assert depth <= 2, sorted(listings.folders)  # the step, and the item in it


def test_staging_and_unfinished_names_are_passed_over_with_the_reason(tmp_path):
    for name in (
        "1", ".wherry-2.0123abcd", "3.orbax-checkpoint-tmp-17", "4.orbax-checkpoint-tmp", "checkpoint_5.tmp-1700000000",
        "tmp-checkpoint-6", "checkpoint_tmp", ".git/lfs", "models--x/blobs", "models--x/snapshots/main",
    ):  # fmt: skip
        model(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "1")
    found, skipped = walked(tmp_path)
    assert found == ["1", "models--x/snapshots/main"]
    words = {
        ".wherry-2.0123abcd": "staging", "3.orbax-checkpoint-tmp-17": "Orbax", "4.orbax-checkpoint-tmp": "Orbax",
        "checkpoint_5.tmp-1700000000": "T5X", "tmp-checkpoint-6": "trainer", "checkpoint_tmp": "Flax",
        ".git": "hidden", "models--x/blobs": "cache", "link": "link",
    }  # fmt: skip
    assert set(skipped) == set(words)
    assert all(word in skipped[name] for name, word in words.items())


def age(path, seconds) -> None:
    then = time.time() - seconds
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then))


def test_what_changed_a_moment_ago_counts_only_with_its_commit_member(tmp_path):
    for name in ("old", "fresh", "proved", "torn"):
        model(tmp_path / name)
        age(tmp_path / name, 3600)
    (tmp_path / "fresh" / "model.safetensors").touch()
    index = json.dumps({"metadata": {}, "weight_map": {"w": "model.safetensors"}})
    for name in ("proved", "torn"):
        (tmp_path / name / "model.safetensors").touch()
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
    newest = time.time()
    os.utime(tmp_path / "proved" / "model.safetensors.index.json", (newest, newest))
    os.utime(tmp_path / "torn" / "model.safetensors.index.json", (newest - 60, newest - 60))
    assert walked(tmp_path)[0] == ["fresh", "old", "proved", "torn"]
    found, skipped = walked(tmp_path, min_age=600)
    assert found == ["old", "proved"]
    assert all(
        re.search(r"not settled: changed .*; it is settled in .* with min_age = 0", skipped[name])
        for name in ("fresh", "torn")
    )


def test_a_converted_checkpoint_needs_no_rest(tmp_path):
    model(tmp_path / "source")
    wherry.convert(tmp_path / "source", tmp_path / "target", to="orbax", lineage=False)
    age(tmp_path / "source", 10)
    found, _ = walked(tmp_path, min_age=600)
    assert found == ["target"]


def test_the_newest_complete_step_of_each_run(tmp_path):
    for run, steps in {"a": (1, 2, 30), "b/checkpoints": (10,)}.items():
        for step in steps:
            model(tmp_path / run / f"checkpoint-{step}")
    (tmp_path / "a" / "checkpoint-30" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "a" / "checkpoint-40").mkdir()
    model(tmp_path / "a" / "best")
    found, skipped = walked(tmp_path, newest=True)
    assert found == ["a/checkpoint-2", "a/best", "b/checkpoints/checkpoint-10"]
    assert "a newer step" in skipped["a/checkpoint-1"]
    assert skipped["a/checkpoint-30"]
    assert wherry.detect(tmp_path / "a").step == 2


def test_single_files_of_several_systems(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    save_file({"w": np.ones(3, "f4")}, tmp_path / "b.safetensors")
    (tmp_path / "events.out.tfevents").write_bytes(b"log")
    (tmp_path / "notes.txt").write_text("hello")
    found = {one.uri.rsplit("/", 1)[-1]: one.format for one in wherry.discover(tmp_path)}
    assert found == {"a.npz": "npz", "b.safetensors": "safetensors", "model.pt": "torch-zip"}


def test_a_folder_that_cannot_be_read_does_not_end_the_walk(tmp_path, monkeypatch):
    from wherry.store.local_store import LocalStore

    model(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    entries = LocalStore.entries

    def refused(store, path):
        if path.endswith("/bad"):
            raise PermissionError(13, "Permission denied", path)
        return entries(store, path)

    monkeypatch.setattr(LocalStore, "entries", refused)
    found, skipped = walked(tmp_path)
    assert found == ["good"]
    assert "Permission denied" in skipped["bad"]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("12", 12),
        ("0000001000", 1000),
        ("checkpoint_5", 5),
        ("step-7", 7),
        ("llama-3", None),
        ("run_8", None),
    ],
)
def test_names_of_steps(name, number):
    assert step_number(name) == number


@pytest.mark.parametrize("name", ["checkpoint_5", "my_tmp", "particle", "step-7", "parts"])
def test_names_that_only_look_unfinished(name):
    assert unfinished_reason(name) is None


def test_the_command_line(tmp_path):
    for step in (1, 2):
        model(tmp_path / f"checkpoint-{step}")
    lines = CliRunner().invoke(cli, ["discover", str(tmp_path), "--newest", "--json"]).stdout.splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], second["skipped"].rsplit("-", 1)[-1]) == (2, "1")
    assert (
        "not settled: changed"
        in CliRunner().invoke(cli, ["discover", str(tmp_path), "--min-age", "600"]).stdout
    )


def test_the_table_of_formats_says_what_the_rows_say():
    text = CliRunner().invoke(cli, ["formats"]).stdout
    for row in formats().values():
        line = next(line for line in text.splitlines() if line.strip().split("  ")[0].strip() == row.name)
        assert row.title in line
        assert ("reads" in line, "writes" in line) == (row.readable, row.is_written)
        shown = CliRunner().invoke(cli, ["formats", row.name]).stdout
        assert all(alias in shown for alias in (*row.aliases, row.loaded_by))
        assert all(f"--set {name}=" in shown for name in row.options)
    assert dtype_words({"bool", "int4", "uint4", "float8_e5m2"}) == [
        "4-bit integers",
        "float8 (e5m2)",
        "bool",
    ]


# Signs leave out no format that would recognise a location, or refuse it by name; the index has what
# formats say.


MOST_PLACES = 60  # of a case that are looked at


def require_signs(path):
    """Ask every format for a location, and require its signs where it says anything but None."""
    glimpse = Glimpse(locate(path))
    for name, row in formats().items():
        try:
            claims = row.detect(Glimpse(locate(path))) is not None
        except WherryError:
            claims = True
        assert not claims or row.signs.are_at(glimpse), f"{name} has no sign at {path}"


def test_the_index_has_what_every_format_says():
    """After a change, run `python infra/docs.py`."""
    said = [FormatFacts.of(row, module) for module in modules() for row in rows_of(module)]
    known = [row for row in formats().facts.values() if row.module is not None]
    assert sorted(known, key=lambda row: row.name) == sorted(said, key=lambda row: row.name)
    assert all(FormatFacts.from_json(row.to_json()) == row for row in said)


def test_a_format_that_the_index_does_not_have_is_loaded_at_once(tmp_path, monkeypatch):
    known = json.loads(registry._INDEX.read_text())
    (tmp_path / "index.json").write_text(json.dumps([row for row in known if row["module"] != "npz"]))
    monkeypatch.setattr(registry, "_INDEX", tmp_path / "index.json")
    found = formats.__wrapped__()
    assert set(found) == set(formats())
    assert found.facts["npz"].module is None
    assert found["npz"] is formats()["npz"]


@pytest.mark.parametrize("case", every_case())
@needs_corpus
def test_every_folder_and_file_that_real_systems_wrote(case):
    places = [home(case), *sorted(home(case).rglob("*"), key=lambda place: (len(place.parts), place))]
    for place in places[:MOST_PLACES]:
        require_signs(place)


@pytest.mark.parametrize("name", [name for name, row in formats().items() if row.is_written])
def test_every_folder_and_file_that_wherry_writes(name, tmp_path):
    place = writers.staging_place(tmp_path)
    writers.make(samples.sample(formats()[name]), place)
    root = Path(place.path)
    for found in [root, *sorted(root.rglob("*"))][:MOST_PLACES] if root.is_dir() else [root]:
        require_signs(found)


def words_of_signs():
    """Names, endings and first bytes of all signs, and others that formats look for."""
    signs = [row.signs for row in formats().values()]
    names = {name for one in signs for name in one.entries}
    ends = {end for one in signs for end in (*one.files, *one.ends)}
    names |= {
        f"{stem}{end}" for end in ends for stem in ("model", "checkpoint_7", "__0", "0", "tmp", "x.index")
    }
    names |= {
        *("metadata", "state", "items", "default", "params", "zero", "0", "step-7", "latest", "penzai.json"),
        *("5.orbax-checkpoint-tmp-3", "checkpoint_7.tmp-9", "tmp_1.checkpoint_1", "checkpoint_tmp", "x_gda"),
        *("ocdbt.process_0", "d", "_CHECKPOINT_METADATA", "commit_success.txt", "target.a.b", "mdl_vars.a.b"),
        *(
            "mp_rank_00",
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "common.pt",
        ),
        *("model_world_size_2_rank_0.pt", "consolidated.00.pth", "pytorch_model_fsdp_0", "optimizer_0"),
        *("shard-00001-model-00001-of-00001.safetensors", "train_state_00000.json", "model_index.json"),
    }
    return sorted(name for name in names if name)


HEADS = [
    *(
        b"",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"GGUF\x03\0\0\0",
        b"\x80\x02",
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",
    ),
    *(
        b"(dp0\n.",
        b"cnumpy\nndarray\n.",
        b"]q\0.",
        b"\x93NUMPY\x01\0",
        b'{"a": 1}\n\x93NUMPY\x01\0',
        b"\x02\0\0\0\0\0\0\0{}",
    ),
    *(
        b"\x82\xa7version\x03\xa9optimizer\x80",
        b"\x82\xafflattened_state\x80\xb1str_pytree_state\xa0",
        b"\x90",
    ),
    *(
        b"\x81\xa1w\xc7\x05\x01\x93\x91\x01\xa2u1",
        b"\xb2//GDAPlaceholder:a",
        b"\x81\xa1w\xb2//GDAPlaceholder:a",
        b"\xc7\x05\x01\x93",
    ),
    *(b"pickle".ljust(257, b"\0") + b"ustar", b"./tensors".ljust(257, b"\0") + b"ustar", b"\xff\xd8"),
    *(b"12", b"0", b"\x81\xaaparameters\xc0", b"\xde\0\x01\xa1w\x01"),
]
NAMES = words_of_signs()
files = st.tuples(st.sampled_from(HEADS), st.sampled_from([b"", b"\0" * 40, b"{" * 20])).map(b"".join)
trees = st.recursive(
    files, lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, max_size=4), max_leaves=8
)


def put(place, tree):
    if isinstance(tree, bytes):
        place.write_bytes(tree)
        return
    place.mkdir()
    for name, inner in tree.items():
        put(place / name, inner)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(NAMES), trees)
def test_any_files_in_any_folders(above, name, tree):
    with TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        put(Path(folder) / above, {name: tree})
        for place in [Path(folder) / above, *sorted((Path(folder) / above).rglob("*"))]:
            require_signs(place)


def test_a_conversion_loads_the_formats_that_it_needs(tmp_path):
    code = """
import sys, wherry
wherry.convert(sys.argv[1], sys.argv[2], to="npz", verify="none")
start = "wherry.integrations.formats."
print(*sorted({name[len(start):].split(".")[0] for name in sys.modules if name.startswith(start)}))
"""
    source = tmp_path / "a.safetensors"
    source.write_bytes(
        b"\x40" + bytes(7) + b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.ljust(64) + b"ab"
    )
    environment = {**os.environ, "WHERRY_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code, source, tmp_path / "b.npz"],
        capture_output=True,
        check=False,
        text=True,
        env=environment,
    )
    assert done.stdout.split() == ["npz", "safetensors"], done.stderr


# Several formats may claim a place: the most specific one has it, and of two equals none is guessed.


def row(name, *refines, claims=True):
    """A row of the registry, as far as detection looks at it."""
    claim = Detection("x", name) if claims else None
    return SimpleNamespace(refines=refines, signs=None, detect=lambda _glimpse: claim)


def looked(tmp_path, **rows):
    return look(Glimpse(locate(tmp_path)), rows)


def test_the_most_specific_format_has_it(tmp_path):
    found = looked(tmp_path, tree=row("tree"), system=row("system", "tree"), other=row("other", claims=False))
    assert (found.format, found.also) == ("system", ("tree",))
    assert looked(tmp_path, other=row("other", claims=False)) is None


def test_what_is_refined_through_another_is_no_second_answer(tmp_path):
    rows = {"tree": row("tree"), "item": row("item", "tree", claims=False), "system": row("system", "item")}
    assert looked(tmp_path, **rows).format == "system"


def test_of_two_equals_none_is_guessed(tmp_path):
    with pytest.raises(AmbiguousError, match="this could be one or two") as caught:
        looked(tmp_path, one=row("one"), two=row("two"))
    assert "--format one" in caught.value.cure


@pytest.mark.parametrize("low", range(0, 256, 8))
def test_a_header_of_any_length_is_a_header(tmp_path, low):
    """The JSON header that fills the file decides, whatever another format makes of the bytes of its length."""
    file = tmp_path / "ambiguous.bin"
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    for length in (high * 256 + low for high in (*range(16), 0x20, 0x80, 0x8A, 0xFF, 0x102, 0x204, 0x505)):
        if length >= len(text):
            file.write_bytes(struct.pack("<Q", length) + text.ljust(length) + bytes(8))
            found = wherry.detect(file)
            assert (found.verdict, found.format) == ("ok", "safetensors"), hex(length)


# A fingerprint covers each file's name, size and change mark, and nothing that wherry puts next to them.


BASE = [Entry("a", 1, is_dir=False, mark="1"), Entry("b", 2, is_dir=False, mark="2")]
PLACE = locate("/checkpoints/x")


def test_each_fact_counts():
    variants = [
        BASE,
        BASE[:1],
        [BASE[0], Entry("c", 2, is_dir=False, mark="2")],
        [BASE[0], Entry("b", 3, is_dir=False, mark="2")],
        [BASE[0], Entry("b", 2, is_dir=False, mark="3")],
    ]
    assert len({fingerprint(one, PLACE) for one in variants}) == len(variants)
    assert fingerprint(BASE[::-1], PLACE) == fingerprint(BASE, PLACE)


def test_sizes_count_where_marks_do_not():
    sizes = [[Entry("a", size, is_dir=False, mark=str(size))] for size in (1, 2)]
    assert len({fingerprint(one, PLACE, marks=False) for one in sizes}) == 2
    marks = [[Entry("a", 1, is_dir=False, mark=mark)] for mark in ("1", "2")]
    assert len({fingerprint(one, PLACE, marks=False) for one in marks}) == 1


def test_our_own_files_do_not_count():
    own = [Entry(name, 5, is_dir=False, mark="5") for name in sorted(OWN_NAMES)]
    assert own
    assert fingerprint([*BASE, *own], PLACE) == fingerprint(BASE, PLACE)


def test_a_single_file_keeps_its_fingerprint_under_another_name():
    one = [Entry("x", 1, is_dir=False, mark="1")]
    other = [Entry(".wherry-x.0123abcd", 1, is_dir=False, mark="1")]
    assert fingerprint(one, PLACE) == fingerprint(other, locate("/checkpoints/.wherry-x.0123abcd"))


# A file that is removed between two looks at it is an error that names it, not a bug of wherry.


HEADERS = {
    "a.safetensors": "wherry.integrations.formats.safetensors.placed_tensors",
    "a.npz": "wherry.integrations.formats.npz.read_contents",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_file_that_goes_after_its_header_was_read_is_named(name, tmp_path, monkeypatch):
    module, _, function = HEADERS[name].rpartition(".")
    imported = __import__(module, fromlist=[function])
    np.savez(tmp_path / "a.npz", w=np.arange(6, dtype="f4"))
    file = tmp_path / name
    if name != "a.npz":
        wherry.convert(tmp_path / "a.npz", file, to="safetensors", lineage=False)
    real = getattr(imported, function)

    def read(*words):
        found = real(*words)
        file.unlink()
        return found

    monkeypatch.setattr(imported, function, read)
    with pytest.raises(NotFoundError, match="removed while it was read") as caught:
        wherry.open(file)
    assert caught.value.uri == str(file)


def test_a_file_that_is_there_has_its_size(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    assert locate(tmp_path / "a").present().size == 3
