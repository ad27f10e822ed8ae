"""Same plan, same unit, same bytes: chunks, tensors that are cut, and layouts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.corpus import needs_corpus, place
from tests.support.jobs import (
    Killed,
    as_dead,
    changed,
    killed,
    lie_about_checksum,
    made_and_proved,
    made_job,
    proofs,
    receipts,
    worker_named,
)
from tests.support.large_files import MB as MB_OF_TENSORS
from tests.support.made_twice import twice
from tests.support.object_stores import leftover_names, small_parts
from tests.support.tiny_models import save_tiny
from wherry.core.request import TargetRequest, convert_request
from wherry.core.services import service
from wherry.errors import CorruptError, IncompleteError, MismatchError
from wherry.formats.registry import find_format, formats
from wherry.store.local_store import locate
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.unit import plan_for_workers
from wherry.workers.work import work

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
    single = {"megatron-ranks": {}, "vllm-sharded": {"tp": "2"}, "gguf": {"type": "f32", "tokenizer": "none"}}
    return single.get(to, {"shard_size": "20KB"})


def in_shards(source, target, to):
    """A job whose target has several files, by a config that the target has of its own."""
    targets = [TargetRequest(str(target), to, shards(to))]
    return split(convert_request(str(source), targets, lineage=False), 20_000)


@pytest.mark.parametrize("to", ["torchtitan", "megatron", "megatron-ranks", "gguf", "vllm-sharded"])
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
    of_systems = ("torchtitan", "megatron", "megatron-ranks", "gguf", "vllm-sharded")
    tested = {find_format(to).name for to in (*FORMATS, *SYSTEMS, *of_systems)}
    assert {row.name for row in formats().values() if row.is_written} == tested


# Units of Orbax and its relatives: chunks of one tensor in the files of several units, read by their
# libraries.


MB = 1_000_000
SHAPES = {
    "big.w": (3000, 1500),
    "odd.w": (37, 11),
    "scale": (),
    **{f"layer.{n}.w": (50_000,) for n in range(4)},
}
# Chunks of about 1 MB that end within leaves; boxes; padded edges; one file a chunk.
CASES = {
    "ocdbt": {"data_file_size": "4MB", "chunks": "1"},
    "zarr3": {"data_file_size": "4MB", "chunks": "1", "zarr": "3"},
    "files": {"ocdbt": False, "chunks": "1"},
    "boxes": {"data_file_size": "4MB", "chunks": "7x3"},
}


@pytest.fixture(scope="module")
def every_array():
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def every_shape(every_array, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(every_array, path)
    return path


def job_of(source, target, to, options, unit=4 * MB, **more):
    request = convert_request(str(source), [TargetRequest(str(target), to, options)], lineage=False, **more)
    return split(request, unit)


def require_same(target, source, to, options, alone, **more):
    """Commit, and compare with what one process makes."""
    [receipt] = commit(str(target)).receipts
    one = wherry.convert(source, alone, to=to, options=options, lineage=False, **more)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.source.checkpoint_digest == one.source.checkpoint_digest
    assert (
        receipt.resumed_bytes == receipt.bytes_written
    )  # the commit has moved no byte itself, none counts twice
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_in_the_files_of_several_units_has_the_digest_of_one_process(
    every_shape, target, tmp_path, case
):
    job = job_of(every_shape, target, "orbax", CASES[case])
    sharing = [unit for unit in job.units if any(part.source == ("big.w",) for part in unit.parts)]
    assert len(sharing) > 2
    assert all(unit.also_read for unit in sharing) == (case != "boxes")
    work(target)
    require_same(target, every_shape, "orbax", CASES[case], tmp_path / "alone")


@pytest.mark.parametrize("case", CASES)
def test_orbax_reads_what_units_have_made(every_shape, every_array, tmp_path, case):
    import orbax.checkpoint as ocp

    job_of(every_shape, tmp_path / "out", "orbax", CASES[case])
    work(str(tmp_path / "out"))
    commit(str(tmp_path / "out"))
    asyncio.set_event_loop(asyncio.new_event_loop())
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    assert found.keys() == every_array.keys()
    for name, array in every_array.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def test_the_files_are_the_same_bytes_as_those_of_one_process(every_shape, tmp_path):
    job = job_of(every_shape, tmp_path / "out", "orbax", CASES["ocdbt"])
    work(str(tmp_path / "out"))
    commit(str(tmp_path / "out"))
    wherry.convert(every_shape, tmp_path / "alone", to="orbax", options=CASES["ocdbt"], lineage=False)
    for file in (file for unit in job.units for file in unit.files):
        assert (tmp_path / "out" / file.name).read_bytes() == (tmp_path / "alone" / file.name).read_bytes()


@pytest.mark.parametrize("step", ["move", "finish", "_describe_file"])
def test_a_unit_of_chunks_whose_worker_was_killed_is_made_again(
    every_shape, target, tmp_path, monkeypatch, step
):
    job_of(every_shape, target, "orbax", CASES["ocdbt"])
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, step, 2)
    work(target)
    require_same(target, every_shape, "orbax", CASES["ocdbt"], tmp_path / "alone")


def test_two_units_with_one_move_must_agree_about_it(every_shape, target):
    """One of them has read something else at the edge."""
    job = job_of(every_shape, target, "orbax", CASES["ocdbt"])
    work(target)
    found = {row["unit"]: (name, row) for name, row in receipts(target).items()}
    shared = {tuple(move[:3]) for move in found[0][1]["moves"]} & {
        tuple(move[:3]) for move in found[1][1]["moves"]
    }
    assert shared
    assert len(job.units) > 2
    name, row = found[0]
    moves = [
        [*move[:4], _other(move[4]), *move[5:]] if tuple(move[:3]) in shared else move
        for move in row["moves"]
    ]
    changed(target, name, moves=moves)
    with pytest.raises(MismatchError, match="two workers have read different bytes"):
        commit(str(target))


def _other(text):
    raw = bytearray(base64.b64decode(text))
    raw[0] ^= 1
    return base64.b64encode(raw).decode()


def test_a_commit_of_a_database_that_was_killed_is_taken_up(every_shape, target, tmp_path, monkeypatch):
    job_of(every_shape, target, "orbax", CASES["ocdbt"])
    work(target)
    for call in ("wherry.converter.job.complete", "wherry.workers.records.Records.end"):
        with monkeypatch.context() as patch:
            patch.setattr(call, _killed)
            with pytest.raises(Killed):
                commit(str(target))
    [receipt] = commit(str(target)).receipts
    assert receipt.already
    assert leftover_names(target) == []
    alone = wherry.convert(every_shape, tmp_path / "alone", to="orbax", options=CASES["ocdbt"], lineage=False)
    assert receipt.target.checkpoint_digest == alone.target.checkpoint_digest


def _killed(*_arguments):
    raise Killed


BETWEEN_SYSTEMS = {
    "hf-to-maxtext": ("hf-llama-sharded-fp32", "maxtext", {"data_file_size": "12KB"}, None),
    "hf-to-maxtext-files": ("hf-llama-sharded-fp32", "maxtext", {"ocdbt": False}, None),
    "paxml-to-maxtext": ("paxml-gpt3-l3-v11-gda-zarr", "maxtext", {"data_file_size": "12KB"}, "params"),
    "maxtext-to-paxml-1.1": ("maxtext-gpt3-l3-scan", "paxml", {"version": "1.1"}, "params"),
    "maxtext-to-paxml-1.2": ("maxtext-gpt3-l3-scan", "paxml", {"data_file_size": "12KB"}, "params"),
    "hf-to-penzai": ("hf-llama-sharded-fp32", "penzai", {"data_file_size": "12KB"}, None),
    "t5x-to-t5x-orbax": ("t5x-legacy-v3-f32-2024", "t5x-orbax", {"data_file_size": "12KB"}, None),
    "t5x-orbax-to-t5x": ("t5x-orbax-ocdbt-head", "t5x-legacy", {}, None),
}


QUICK = ("hf-to-maxtext", "paxml-to-maxtext", "maxtext-to-paxml-1.1")


@needs_corpus
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in BETWEEN_SYSTEMS],
)
def test_systems_read_what_units_have_made_of_another_system(tmp_path, case):
    name, to, options, only = BETWEEN_SYSTEMS[case]
    target = tmp_path / ("checkpoint_1000" if "t5x" in case else "out")
    source, more = place(name), {"ignore": ("companions",), "only": only}
    job = job_of(source, target, to, options, 12_000, **more)
    assert len(job.units) > 2
    work(str(target))
    require_same(target, source, to, options, tmp_path / "alone" / target.name, **more)
    if to in service("native").LOADERS:
        assert wherry.verify(target, level="native").ok
    else:  # what one process makes is what the system's library reads, in tests of the format
        for file in (file for unit in job.units for file in unit.files):
            ours, other = target / file.name, tmp_path / "alone" / target.name / file.name
            assert ours.read_bytes() == other.read_bytes(), file.name


# Tensors of which each chunk is a file: units of their own, which other workers read back, in buckets
# too.


OPTIONS = {"shard_size": "4MB"}  # the largest tensor has 18 MB
LARGE = 18_000_000


def request(source, target, **more):
    return convert_request(str(source), [TargetRequest(str(target), "dcp", OPTIONS)], lineage=False, **more)


def job_of_tensors(source, target, unit=5 * MB_OF_TENSORS, **more):
    """A job whose units are files, which are smaller than a unit may be."""
    return split(request(source, target, **more), unit)


def files_of_tensors(target):
    """Name → hash of the files of a target, without its sidecar."""
    place = locate(target)
    names = [entry.name for entry in place.entries() if not entry.is_dir and entry.name != "wherry.json"]
    return {name: hashlib.sha256(place.join(name).read_whole(1 << 30)).hexdigest() for name in names}


def require_same_of_tensors(target, source, tmp_path):
    """Commit, and compare with what one process makes; returns the receipt."""
    [receipt] = commit(target).receipts
    one = wherry.convert(source, tmp_path / "alone", to="dcp", options=OPTIONS, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.resumed_bytes == receipt.bytes_written  # the commit has moved no byte of a tensor
    assert files_of_tensors(target) == files_of_tensors(str(tmp_path / "alone"))
    assert wherry.verify(target, level="digest").ok
    return receipt


def test_each_file_with_chunks_is_a_unit_that_another_worker_reads_back(model, target, tmp_path):
    job = job_of_tensors(model, target)
    assert all(unit.region is None for unit in job.units)
    having = [unit for unit in job.units if any("a.big" in "/".join(part.source) for part in unit.parts)]
    assert len(having) == 5
    assert len({file.name for unit in having for file in unit.files}) == 5
    report = made_and_proved(target)
    assert report.proved == tuple(unit.name for unit in job.units)
    assert require_same_of_tensors(target, model, tmp_path).verification["bytes_by_workers"] > LARGE


def test_a_unit_reads_little_more_of_a_cut_tensor_than_it_writes(model, target):
    """The moves at the ends of its chunk, which the next unit makes too, and the rest of a leaf."""
    job, move = job_of_tensors(model, target), 8 << 20
    for unit in job.units:
        own = [part for part in unit.parts if "a.big" in "/".join(part.source)]
        also_read = [part for part in unit.also_read if "a.big" in "/".join(part.source)]
        read = sum(part.nbytes for part in (*own, *also_read))
        assert read <= 2 * move
        assert all(part.start % move == 0 for part in (*own, *also_read))
    assert sum(unit.nbytes_in for unit in job.units) > LARGE


def test_the_plan_lets_no_byte_be_read_back_by_the_commit_alone(model, tmp_path):
    target = f"memory://bucket{tmp_path}/out"
    _plan, cut = plan_for_workers(request(model, target), 4, 5 * MB_OF_TENSORS, MB_OF_TENSORS)
    whole = convert_request(str(model), [TargetRequest(target, "dcp", {})], lineage=False)
    _plan, regions = plan_for_workers(whole, 4, 5 * MB_OF_TENSORS, MB_OF_TENSORS)
    assert (cut.commit_bytes, cut.large, cut.whole) == (0, "", "")
    assert regions.commit_bytes > LARGE
    assert cut.seconds < regions.seconds


def test_every_unit_is_the_same_in_other_processes_tensors(model, tmp_path):
    first, second = twice(lambda target: job_of_tensors(model, target), tmp_path)
    assert len(first) > 5
    assert first == second
    require_same_of_tensors(str(tmp_path / "one" / "out"), model, tmp_path)


def test_files_of_chunks_may_have_regions(model, tmp_path):
    """On a file system a smaller `--unit` cuts them: workers read back each region too."""
    target = str(tmp_path / "out")
    job = job_of_tensors(model, target, 2 * MB_OF_TENSORS)
    assert sum(unit.region is not None for unit in job.units) > 8
    report = made_and_proved(target)
    assert report.proved == tuple(unit.name for unit in job.units)
    assert require_same_of_tensors(target, model, tmp_path).verification["bytes_by_workers"] > LARGE


def test_files_of_chunks_may_be_open_uploads(model, tmp_path):
    """In a bucket a smaller `--unit` makes parts of them, whose checksums only the commit knows."""
    target = f"memory://bucket{tmp_path}/out"
    with small_parts(256 << 10):
        job = job_of_tensors(model, target, 2 * MB_OF_TENSORS)
        assert sum(unit.region is not None for unit in job.units) > 8
        work(target)
        commit(target)
    wherry.convert(model, tmp_path / "alone", to="dcp", options=OPTIONS, lineage=False)
    assert files_of_tensors(target) == files_of_tensors(str(tmp_path / "alone"))
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("verify", ["store", "none"])
def test_without_read_back_the_files_are_the_same(model, tmp_path, verify):
    target = f"memory://bucket{tmp_path}/out"
    job_of_tensors(model, target, verify=verify)
    work(target)
    commit(target)
    wherry.convert(model, tmp_path / "alone", to="dcp", options=OPTIONS, lineage=False)
    assert files_of_tensors(target) == files_of_tensors(str(tmp_path / "alone"))


def test_torch_loads_what_units_have_made(model, arrays, tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    target = str(tmp_path / "out")
    job_of_tensors(model, target)
    made_and_proved(target)
    commit(target)
    found = {name: torch.zeros(one.shape) for name, one in arrays.items()}
    dcp.load(found, checkpoint_id=target, no_dist=True)
    assert all(found[name].numpy().tobytes() == one.tobytes() for name, one in arrays.items())


def test_a_receipt_that_lies_about_the_checksum_of_a_chunk_is_refused(model, tmp_path):
    """No hash of the tensor shows it: the archive would have a CRC-32 that torch refuses."""
    target = str(tmp_path / "out")
    job_of_tensors(model, target)
    made_and_proved(target)
    lie_about_checksum(target, "a.big")
    with pytest.raises((CorruptError, MismatchError), match="checksum mismatch"):
        commit(target)
    assert not Path(target).exists()


def test_receipts_and_proofs_have_the_checksum_of_each_piece_of_a_chunk(model, arrays, tmp_path):
    """So no tensor is read again by the format's reader, which a wrong checksum would ask for."""
    target, data = f"memory://bucket{tmp_path}/out", arrays["a.big"].tobytes()
    job_of_tensors(model, target)
    made_and_proved(target)
    for records in (receipts(target), proofs(target)):
        rows = [move for row in records.values() for move in row["moves"] if move[0].startswith("a.big")]
        pieces = {tuple(piece) for move in rows for piece in move[5]}
        assert sum(last - first for first, last, _crc in pieces) >= len(data)
        assert all(zlib.crc32(data[first:last]) == crc for first, last, crc in pieces)
    [receipt] = commit(target).receipts
    assert receipt.verification["bytes_by_workers"] > LARGE


def test_a_bit_that_storage_flips_in_a_chunk_is_found_by_a_prover(model, tmp_path):
    target = str(tmp_path / "out")
    job = job_of_tensors(model, target)
    with worker_named("a maker"):
        work(target)
    [file] = job.units[2].files
    [made] = Path(tmp_path).rglob(file.name)
    stamp, data = made.stat(), bytearray(made.read_bytes())
    data[1_000_000] ^= 1
    with made.open("r+b") as opened:
        opened.write(data)
    os.utime(made, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with worker_named("a prover"):
        work(target)
    with pytest.raises((IncompleteError, MismatchError, CorruptError)):
        commit(target)
    assert not Path(target).exists()


def test_a_unit_of_a_worker_that_was_killed_is_made_again(model, target, tmp_path, monkeypatch):
    job = job_of_tensors(model, target)
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, "move", 2)
    assert job.units[1].name in work(target).made
    require_same_of_tensors(target, model, tmp_path)


# Units of a conversion between systems: each reads its part of the source, and their digests of the
# source merge.


OPTIONS_OF_LAYOUTS = {"max_shard_size": "100KB"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of Hugging Face with four layers, and the same for MaxText."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "max_position_embeddings": 64, "hidden_act": "silu", "torch_dtype": "float32", "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64), "model.norm.weight": (64,)}
    for layer in range(4):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (64, 64), f"{at}.self_attn.k_proj.weight": (32, 64),
            f"{at}.self_attn.v_proj.weight": (32, 64), f"{at}.self_attn.o_proj.weight": (64, 64),
            f"{at}.mlp.gate_proj.weight": (96, 64), f"{at}.mlp.up_proj.weight": (96, 64),
            f"{at}.mlp.down_proj.weight": (64, 96), f"{at}.input_layernorm.weight": (64,),
            f"{at}.post_attention_layernorm.weight": (64,),
        }  # fmt: skip
    tensors = {name: random.standard_normal(shape, dtype="f4") for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wherry.convert(folder, folder.parent / "maxtext", to="maxtext", lineage=False)
    return folder


def test_a_scanned_model_becomes_shards_by_several_workers(llama, tmp_path):
    """Each layer of a scanned kernel is read by the unit that writes it."""
    target = str(tmp_path / "out")
    source = str(llama.parent / "maxtext")
    request = convert_request(source, [TargetRequest(target, "hf", OPTIONS_OF_LAYOUTS)], lineage=False)
    job = split(request, 100_000)
    assert len(job.units) > 3
    work(target)
    [receipt] = commit(target).receipts
    one = wherry.convert(source, tmp_path / "one", to="hf", options=OPTIONS_OF_LAYOUTS, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.source.checkpoint_digest == one.source.checkpoint_digest
    assert receipt.source.weights_digest == one.source.weights_digest
    assert receipt.resumed_bytes == receipt.bytes_written
    assert wherry.verify(target, level="roundtrip", against=source).ok
