"""hf:// as a source and as a target."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.hub_server import LFS_FROM, PART
from tests.support.object_stores import model
from wherry.errors import MismatchError, NotFoundError, StorageError, TargetExistsError, TargetInUseError
from wherry.store.hub import HubPath, is_occupied, parse_hub_path
from wherry.store.local_store import locate
from wherry.target.clean import clean

REPO = "owner/model"


@pytest.fixture
def source(tmp_path):
    return model(tmp_path / "model", rows=100, count=4)


def convert(source, target, **how):
    return wherry.convert(source, target, to="hf", lineage=False, **how)


def files(server, branch="main"):
    return server.commits[server.head(REPO, branch)][2]


def commits(server):
    """Summaries of the commits that are not the first."""
    return [message.partition("\n")[0] for parent, message, _files in server.commits.values() if parent]


def answer_when(server, method, part, answer, times=1):
    """Answer the next requests of a kind instead of the Hub; `answer` gets the act that would answer them."""
    left = [times]

    def fault(one, path, act):
        if one != method or part not in path or not left[0]:
            return None
        left[0] -= 1
        return answer(act)

    server.faults.append(fault)


def test_a_checkpoint_appears_in_one_commit(server, source):
    receipt = convert(source, f"hf://{REPO}")
    assert receipt.verification["ok"]
    names = sorted(files(server))
    assert names == [".gitattributes", "README.md", "config.json", "model.safetensors", "wherry.json"]
    ours = (source / "model.safetensors").stat().st_size
    assert ours > PART > LFS_FROM, "it is sent as several parts of an LFS object"
    assert wherry.verify(f"hf://{REPO}", level="digest").ok
    assert list(server.branches[REPO]) == ["main"]
    assert len(commits(server)) == 2, "that of the proof, on a branch that is gone, and this one"
    assert len([path for path in server.sent("PUT") if "/upload/" in path]) == -(-ours // PART), "sent once"


def test_the_page_of_the_repository_has_origin_and_digests(server, source):
    receipt = convert(source, f"hf://{REPO}")
    text = server.data(REPO, "main", "README.md").decode()
    assert receipt.target.checkpoint_digest in text
    assert str(source) in text


def test_a_page_that_is_there_stays(server, source):
    server.create(REPO, {".gitattributes": b"", "README.md": b"---\nlicense: mit\n---\nmine"})
    convert(source, f"hf://{REPO}")
    assert server.data(REPO, "main", "README.md") == b"---\nlicense: mit\n---\nmine"


def test_a_step_is_a_branch(server, source):
    head = server.head(REPO, "main")
    convert(source, f"hf://{REPO}@step-100")
    assert server.head(REPO, "main") == head
    assert wherry.verify(f"hf://{REPO}@step-100", level="digest").ok
    assert sorted(server.branches[REPO]) == ["main", "step-100"]
    assert len(commits(server)) == 1, "the branch begins at the commit that was proved"


def test_a_step_is_a_branch_without_the_files_of_another_step(server, source, tmp_path):
    other = model(tmp_path / "other", rows=10, count=2, seed=1)
    (other / "extra.json").write_text("{}")
    convert(other, f"hf://{REPO}", ignore=("companions",))
    server.branches[REPO]["main"] = server.add_commit(
        server.head(REPO, "main"), "more", {**files(server), "extra.bin": b"x"}
    )
    convert(source, f"hf://{REPO}@step-2")
    assert sorted(files(server, "step-2")) == sorted(
        [".gitattributes", "README.md", "config.json", "model.safetensors", "wherry.json"]
    )
    assert wherry.verify(f"hf://{REPO}@step-2", level="digest").ok


def test_a_folder_next_to_others(server, source):
    for name in ("a", "b"):
        convert(source, f"hf://{REPO}/runs/{name}")
        assert wherry.verify(f"hf://{REPO}/runs/{name}", level="digest").ok
    assert "README.md" not in files(server)
    sent = len({path for path in server.sent("PUT") if "/upload/" in path})  # a busy server gets some twice
    assert sent == -(-(source / "model.safetensors").stat().st_size // PART), "the second has the same bytes"


def test_a_file(server, source):
    target = f"hf://{REPO}/weights.safetensors"
    wherry.convert(source, target, to="safetensors", lineage=False, ignore=("companions",))
    assert wherry.verify(target, level="digest").ok
    assert "weights.safetensors.wherry.json" in files(server)


def test_again_is_already_and_another_is_refused(server, source, tmp_path):
    convert(source, f"hf://{REPO}")
    assert convert(source, f"hf://{REPO}").already
    other = model(tmp_path / "other", rows=10, count=2, seed=1)
    with pytest.raises(TargetExistsError):
        convert(other, f"hf://{REPO}")


def test_a_repository_that_does_not_exist(server, source):
    with pytest.raises(NotFoundError, match="repository not found") as caught:
        convert(source, "hf://owner/none")
    assert caught.value.cure == "create it: hf repos create owner/none"


def test_somebody_elses_commit_meanwhile_is_kept(server, source):
    def commit_first(act):
        head = server.head(REPO, "main")
        known = server.commits[head][2]
        server.branches[REPO]["main"] = server.add_commit(head, "another", {**known, "LICENSE": b"x"})
        return act()

    answer_when(server, "POST", "/commit/main", commit_first)
    convert(source, f"hf://{REPO}")
    assert files(server)["LICENSE"] == b"x"
    assert wherry.verify(f"hf://{REPO}", level="digest").ok


def test_somebody_elses_target_meanwhile_is_not_replaced(server, source):
    def commit_first(act):
        head = server.head(REPO, "main")
        server.branches[REPO]["main"] = server.add_commit(head, "another", {"config.json": b"another"})
        return act()

    answer_when(server, "POST", "/commit/main", commit_first)
    with pytest.raises(TargetExistsError):
        convert(source, f"hf://{REPO}")
    assert files(server) == {"config.json": b"another"}
    assert list(server.branches[REPO]) == ["main"]


@pytest.mark.parametrize("where", ["/commit/main", "/commit/wherry-", "/branch/wherry-", "/branch/v1"])
def test_a_lost_answer_is_no_failure(server, source, where):
    def lose(act):
        act()
        return 502, {}, b"lost"

    answer_when(server, "POST", where, lose)
    target = f"hf://{REPO}@v1" if where.endswith("v1") else f"hf://{REPO}"
    convert(source, target)
    assert wherry.verify(target, level="digest").ok
    assert not [name for name in server.branches[REPO] if name.startswith("wherry-")]


def test_another_run_of_the_same_conversion_is_noticed(server, source):
    """It takes the branch of this one for the leftover of a killed run."""

    def remove_branches(act):
        for name in [one for one in server.branches[REPO] if one.startswith("wherry-")]:
            del server.branches[REPO][name]
        return act()

    answer_when(server, "POST", "/commit/wherry-", remove_branches)
    with pytest.raises(TargetInUseError, match="another run of the same conversion"):
        convert(source, f"hf://{REPO}")
    assert not commits(server)


class KilledError(BaseException):
    pass


def killed(source, server):
    """Kill a run while it reads back; returns the branch that it leaves."""

    def kill(*_):
        raise KilledError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr("wherry.target.copied_staging.require_same", kill)
        patch.setattr("wherry.store.hub.HubCommit.__exit__", lambda *_: None)
        convert(source, f"hf://{REPO}")
    (left,) = (one for one in server.branches[REPO] if one != "main")
    assert sorted(files(server)) == [".gitattributes"]
    return left


def test_the_leftover_of_a_killed_run_is_removed_by_the_next(server, source):
    assert killed(source, server).startswith("wherry-")
    server.requests.clear()
    convert(source, f"hf://{REPO}")
    assert list(server.branches[REPO]) == ["main"]
    assert not [path for path in server.sent("PUT") if "/upload/" in path], "the Hub has the bytes"


def test_the_leftover_of_a_killed_run_is_cleaned(server, source):
    left = killed(source, server)
    server.branches[REPO] |= {
        "wherry-0123abcd": server.head(REPO, "main"),
        "wherry-notes": server.head(REPO, "main"),
    }
    found = clean(f"hf://{REPO}", dry_run=True)
    assert {(one.uri, one.reason) for one in found} == {
        (f"hf://{REPO}@{left}", "dry run"),
        (f"hf://{REPO}@wherry-0123abcd", "it has no commit yet; may be in use"),
    }
    young = clean(f"hf://{REPO}", min_age=1e12)
    assert not any(one.removed for one in young)
    assert [one.uri for one in clean(f"hf://{REPO}") if one.removed] == [f"hf://{REPO}@{left}"]
    assert sorted(server.branches[REPO]) == ["main", "wherry-0123abcd", "wherry-notes"]
    with pytest.raises(NotFoundError):
        clean("hf://owner/none")


def test_xet_is_switched_off_for_the_call_only(server, source, monkeypatch):
    from huggingface_hub import constants

    seen = []
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    answer_when(
        server, "POST", "/preupload/", lambda act: (seen.append(constants.HF_HUB_DISABLE_XET), act())[1]
    )
    convert(source, f"hf://{REPO}")
    assert seen == [True]
    assert constants.HF_HUB_DISABLE_XET is False


@pytest.mark.parametrize(
    ("names", "path", "there"),
    [
        ([".gitattributes", "README.md", "LICENSE"], "", False),
        ([".gitattributes", "config.json"], "", True),
        (["a/x", "ab/y"], "a", True),
        (["ab/y", "a.txt"], "a", False),
        (["a"], "a", True),
    ],
)
def test_where_a_target_exists(names, path, there):
    assert is_occupied(names, path) is there


def test_wrong_bytes_never_appear(server, source):
    def flipped(act):
        status, headers, data = act()
        return status, headers, bytes([data[0] ^ 1]) + data[1:]

    answer_when(server, "GET", "model.safetensors", flipped)
    head = server.head(REPO, "main")
    with pytest.raises(MismatchError, match="read-back differs"):
        convert(source, f"hf://{REPO}")
    assert server.head(REPO, "main") == head
    assert list(server.branches[REPO]) == ["main"]


def test_what_the_hub_has_is_not_sent_again(server, source):
    answer_when(server, "POST", "/commit/", lambda _act: (403, {}, json.dumps({"error": "no"}).encode()))
    with pytest.raises(StorageError) as caught:
        convert(source, f"hf://{REPO}")
    assert (caught.value.kind, caught.value.exit_code) == ("forbidden", 10)
    first = len([path for path in server.sent("PUT") if "/upload/" in path])
    convert(source, f"hf://{REPO}")
    assert first > 0
    assert len([path for path in server.sent("PUT") if "/upload/" in path]) == first


def test_without_a_token_it_says_so(server, source, monkeypatch):
    server.token = "another"
    with pytest.raises(StorageError) as caught:
        convert(source, f"hf://{REPO}/x")
    assert caught.value.kind in ("no-credentials", "expired")
    assert "hf auth login" in caught.value.cure


def test_nothing_is_left_on_the_local_disk(server, source, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    convert(source, f"hf://{REPO}")
    assert not list((tmp_path / "temporary").iterdir())
    assert locate(f"hf://{REPO}/wherry.json").exists()


# hf:// as a source: one commit, and few requests by range.


def pushed(server, branch="main", **files):
    """Commit files to a branch of owner/model."""
    head = server.head("owner/model", branch)
    known = server.commits[head][2]
    server.branches["owner/model"][branch] = server.add_commit(head, "more", {**known, **files})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("owner/model", HubPath("model", "owner/model", "", "")),
        ("models/owner/model/a/b", HubPath("model", "owner/model", "", "a/b")),
        ("datasets/owner/data@v1/x", HubPath("dataset", "owner/data", "v1", "x")),
        ("owner/model@refs/pr/3/x", HubPath("model", "owner/model", "refs/pr/3", "x")),
        ("owner/model@step%2F10/x", HubPath("model", "owner/model", "step/10", "x")),
        ("model", None),
    ],
)
def test_the_parts_of_a_path(text, place):
    assert parse_hub_path(text) == place
    if place is not None:
        assert parse_hub_path(place.text) == place


def test_bytes_are_read_by_range_with_one_request_each(server):
    pushed(server, **{"x.bin": bytes(range(256))})
    place = locate("hf://owner/model/x.bin")
    assert place.stat().size == 256
    server.requests.clear()
    assert place.read(10, 20) == bytes(range(10, 20))
    assert place.read(250, 300) == bytes(range(250, 256))
    assert place.read(256, 300) == b""
    assert len(server.requests) == 3


def test_a_branch_that_moves_is_read_as_it_was(server):
    pushed(server, **{"x.bin": b"before", "y.bin": b"before"})
    place = locate("hf://owner/model/x.bin")
    assert place.read(0, 9) == b"before"
    pushed(server, **{"x.bin": b"after!", "y.bin": b"after!"})
    assert place.read(0, 9) == b"before"
    assert place.parent.join("y.bin").read(0, 9) == b"before"
    assert locate("hf://owner/model/x.bin").read(0, 9) == b"after!"


def test_what_does_not_exist(server):
    assert locate("hf://owner/model/x").stat() is None
    assert locate("hf://owner/none/x").stat() is None
    assert locate("hf://owner/model@none/x").stat() is None
    with pytest.raises(NotFoundError):
        wherry.detect("hf://owner/none")


def test_a_checkpoint_is_converted_from_there(server, tmp_path):
    save_file(
        {f"layers.{n}.w": np.full((64, 64), n, np.float32) for n in range(40)}, tmp_path / "m.safetensors"
    )
    pushed(server, **{"model.safetensors": (tmp_path / "m.safetensors").read_bytes()})
    wherry.convert(
        "hf://owner/model/model.safetensors", tmp_path / "out.safetensors", to="safetensors", lineage=False
    )
    converted, source = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "m.safetensors")
    assert {name: value.tobytes() for name, value in converted.items()} == {
        name: value.tobytes() for name, value in source.items()
    }
    reads = [path for path in server.sent("GET") if "/resolve/" in path]
    assert len(reads) < 12
    assert all("/resolve/main/" not in path for path in reads), "a commit, not a branch"
