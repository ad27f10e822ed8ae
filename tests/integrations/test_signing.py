"""Signing: what model_signing verifies, what it makes, and what was done to a checkpoint since."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.forms import options_for
from tests.support.signing import write_keys
from wherry.cli import cli
from wherry.errors import (
    CorruptError,
    HostileError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from wherry.prove.verify import verify as examine
from wherry.store.local_store import locate
from wherry.store.sidecar import signature_location

pytest.importorskip("cryptography", reason="cryptography is not installed")

from cryptography.hazmat.primitives.asymmetric import ec, rsa

from wherry.integrations import signing

CURVES = {"p256": ec.SECP256R1(), "p384": ec.SECP384R1(), "p521": ec.SECP521R1()}
GOLDEN = Path(__file__).parents[1] / "golden" / "records"


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, ec.generate_private_key(CURVES["p256"]))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file({"a": np.arange(4096, dtype=np.float32).reshape(64, 64), "b": np.ones(5, np.int32)}, path)
    return path


def made(source, tmp_path, to):
    name = {"safetensors": "copy.safetensors"}.get(to, to)
    options = {"metadata_format": "np"} if to == "safetensors" else {}
    return wherry.convert(source, tmp_path / name, to=to, options=options, family="none").target.uri


def model_signing(*words):
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    pytest.importorskip("OpenSSL", reason="pyOpenSSL is not installed")
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_model_signing_accepts_what_we_sign_and_finds_what_was_altered(source, tmp_path, keys, to):
    uri = made(source, tmp_path, to)
    place = signing.sign(uri, keys[0])
    words = ("verify", "key", uri, "--signature", place, "--public_key", keys[1])
    done = model_signing(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    file = next(tmp_path.joinpath("orbax").rglob("d/*")) if to == "orbax" else tmp_path / "copy.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert model_signing(*words).returncode != 0
    assert ("." if to == "safetensors" else f"d/{file.name}", "was altered") in [
        (name if name == "." else name[-len(f"d/{file.name}") :], reason)
        for name, reason in signing.verify(uri, keys[1]).failed
    ]


def test_we_accept_what_model_signing_signs(source, tmp_path, keys):
    uri = made(source, tmp_path, "huggingface")
    out = tmp_path / "model_signing.sig"
    done = model_signing("sign", "key", uri, "--signature", out, "--private_key", keys[0])
    assert done.returncode == 0, done.stdout + done.stderr
    found = signing.verify(uri, keys[1], signature=out)
    assert found.ok
    assert found.identity == {}
    (tmp_path / "huggingface" / "tokenizer.json").write_text("{}")
    assert signing.verify(uri, keys[1], signature=out).failed == (
        ("tokenizer.json", "was added after signing"),
    )


@pytest.mark.parametrize("curve", CURVES)
def test_curves_and_hints(source, tmp_path, curve):
    private, public = write_keys(tmp_path, ec.generate_private_key(CURVES[curve]))
    signing.sign(source, private)
    found = signing.verify(source, public)
    assert found.ok
    assert found.files == 1
    bundle = json.loads((tmp_path / "source.safetensors.wherry.sig").read_text())
    assert bundle["verificationMaterial"]["publicKey"]["hint"] == found.signer


@pytest.mark.parametrize("to", ["orbax", "huggingface", "dcp", "t5x", "safetensors", "flax-msgpack"])
def test_a_signature_changes_nothing_of_the_checkpoint(source, tmp_path, keys, to):
    spelled = options_for(to) or {"split": "."}
    tree = wherry.convert(source, tmp_path / "tree", to="orbax", options=spelled).target.uri
    origin = tree if to in ("t5x", "flax-msgpack") else source
    options = {"metadata_format": "np"} if to == "safetensors" else {}
    target = tmp_path / "target.file"
    receipt = wherry.convert(origin, target, to=to, family="none", options=options)
    before, found = wherry.detect(target), list(wherry.discover(tmp_path))
    signing.sign(receipt.target.uri, keys[0])
    assert wherry.detect(target) == before
    assert list(wherry.discover(tmp_path)) == found
    assert examine(receipt.target.uri, level="digest").ok
    assert wherry.convert(origin, target, to=to, family="none", options=options).already, (
        "the fingerprint is the same"
    )
    again = wherry.convert(receipt.target.uri, tmp_path / "again", to=receipt.target.format, options=options)
    assert again.target.checkpoint_digest == receipt.target.checkpoint_digest, "no companion of the next one"
    assert not (tmp_path / "again" / "wherry.sig").exists()


def test_the_statement_binds_the_digests(source, tmp_path, keys):
    uri = made(source, tmp_path, "orbax")
    signing.sign(uri, keys[0])
    known = wherry.convert(source, uri, to="orbax").target
    assert signing.verify(uri, keys[1]).identity["checkpoint_digest"] == known.checkpoint_digest
    assert re.fullmatch(r"\d+ files match the signature of key [0-9a-f]{12}", signing.require(uri, keys[1]))
    sidecar = tmp_path / "orbax" / "wherry.json"
    sidecar.write_text(sidecar.read_text().replace(known.checkpoint_digest, f"blake3:{'0' * 64}"))
    reasons = dict(signing.verify(uri, keys[1]).failed)
    assert reasons["wherry.json"] == "was altered"
    assert "the sidecar" in reasons
    with pytest.raises(MismatchError, match="signature does not match"):
        signing.require(uri, keys[1])


@pytest.mark.parametrize("schema", [1, 3, None])
def test_a_signature_of_another_schema_is_refused_until_it_is_made_anew(
    source, tmp_path, keys, monkeypatch, schema
):
    uri = made(source, tmp_path, "orbax")
    with monkeypatch.context() as patch:
        patch.setattr(signing, "_SCHEMA", schema)
        signing.sign(uri, keys[0])
    said = f"the signature has schema {schema}, but this wherry requires 2"
    for check in (signing.verify, signing.identity):
        with pytest.raises(CorruptError, match=said) as caught:
            check(uri, keys[1])
        assert caught.value.cure.endswith("sign the checkpoint again")
    signing.sign(uri, keys[0])
    assert signing.verify(uri, keys[1]).ok


def test_what_changed_since_the_sidecar_is_not_signed(source, tmp_path, keys):
    uri = made(source, tmp_path, "orbax")
    file = next((tmp_path / "orbax").rglob("d/*"))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(MismatchError, match="do not match the sidecar"):
        signing.sign(uri, keys[0])
    assert not signature_location(locate(uri)).exists()


def test_added_and_removed_files_are_named(source, tmp_path, keys):
    uri = made(source, tmp_path, "huggingface")
    signing.sign(uri, keys[0])
    folder = tmp_path / "huggingface"
    (folder / "extra.txt").write_text("more")
    (folder / "wherry.json").unlink()
    assert dict(signing.verify(uri, keys[1]).failed) == {
        "extra.txt": "was added after signing",
        "wherry.json": "is missing",
    }


def test_files_that_no_signature_covers_are_named(source, tmp_path, keys):
    uri = made(source, tmp_path, "huggingface")
    folder = tmp_path / "huggingface"
    (folder / ".git").mkdir()
    (folder / ".git" / "model.safetensors").write_bytes(b"x")
    signing.sign(uri, keys[0])
    found = signing.verify(uri, keys[1])
    assert (found.ok, found.unsigned) == (True, (".git/model.safetensors",))
    assert found.to_json()["unsigned"] == [".git/model.safetensors"]
    (folder / ".github").mkdir()
    (folder / ".github" / "a.bin").write_bytes(b"x")
    assert signing.verify(uri, keys[1]).unsigned == (".git/model.safetensors", ".github/a.bin")


def test_a_folder_with_the_name_of_the_signature_hides_nothing(source, tmp_path, keys):
    uri = made(source, tmp_path, "huggingface")
    signing.sign(uri, keys[0], out=tmp_path / "out.sig")
    hidden = tmp_path / "huggingface" / "wherry.sig"
    hidden.mkdir()
    (hidden / "model.safetensors").write_bytes(b"x")
    found = signing.verify(uri, keys[1], signature=tmp_path / "out.sig")
    assert found.failed == (("wherry.sig/model.safetensors", "was added after signing"),)


def test_another_key_and_altered_envelopes_are_refused(source, tmp_path, keys):
    place = signing.sign(source, keys[0])
    other = write_keys(tmp_path, ec.generate_private_key(CURVES["p256"]), "other")
    with pytest.raises(MismatchError, match="by another key"):
        signing.verify(source, other[1])
    file = tmp_path / "source.safetensors.wherry.sig"
    assert str(file) == place
    good = json.loads(file.read_text())
    payload = base64.b64decode(good["dsseEnvelope"]["payload"]).replace(b"source", b"sourcE")
    altered = {
        **good,
        "dsseEnvelope": {**good["dsseEnvelope"], "payload": base64.b64encode(payload).decode()},
    }
    for text, kind in (
        (json.dumps(altered), MismatchError),
        (json.dumps({**good, "mediaType": "text/plain"}), UnsupportedError),
        ("[]", CorruptError),
        ("{", CorruptError),
        ("[" * 100_000, HostileError),
        (json.dumps({**good, "dsseEnvelope": {}}), CorruptError),
    ):
        file.write_text(text)
        with pytest.raises(kind):
            signing.verify(source, keys[1])
    file.unlink()
    with pytest.raises(NotFoundError, match="signature not found"):
        signing.verify(source, keys[1])


def test_keys_that_do_not_fit_are_refused_before_any_byte_moves(source, tmp_path, monkeypatch):
    unfit, _ = write_keys(tmp_path, rsa.generate_private_key(65537, 2048), "rsa")
    locked, public = write_keys(tmp_path, ec.generate_private_key(CURVES["p256"]), "locked", b"secret")
    for key, kind in (
        (unfit, UsageError),
        (locked, UsageError),
        (source, UsageError),
        (tmp_path / "no", NotFoundError),
    ):
        with pytest.raises(kind) as failure:
            wherry.convert(source, tmp_path / "orbax", to="orbax", sign=key)
        assert failure.value.cure
        assert not (tmp_path / "orbax").exists()
    monkeypatch.setenv("WHERRY_SIGNING_PASSWORD", "secret")
    wherry.convert(source, tmp_path / "orbax", to="orbax", sign=locked)
    assert signing.verify(tmp_path / "orbax", public).ok


def test_commands(source, tmp_path, keys, capsys):
    target = tmp_path / "orbax"
    cli.main(
        ["convert", str(source), str(target), "--to", "orbax", "--sign", str(keys[0])], standalone_mode=False
    )
    before = (target / "wherry.sig").stat().st_mtime_ns
    wherry.convert(source, target, to="orbax", sign=keys[0])
    assert (target / "wherry.sig").stat().st_mtime_ns == before, "a rerun reads nothing"
    cli.main(
        ["sign", str(source), "--key", str(keys[0]), "--out", str(tmp_path / "s.sig"), "--json"],
        standalone_mode=False,
    )
    capsys.readouterr()
    words = [
        "verify-signature",
        str(source),
        "--key",
        str(keys[1]),
        "--signature",
        str(tmp_path / "s.sig"),
        "--json",
    ]
    with pytest.raises(SystemExit) as done:
        cli.main(words, standalone_mode=False)
    assert done.value.code == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    source.write_bytes(source.read_bytes()[:-1] + b"\x01")
    with pytest.raises(SystemExit) as done:
        cli.main(words, standalone_mode=False)
    assert done.value.code == 9


def test_the_library_of_model_signing_verifies_blake3_and_finds_what_was_altered(source, keys, tmp_path):
    """Its command line sets SHA-256, so the test calls the library."""
    verifying = pytest.importorskip("model_signing.verifying", reason="model-signing is not installed")
    uri = made(source, tmp_path, "orbax")
    place = signing.sign(uri, keys[0], algorithm="blake3")
    assert signing.verify(uri, keys[1]).ok

    def judged():
        config = verifying.Config().use_elliptic_key_verifier(public_key=Path(keys[1]))
        config.verify(Path(uri), Path(place))

    judged()
    changed = next(Path(uri).glob("d/*"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="mismatch"):
        judged()
    assert dict(signing.verify(uri, keys[1]).failed) == {f"d/{changed.name}": "was altered"}


@pytest.mark.parametrize(
    ("name", "files", "format_"), [("folder", 2, "huggingface"), ("source.safetensors", 1, None)]
)
def test_signatures_of_earlier_commits_stay_good(name, files, format_, tmp_path):
    """Their private keys are gone. A folder (P-256), and a file without a sidecar (P-521)."""
    shutil.copytree(GOLDEN, tmp_path / "kept")
    place, public = tmp_path / "kept" / name, tmp_path / "kept" / f"{name}.pub"
    found = signing.verify(place, public)
    assert (found.ok, found.files, found.identity.get("format")) == (True, files, format_)
    assert signing.identity(place, public) == found.identity
    file = place / "model.safetensors" if place.is_dir() else place
    file.write_bytes(file.read_bytes() + b"x")
    assert [reason for _, reason in signing.verify(place, public).failed] == ["was altered"]
