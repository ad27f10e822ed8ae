"""Files that the checksums of the store prove: nothing is copied, and nothing is there before the commit."""

import pytest

import wherry
from tests.support.object_stores import (
    leftover_names,
    model,
    small_parts,
    uploads_below,
    waiting_parts,
    watched,
)
from wherry.errors import CorruptError, MismatchError
from wherry.store.local_store import locate
from wherry.target.journal import GROUPS
from wherry.target.upload_run import UploadRun

TARGETS = ["safetensors", "torch-zip", "npz"]
PART = 32 << 10


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(autouse=True)
def parts():
    with waiting_parts(PART):
        yield


@pytest.fixture
def target(tmp_path):
    return f"memory://bucket{tmp_path}/out"


def convert(source, target, to="safetensors", verify="store"):
    return wherry.convert(source, target, to=to, verify=verify, ignore=("companions",), lineage=False)


@pytest.mark.parametrize("part", [PART, 16 << 20], ids=["parts", "one part"])
@pytest.mark.parametrize("to", TARGETS)
def test_the_last_act_makes_the_file_of_its_parts(source, target, to, part):
    copied = convert(source, f"{target}-copied", to, "digest").target
    with small_parts(part), watched() as calls:
        made = convert(source, target, to).target
    lasting = [(name, arguments) for name, arguments in calls if not str(arguments[0]).endswith(".lease")]
    names = [name for name, _arguments in lasting]
    creating = [name for name in names if name in ("put_object", "copy_object", "put_part", "assemble")]
    assert creating[-1] == "assemble"
    assert "copy_object" not in names
    assert (made.checkpoint_digest, made.fingerprint) == (copied.checkpoint_digest, copied.fingerprint)
    assert wherry.verify(target, level="digest").ok
    assert [
        name for name in leftover_names(target) if not name.startswith(("out-copied", ".out-copied"))
    ] == []
    assert uploads_below(target) == []


def test_a_file_waits_until_its_checksums_were_compared(source, target, monkeypatch):
    def refused(run):
        assert all(file.is_sent for file in run._files.values())
        assert not locate(target).exists()
        raise MismatchError("another checksum")

    monkeypatch.setattr(UploadRun, "compare_checksums", refused)
    with pytest.raises(MismatchError):
        convert(source, target)
    assert not locate(target).exists()
    assert leftover_names(target) == []
    assert uploads_below(target) == []


@pytest.mark.parametrize("error", [MismatchError("another shape"), CorruptError("no header")])
def test_a_file_that_is_not_what_the_plan_says_is_removed_again(source, target, monkeypatch, error):
    def refused(*_arguments):
        assert locate(target).exists()
        raise error

    monkeypatch.setattr("wherry.converter.job._require_structure", refused)
    with pytest.raises(type(error)):
        convert(source, target)
    assert not locate(target).exists()
    assert leftover_names(target) == []
    assert uploads_below(target) == []


def test_the_journal_is_written_for_each_fiftieth_and_removed_together(source, target):
    with small_parts(4 << 10), watched() as calls:
        convert(source, target)
    written = [args for name, args in calls if name == "put_object" and "/journal-" in args[0]]
    removals = [args[0] for name, args in calls if name == "remove_many"]
    assert len([1 for name, _args in calls if name == "put_part"]) > 4 * GROUPS
    assert GROUPS * 3 // 5 <= len(written) <= GROUPS * 5 // 4 + 2
    assert [len(one) for one in removals] == [len(written) - 1, 1]
