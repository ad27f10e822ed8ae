"""The beginning of a digest names a checkpoint in every command, as README says."""

from __future__ import annotations

import numpy as np
import pytest
from click import Command
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.command import small
from tests.support.signing import key_pair
from wherry.cli import main
from wherry.core.units import short

pytest.importorskip("mlflow")
pytestmark = pytest.mark.usefixtures("own_home")

# What is typed → a part of what it prints. DIGEST is the beginning of a digest, PLACE where the checkpoint is, SHORT
# how its digest is shown.
VERBS = {
    "detect DIGEST": "PLACE",
    "inspect DIGEST": "PLACE",
    "verify DIGEST": "ok",
    "resolve DIGEST": "PLACE",
    "ls DIGEST": "DIGITS",
    "du DIGEST": "1",
    "audit DIGEST": "1 of them ok",
    "emit DIGEST --json": "PLACE",
    "lineage show DIGEST": "SHORT",
    "lineage why DIGEST": "SHORT",
    "plan DIGEST new.npz --to npz": "npz",
    "convert DIGEST new.npz --to npz": "npz",
    "split DIGEST new --to dcp": "new",
    "merge DIGEST*0.5 DIGEST*0.5 new.safetensors --to safetensors": "new",
    "fetch DIGEST new": "new",
    "diff DIGEST DIGEST": "",
    "sign DIGEST --key key.pem": "",
    "register DIGEST --model by-digest": "by-digest",
    "promote DIGEST --model by-digest": "by-digest",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    return tmp_path


def typed(line):
    """Exit code of a command, and what it printed."""
    done = CliRunner().invoke(Command("run", callback=lambda: main(line.split())), [])
    return done.exit_code, done.output


@pytest.mark.parametrize("line", VERBS)
def test_the_beginning_of_a_digest_names_a_checkpoint(line, here, monkeypatch):
    save_file({"a": np.arange(12, dtype=np.float32)}, "one.safetensors")
    receipt = wherry.convert("one.safetensors", "made", to="orbax")
    monkeypatch.setattr("wherry.core.emit.post", lambda *_given, **_how: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    if line.startswith("sign"):
        key_pair(here)
    digest = receipt.target.checkpoint_digest.partition(":")[2][:12]
    code, text = typed(line.replace("DIGEST", digest))
    wanted = VERBS[line].replace("PLACE", receipt.target.uri)
    shown = short(receipt.target.checkpoint_digest)
    wanted = wanted.replace("SHORT", shown).replace("DIGITS", shown.partition(":")[2])
    assert (code, wanted in text.replace("\n", "")) == (0, True), text


def test_a_digest_that_nobody_knows_is_a_name_like_any_other(here):
    small(here / "one.safetensors")
    assert [typed(f"{verb} 0123456789ab")[0] for verb in ("resolve", "audit", "detect")] == [3, 3, 3]
    wherry.convert("one.safetensors", "0123456789ab", to="safetensors", lineage=False)
    assert typed("detect 0123456789ab")[0] == 0
