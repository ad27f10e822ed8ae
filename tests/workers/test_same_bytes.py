"""Same plan, same unit, same bytes: every unit of every format that can be cut, made twice in different processes."""

from __future__ import annotations

import pytest

import wherry
from tests.support.corpus import needs_corpus, place
from tests.support.jobs import made_job
from tests.support.made_twice import twice
from tests.support.tiny_models import save_tiny
from wherry.core.request import TargetRequest, convert_request
from wherry.formats.registry import find_format, formats
from wherry.workers.commit import commit
from wherry.workers.job import split

FORMATS = ["hf", "dcp", "orbax", "safetensors", "npz", "torch-zip", "flax-msgpack"]
LLAMA = "hf-llama-sharded-fp32"
# The formats of systems: target format → case of the corpus, options, what is converted, and the size of units.
SYSTEMS = {
    "lingua": ("lingua-fsdp2-w2", {"shard_size": "20KB"}, "params", 20_000),
    "lingua-consolidated": ("lingua-fsdp2-w2", {}, "params", 70_000),
    "huggingface-flax": (LLAMA, {}, None, 70_000),
    "maxtext": (LLAMA, {"data_file_size": "12KB"}, None, 12_000),
    "penzai": (LLAMA, {"data_file_size": "12KB"}, None, 12_000),
    "paxml": ("maxtext-gpt3-l3-scan", {"data_file_size": "12KB", "version": "1.2"}, "params", 12_000),
    "t5x-legacy": ("t5x-orbax-ocdbt-head", {}, None, 12_000),
    "t5x-orbax": ("t5x-legacy-v3-f32-2024", {"data_file_size": "12KB"}, None, 12_000),
}


@pytest.mark.parametrize("to", FORMATS)
def test_every_unit_is_the_same_in_other_processes(source, tmp_path, to):
    first, second = twice(lambda target: made_job(source, target, to), tmp_path)
    assert len(first) == (6 if to in ("hf", "dcp", "orbax") else 5)
    assert first == second
    assert all(files for files, _moves, _hashed in first.values())


@needs_corpus
@pytest.mark.parametrize("to", SYSTEMS)
def test_every_unit_of_a_system_s_format_is_the_same(to, tmp_path):
    case, options, only, unit = SYSTEMS[to]

    def make(target):
        target = target.with_name("checkpoint_1000") if "t5x" in to else target
        targets = [TargetRequest(str(target), to, options)]
        more = {"ignore": () if "lingua" in to else ("companions",), "only": only}
        split(convert_request(str(place(case)), targets, lineage=False, **more), unit)
        return target

    first, second = twice(make, tmp_path)
    assert len(first) > 1
    assert first == second


def shards(to):
    single = {"megatron-ranks": {}, "gguf": {"type": "f32", "tokenizer": "none"}}
    return single.get(to, {"shard_size": "20KB"})


def in_shards(source, target, to):
    """A job whose target has several files, by a config that the target has of its own."""
    targets = [TargetRequest(str(target), to, shards(to))]
    return split(convert_request(str(source), targets, lineage=False), 20_000)


@pytest.mark.parametrize("to", ["torchtitan", "megatron", "megatron-ranks", "gguf"])
def test_every_unit_of_a_model_in_a_system_s_names_is_the_same(to, tmp_path):
    source = save_tiny(tmp_path / "model", "llama")
    first, second = twice(lambda target: in_shards(source, target, to), tmp_path)
    assert len(first) > 1
    assert first == second
    wherry.convert(source, tmp_path / "alone", to=to, options=shards(to), lineage=False)
    commit(str(tmp_path / "one" / "out"))
    assert files_of(tmp_path / "one" / "out") == files_of(tmp_path / "alone")


def files_of(folder):
    """Name → bytes of the files of a checkpoint, without its sidecar."""
    if folder.is_file():
        return {"": folder.read_bytes()}
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "wherry.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_formats_that_can_be_cut_are_those_of_files_at_known_offsets():
    """Their bytes and places follow from the plan; each of them is in a test above."""
    of_systems = ("torchtitan", "megatron", "megatron-ranks", "gguf")
    tested = {find_format(to).name for to in (*FORMATS, *SYSTEMS, *of_systems)}
    assert {row.name for row in formats().values() if row.is_written} == tested
