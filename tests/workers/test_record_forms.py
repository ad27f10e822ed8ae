"""Records of a job that are signed, but have another form than their kind: an error that names record and field."""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import changed, made_and_proved, made_job, proofs, receipts, row_of
from wherry.errors import CorruptError
from wherry.storage.stores import locate
from wherry.target.leftovers import JOB
from wherry.workers.commit import commit
from wherry.workers.records import SharedFile, decode, job_records
from wherry.workers.work import work

REQUESTS = [
    ("source", 1),
    ("source", {"path": "a"}),
    ("targets", [{"uri": "a", "to": 5}]),
    ("targets", "a"),
    ("memory", None),
    ("forged", "x"),
]
FIELDS = [
    ("header", []),
    ("header", {"version": 1}),
    ("unit_bytes", "1"),
    ("unit_bytes", 0),
    ("units", [None]),
    ("members", "ab"),
    ("request", 0.5),
]
RECEIPTS = [("files", [["a", "1", "m"]]), ("moves", {}), ("hashed", {"blake3": 1}), ("parts", [["a", {}]])]
PROOFS = [("of", [["a"]]), ("blocks", [["a", "b", -1, 0, ""]]), ("seconds", True)]


@pytest.fixture
def job(tmp_path, source):
    target = str(tmp_path / "out")
    made_job(source, target)
    made_and_proved(target)
    return target


@pytest.mark.parametrize(("name", "value"), REQUESTS)
def test_a_request_of_another_form_is_refused_by_every_process(job, name, value):
    row = row_of(job_records(locate(job)), JOB)["request"]
    changed(job, JOB, request={**row, name: value})
    for run in (work, commit):
        with pytest.raises(CorruptError, match=rf"the record job\.json is invalid at request\.{name}"):
            run(job)


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_a_job_of_another_form_is_refused(job, name, value):
    changed(job, JOB, **{name: value})
    with pytest.raises(CorruptError, match=rf"the record job\.json is invalid at {name}"):
        work(job)


@pytest.mark.parametrize(("name", "value"), RECEIPTS)
def test_a_receipt_of_another_form_is_refused(job, name, value):
    record = next(iter(receipts(job)))
    changed(job, record, **{name: value})
    with pytest.raises(CorruptError, match=rf"the record {record} is invalid at {name}"):
        commit(job)


@pytest.mark.parametrize(("name", "value"), PROOFS)
def test_a_proof_of_another_form_is_refused(job, name, value):
    record = next(iter(proofs(job)))
    changed(job, record, **{name: value})
    with pytest.raises(CorruptError, match=rf"the record {record} is invalid at {name}"):
        commit(job)


@pytest.mark.parametrize(
    ("at", "value", "said"), [(1, "0", "counted by integers"), (3, [7], "a leaf is outside the bytes")]
)
def test_a_move_that_is_none_is_refused(job, at, value, said):
    record, row = next(iter(receipts(job).items()))
    move = list(row["moves"][0])
    move[at] = value
    changed(job, record, moves=[move])
    with pytest.raises(CorruptError, match=said):
        commit(job)


def test_a_job_of_a_former_schema_is_refused(job):
    changed(job, JOB, schema=1)
    for run in (work, commit):
        with pytest.raises(CorruptError, match="the job has schema 1, but this wherry requires 2") as caught:
            run(job)
        assert "use the wherry that wrote it, or remove " in caught.value.cure


@pytest.mark.parametrize("row", [{}, {"token": "00", "upload": {"path": "a", "key": "b", "run": "c"}}])
def test_a_shared_file_has_a_token_or_an_upload(row):
    with pytest.raises(CorruptError, match="either a token or an upload"):
        decode(SharedFile, json.dumps(row).encode(), "shared-0011", "job")
