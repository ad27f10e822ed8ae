"""The lease: one run at a time, dead ones are evicted, living ones never."""

import json
import os
import time

import pytest

from wherry import lease
from wherry.errors import TargetInUseError
from wherry.lease import Lease


@pytest.fixture
def path(tmp_path):
    """Where a lease lies."""
    return tmp_path / ".wherry-x.lease"


def leave(path, *, age=0.0, **owner):
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "id": "theirs", **owner}))
    os.utime(path, (time.time() - age, time.time() - age))


def test_two_runs_exclude_each_other_and_the_end_frees_it(path):
    with Lease(path, "t"):
        with pytest.raises(TargetInUseError, match=f"process {os.getpid()} on "), Lease(path, "t"):
            pass
        assert path.exists()
    assert os.listdir(path.parent) == []


def test_an_expired_lease_of_another_machine_is_taken_over(path):
    leave(path, age=lease.EXPIRY_SECONDS + 1)
    with Lease(path, "t"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert os.listdir(path.parent) == []


def test_a_living_lease_of_another_machine_is_not(path):
    leave(path, age=lease.EXPIRY_SECONDS / 2)
    with pytest.raises(TargetInUseError, match="process 1 on elsewhere"), Lease(path, "t"):
        pass
    assert json.loads(path.read_text())["id"] == "theirs"


def test_a_lease_that_was_lost_is_left_to_its_new_holder(path):
    with Lease(path, "t"):
        leave(path)
    assert json.loads(path.read_text())["id"] == "theirs"


def test_a_lease_made_while_a_dead_one_was_looked_at_is_put_back(path, monkeypatch):
    leave(path, age=lease.EXPIRY_SECONDS + 1)
    real = lease._owner

    def slow(where):
        found = real(where)
        if where == path and found["id"] == "theirs":
            leave(path, id="newer", pid=2)
            monkeypatch.setattr(lease, "_owner", real)
        return found

    monkeypatch.setattr(lease, "_owner", slow)
    with pytest.raises(TargetInUseError, match="process 2 on elsewhere"), Lease(path, "t"):
        pass
    assert json.loads(path.read_text())["id"] == "newer"
    assert os.listdir(path.parent) == [path.name]
