"""Signs leave out no format that would recognise a location, or refuse it by name; the index has what formats say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpus import every_case, home, needs_corpus
from wherry.errors import WherryError
from wherry.formats import registry
from wherry.formats.format import Glimpse
from wherry.formats.registry import FormatFacts, formats, modules, rows_of
from wherry.storage.stores import locate
from wherry.testing import samples, writers

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
