"""Files that were deleted while their sidecar stayed: they are named, and the audit's cure works as it is printed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support import audit as support
from tests.support.forms import names_for, options_for
from tests.support.registry import model_folder
from tests.support.variants import WRITTEN
from wherry.auditor.audit import audit
from wherry.cli import cli
from wherry.errors import IncompleteError, NotACheckpointError, UnsupportedError

KEPT = ("wherry.json", "config.json", "tokenizer.json")


def emptied(folder):
    """Delete the weights of a checkpoint, but neither its sidecar nor its companions."""
    for path in sorted(Path(folder).rglob("*"), reverse=True):
        if path.is_file() and path.name not in KEPT:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def made(tmp_path, to):
    source = tmp_path / "plain.safetensors"
    others = {name: np.full(3, 2, "f4") for name in names_for(to)}
    save_file({"a": np.ones((2, 3), "f4"), "b": np.zeros(4, "f4"), **others}, source)
    source = model_folder(tmp_path / "model") if to == "huggingface" else source
    return Path(wherry.convert(source, tmp_path / "out", to=to, options=options_for(to)).target.uri)


def test_the_missing_file_is_named(tmp_path):
    out = made(tmp_path, "huggingface")
    emptied(out)
    reason = "model.safetensors is missing: wherry.json records a checkpoint of 2 tensors in format huggingface here"
    found = wherry.verify(out)
    assert (found.verdict, found.exit_code, found.failed[0].reason) == ("incomplete", 5, reason)
    assert (wherry.detect(out).verdict, wherry.detect(out).reason) == ("incomplete", reason)
    for verb in (
        ["inspect", out],
        ["convert", out, tmp_path / "x", "--to", "orbax"],
        ["detect", out, "--json"],
    ):
        done = CliRunner().invoke(cli, list(map(str, verb)))
        assert isinstance(done.exception, IncompleteError) or done.exit_code == 5
    with pytest.raises(UnsupportedError):
        wherry.verify(out, format="orbax")


def test_a_folder_without_a_sidecar_is_still_no_checkpoint(tmp_path):
    out = made(tmp_path, "huggingface")
    emptied(out)
    (out / "wherry.json").unlink()
    with pytest.raises(NotACheckpointError):
        wherry.verify(out)


@pytest.mark.parametrize(
    "to", [name for name in WRITTEN if not name.startswith(("lingua", "gguf"))]
)  # these need a model
def test_the_cure_restores_it(tmp_path, to):
    out = made(tmp_path, to)
    single = out.is_file()
    out.unlink() if single else emptied(out)
    [finding] = [one for one in audit().findings if one.severity == "error"]
    assert finding.kind == ("gone" if single else "incomplete")
    support.carried_out(finding.cure)
    assert audit(level="digest").ok
    assert wherry.verify(out, level="digest").verdict == "ok"


def test_a_copy_without_a_sidecar_is_converted_and_not_fetched(tmp_path):
    """It has the same identity, but no sidecar states it; `wherry fetch` refuses it."""
    out = made(tmp_path, "safetensors")
    out.unlink()
    [finding] = [one for one in audit().findings if one.severity == "error"]
    assert "wherry fetch" not in finding.cure
    support.carried_out(finding.cure)
    assert audit().ok


def test_what_was_moved_away_before_is_kept(tmp_path):
    out = made(tmp_path, "orbax")
    for _ in range(2):
        emptied(out)
        [finding] = [one for one in audit().findings if one.severity == "error"]
        support.carried_out(finding.cure)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out.damaged", "out.damaged-1"]
