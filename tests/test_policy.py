"""The policy of a promotion: each gate on what is on record, and the file that it is read from."""

from __future__ import annotations

import re

import pytest

import wherry
from tests.registry_support import converted
from wherry.errors import MismatchError, UsageError
from wherry.ledger import open_ledger, record_verification
from wherry.policy import Policy, policy_of
from wherry.sidecar import read_sidecar
from wherry.store import locate

pytest.importorskip("mlflow")


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory):
    """One store for the module: a new one takes seconds to make its tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERRY_HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("WHERRY_LEDGER", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def wherry_home(own_home):
    """Not one for every test: see above."""


@pytest.fixture
def name(request):
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def candidate(tmp_path, name):
    """A registered candidate."""
    receipt = converted(tmp_path / "one")
    wherry.register(receipt, name, alias="candidate")
    return receipt


def test_gates_judge_what_is_on_record(candidate, name):
    subject = f"models:/{name}@candidate"
    for gates, gate in (
        ({"optimizer": "present"}, "optimizer"),
        ({"companions": ["*.model"]}, "companions"),
        ({"recorded": ["native"]}, "recorded"),
        ({"approvers": ["alice"]}, "approvers"),
        ({"max_age_days": 1e-9}, "max_age_days"),
    ):
        with pytest.raises(MismatchError, match=gate):
            wherry.promote(subject, gates=gates)
    with pytest.raises(MismatchError, match="level: asked for at least digest"):
        wherry.promote(subject, level="present")
    sidecar = read_sidecar(locate(candidate.target.uri))
    with open_ledger() as ledger:
        outcome = {"level": "native", "verdict": "ok", "ok": True}
        record_verification(ledger, sidecar.checkpoint, outcome)
    done = wherry.promote(subject, gates=Policy(recorded=("native",), max_error=0, max_age_days=1))
    assert {row.gate for row in done.gates} == {
        "level",
        "recorded",
        "max_error",
        "max_age_days",
        "extra_companions",
    }


def test_a_later_failed_verification_counts(candidate, name):
    sidecar = read_sidecar(locate(candidate.target.uri))
    with open_ledger() as ledger:
        for verdict in ("ok", "altered"):
            record_verification(
                ledger, sidecar.checkpoint, {"level": "native", "verdict": verdict, "ok": verdict == "ok"}
            )
    with pytest.raises(MismatchError, match="not on record"):
        wherry.promote(f"models:/{name}@candidate", gates={"recorded": ["native"]})


def test_a_policy_file_and_its_errors(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text('[policy]\noptimizer = "absent"\ncompanions = ["tokenizer*"]\n')
    assert policy_of(file) == Policy(optimizer="absent", companions=("tokenizer*",))
    assert policy_of(None) == Policy()
    file.write_text('optimiser = "absent"\n')
    with pytest.raises(UsageError, match=r"policy\.toml: optimiser"):
        policy_of(file)
    file.write_text("level = [")
    with pytest.raises(UsageError, match=r"policy\.toml"):
        policy_of(file)
    with pytest.raises(UsageError, match="max_error"):
        policy_of({"max_error": -1})
