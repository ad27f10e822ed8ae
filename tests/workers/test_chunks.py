"""Units of Orbax and its relatives: chunks of one tensor in the files of several units, read by their libraries."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.corpus import needs_corpus, place
from tests.support.jobs import Killed, as_dead, changed, killed, receipts
from tests.support.object_stores import leftover_names
from wherry.core.request import TargetRequest, convert_request
from wherry.core.services import service
from wherry.errors import MismatchError
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.work import work

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
def arrays():
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def model(arrays, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(arrays, path)
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
def test_a_tensor_in_the_files_of_several_units_has_the_digest_of_one_process(model, target, tmp_path, case):
    job = job_of(model, target, "orbax", CASES[case])
    sharing = [unit for unit in job.units if any(part.source == ("big.w",) for part in unit.parts)]
    assert len(sharing) > 2
    assert all(unit.also_read for unit in sharing) == (case != "boxes")
    work(target)
    require_same(target, model, "orbax", CASES[case], tmp_path / "alone")


@pytest.mark.parametrize("case", CASES)
def test_orbax_reads_what_units_have_made(model, arrays, tmp_path, case):
    import orbax.checkpoint as ocp

    job_of(model, tmp_path / "out", "orbax", CASES[case])
    work(str(tmp_path / "out"))
    commit(str(tmp_path / "out"))
    asyncio.set_event_loop(asyncio.new_event_loop())
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def test_the_files_are_the_same_bytes_as_those_of_one_process(model, tmp_path):
    job = job_of(model, tmp_path / "out", "orbax", CASES["ocdbt"])
    work(str(tmp_path / "out"))
    commit(str(tmp_path / "out"))
    wherry.convert(model, tmp_path / "alone", to="orbax", options=CASES["ocdbt"], lineage=False)
    for file in (file for unit in job.units for file in unit.files):
        assert (tmp_path / "out" / file.name).read_bytes() == (tmp_path / "alone" / file.name).read_bytes()


@pytest.mark.parametrize("step", ["move", "finish", "_describe_file"])
def test_a_unit_of_chunks_whose_worker_was_killed_is_made_again(model, target, tmp_path, monkeypatch, step):
    job_of(model, target, "orbax", CASES["ocdbt"])
    with monkeypatch.context() as patch:
        as_dead(patch)
        killed(target, patch, step, 2)
    work(target)
    require_same(target, model, "orbax", CASES["ocdbt"], tmp_path / "alone")


def test_two_units_with_one_move_must_agree_about_it(model, target):
    """One of them has read something else at the edge."""
    job = job_of(model, target, "orbax", CASES["ocdbt"])
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


def test_a_commit_of_a_database_that_was_killed_is_taken_up(model, target, tmp_path, monkeypatch):
    job_of(model, target, "orbax", CASES["ocdbt"])
    work(target)
    for call in ("wherry.converter.job.complete", "wherry.workers.records.Records.end"):
        with monkeypatch.context() as patch:
            patch.setattr(call, _killed)
            with pytest.raises(Killed):
                commit(str(target))
    [receipt] = commit(str(target)).receipts
    assert receipt.already
    assert leftover_names(target) == []
    alone = wherry.convert(model, tmp_path / "alone", to="orbax", options=CASES["ocdbt"], lineage=False)
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
