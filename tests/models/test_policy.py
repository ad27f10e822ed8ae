"""The policy of a promotion: each gate on what is on record, and the file that it is read from."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import wherry
from tests.support.registry import converted, model_folder
from wherry.config.settings import mlflow_tracking_uri
from wherry.core.services import service
from wherry.errors import MismatchError, UsageError, WherryError
from wherry.ledger.record import open_ledger, record_conversion, record_verification
from wherry.models.policy import Policy, PolicyFacts, judge, policy_of
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar

pytest.importorskip("mlflow")

pytestmark = pytest.mark.usefixtures("own_home")


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
            wherry.promote(subject, policy=gates)
    with pytest.raises(MismatchError, match="level: required at least digest"):
        wherry.promote(subject, level="present")
    sidecar = read_sidecar(locate(candidate.target.uri))
    with open_ledger() as ledger:
        outcome = {"level": "native", "verdict": "ok", "ok": True}
        record_verification(ledger, sidecar.checkpoint, outcome)
    done = wherry.promote(subject, policy=Policy(recorded=("native",), max_error=0, max_age_days=1))
    assert {row.gate for row in done.gates} == {
        "level",
        "registered",
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
    with pytest.raises(MismatchError, match="not recorded"):
        wherry.promote(f"models:/{name}@candidate", policy={"recorded": ["native"]})


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


def facts(candidate, **known):
    defaults = {"level": "digest", "extra": (), "verifications": {}, "lossless": False, "earlier": True}
    sidecar = read_sidecar(locate(candidate.target.uri))
    for outcome in known.get("verifications", {}).values():
        outcome.setdefault("against", candidate.source.uri)
    defaults["sources"] = frozenset([candidate.source.uri])
    return PolicyFacts(
        uri=candidate.target.uri,
        manifest=sidecar.manifest,
        signed=lambda key: key,
        approver=None,
        **{**defaults, **known},
    )


@pytest.mark.parametrize(
    ("known", "passed", "found"),
    [
        ({"lossless": True}, True, "lossless"),
        ({"lossless": None}, False, "its conversion is not recorded"),
        ({}, False, "no roundtrip verification has measured"),
        ({"verifications": {"roundtrip": {"lossy": {"error": 0.25}}}}, False, "0.25"),
        ({"verifications": {"roundtrip": {"lossy": {"error": 0.01}}}}, True, "0.01"),
        ({"verifications": {"roundtrip": {"lossy": {"error": 0.01}, "against": "/b"}}}, False, "measured"),
        (
            {"verifications": {"roundtrip": {"lossy": {"error": 0.01}}}, "earlier": False},
            False,
            "an earlier conversion was lossy too",
        ),
    ],
)
def test_the_largest_error(candidate, known, passed, found):
    row = next(
        one for one in judge(Policy(max_error=0.1), facts(candidate, **known)) if one.gate == "max_error"
    )
    assert row.passed is passed
    assert found in row.found


def test_an_error_that_a_roundtrip_measured_is_enough_only_for_its_own_conversion(tmp_path, name):
    receipt = converted(tmp_path / "one", to="orbax")
    wherry.register(receipt, name, alias="candidate")
    with open_ledger() as ledger:
        record_conversion(ledger, replace(receipt, lossless=False, plan_digest="5" * 64))
        outcome = {"level": "roundtrip", "verdict": "ok", "ok": True, "lossy": {"error": 0.01}}
        outcome["against"] = receipt.source.uri
        record_verification(ledger, receipt.target, outcome)
    with pytest.raises(MismatchError, match="max_error: required lossless"):
        wherry.promote(f"models:/{name}@candidate", policy={"max_error": 0})
    assert wherry.promote(f"models:/{name}@candidate", policy={"max_error": 0.1}).version == "1"
    onwards = wherry.convert(receipt.target.uri, tmp_path / "npz.npz", to="npz", only="params")
    with pytest.raises(MismatchError, match="an earlier conversion was lossy too"):
        wherry.promote(onwards.target.uri, model=f"{name}-onwards", policy={"max_error": 0.1})


def test_a_roundtrip_counts_only_against_what_it_was_made_of(candidate, tmp_path):
    """The outcome says with what it compared: a roundtrip to any other checkpoint proves nothing of the source."""
    outcome = wherry.verify(candidate.target.uri, level="roundtrip", against=candidate.source.uri).to_json()
    assert outcome["against"] == candidate.source.uri
    for against, passed in ((candidate.source.uri, True), ("/another", False)):
        known = {"roundtrip": {**outcome, "against": against}}
        rows = judge(Policy(recorded=("roundtrip",)), facts(candidate, verifications=known))
        assert [row.passed for row in rows if row.gate == "recorded"] == [passed]


def test_native_and_logits_read_no_more_than_what_is_present(candidate):
    for level in ("native", "logits", "serve"):
        [row] = [one for one in judge(Policy(), facts(candidate, level=level)) if one.gate == "level"]
        assert not row.passed


def test_a_signature_of_the_right_key(candidate, tmp_path, name):
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    from cryptography.hazmat.primitives import serialization as forms

    def pair(label):
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = tmp_path / f"{label}.key", tmp_path / f"{label}.pub"
        private.write_bytes(
            key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
        )
        public.write_bytes(
            key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
        )
        return private, str(public)

    (key, public), (_other, stranger) = pair("release"), pair("stranger")
    subject = f"models:/{name}@candidate"
    with pytest.raises(MismatchError, match=r"signature: .*signature not found"):
        wherry.promote(subject, policy={"signature": public})
    from wherry.integrations.signing import sign

    sign(candidate.target.uri, key)
    with pytest.raises(MismatchError, match="by another key"):
        wherry.promote(subject, policy={"signature": stranger})
    done = wherry.promote(subject, policy={"signature": public})
    assert any(row.gate == "signature" and row.passed for row in done.gates)


def test_another_servers_word_proves_nobody(monkeypatch):
    """A redirect would take the password along, and let another server say that it knows the user."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path.partition("?")[0])
            authenticated = "Authorization" in self.headers
            self.send_response(200 if self.path == "/elsewhere" else 302 if authenticated else 401)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "alice")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    try:
        assert service("mlflow").identity(f"http://127.0.0.1:{server.server_port}") is None
    finally:
        server.shutdown()
        server.server_close()
    assert set(seen) == {"/api/2.0/mlflow/users/get"}


def rewrite(uri, change):
    """Rewrite the sidecar of a checkpoint as anyone can who may write its folder."""
    file = Path(uri) / "wherry.json"
    text = json.loads(file.read_text())
    change(text)
    file.write_text(json.dumps(text))


def lossy(receipt, **changes):
    """Record in the ledger that the conversion was lossy."""
    with open_ledger() as ledger:
        record_conversion(ledger, replace(receipt, lossless=False, plan_digest="5" * 64, **changes))


def test_gates_believe_the_ledger_and_not_the_sidecar(candidate, name):
    receipt, subject = candidate, f"models:/{name}@candidate"
    lossy(receipt)
    outcome = {"level": "roundtrip", "verdict": "ok", "ok": True, "against": "/another"}
    with open_ledger() as ledger:
        record_verification(ledger, receipt.target, outcome)
    for change, gates in (
        (lambda text: text.update(receipt=None), {"max_error": 0.0}),
        (lambda text: text["receipt"].update(lossless=True), {"max_error": 0.0}),
        (lambda text: text["receipt"]["source"].update(uri="/another"), {"recorded": ["roundtrip"]}),
        (lambda text: text["manifest"].update(kind="train-state"), {"optimizer": "present"}),
    ):
        before = (Path(receipt.target.uri) / "wherry.json").read_bytes()
        rewrite(receipt.target.uri, change)
        with pytest.raises(MismatchError, match=r"altered|rejects"):
            wherry.promote(subject, policy=gates)
        (Path(receipt.target.uri) / "wherry.json").write_bytes(before)


def test_a_conversion_of_the_future_has_no_age(candidate, name):
    lossy(candidate, finished="2099-01-01T00:00:00+00:00")
    with pytest.raises(
        MismatchError, match="max_age_days: required at most 1 days, found a time in the future"
    ):
        wherry.promote(f"models:/{name}@candidate", policy={"max_age_days": 1})


def test_a_promotion_does_not_meet_its_own_condition(candidate, name):
    with pytest.raises(MismatchError, match="recorded: required digest, found not recorded"):
        wherry.promote(f"models:/{name}@candidate", policy={"recorded": ["digest"]})
    assert wherry.verify(candidate.target.uri, level="digest", record=True).ok
    assert wherry.promote(f"models:/{name}@candidate", policy={"recorded": ["digest"]}).version == "1"


def test_a_checkpoint_that_no_conversion_made_meets_no_gate_about_conversions(tmp_path, name):
    folder = model_folder(tmp_path / "original")
    wherry.inspect(folder, digest=True, write=True)
    for gates in ({"max_error": 0.0}, {"max_age_days": 1}):
        with pytest.raises(MismatchError, match="not recorded"):
            wherry.promote(folder, model=name, policy=gates)


def test_verify_names_a_receipt_that_the_ledger_does_not_have(candidate):
    rewrite(candidate.target.uri, lambda text: text["receipt"].update(finished="2020-01-01T00:00:00+00:00"))
    found = wherry.verify(candidate.target.uri, level="digest")
    assert found.verdict == "altered"
    assert "its receipt is not that of the conversion" in found.failed[0].reason


def test_a_version_that_the_ledger_has_not_registered_is_not_promoted(candidate, name):
    """Whoever may write the registry can copy a version with its tags under another number."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=mlflow_tracking_uri(), registry_uri=mlflow_tracking_uri())
    ours = client.get_model_version(name, "1")
    client.create_model_version(name, ours.source, tags=ours.tags)
    with pytest.raises(MismatchError, match="registered: required by the ledger, found not registered"):
        wherry.promote(f"models:/{name}/2")
    assert wherry.promote(f"models:/{name}/2", policy={"unregistered": True}).version == "2"
    assert wherry.promote(f"models:/{name}/1").version == "1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"kind": "params"', '"kind": "other"'), ('"tensors": 2', '"tensors": 3'), ('"nbytes": 8212', '"nbytes": 8213'),
        ('"parameters": 2053', '"parameters": 2052'), ("     64,", "     74,"), ('"float32"', '"float16"'),
        ('"size": 22', '"size": 23'), ('   "b": "', '   "c": "'), ('   "b": "o', '   "b": "p'),
        ('"step": null', '"step": 7'), ('"model_type": "tiny"', '"model_type": "huge"'), ('/target"', '/other"'),
        ('"fingerprint": "', '"fingerprint": "0'),
    ],
)  # fmt: skip
def test_a_field_of_a_sidecar_that_no_digest_covers_is_compared_too(candidate, before, after):
    """What a record states decides what is shown, and what enters a ledger that does not know the checkpoint."""
    file = Path(candidate.target.uri) / "wherry.json"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    found = wherry.verify(candidate.target.uri, level="digest")
    assert (found.verdict, "the sidecar was altered" in found.failed[0].reason) == ("altered", True)


def test_hashes_of_leaves_by_another_algorithm_are_an_error(candidate):
    """Without them damage would be found, but not its place."""
    file = Path(candidate.target.uri) / "wherry.json"
    file.write_text(file.read_text().replace('  "blake3": {', '  "blake2": {'))
    found = wherry.verify(candidate.target.uri, level="digest")
    assert (found.verdict, found.exit_code) == ("corrupt", 5)
    assert "its hashes of leaves are not" in found.failed[0].reason


def test_a_flipped_byte_of_a_sidecar_is_found_or_meets_no_gate(candidate, name):
    """Every 61st byte here; WHERRY_EVERY_BYTE=1 flips all of them."""
    lossy(candidate)
    file, step = Path(candidate.target.uri) / "wherry.json", 1 if os.environ.get("WHERRY_EVERY_BYTE") else 61
    gates = {"max_error": 0.0, "max_age_days": 1e-9, "optimizer": "present", "recorded": ["native"],
             "companions": ["*.model"], "level": "structure"}  # fmt: skip
    whole = file.read_bytes()

    def refusal():
        with pytest.raises(WherryError) as caught:
            wherry.promote(f"models:/{name}@candidate", policy=gates, level="structure")
        return [part.partition(": required")[0] for part in caught.value.what.split("; ")]

    expected = refusal()
    found = {"error": 0, "same": 0}
    for place in range(0, len(whole), step):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            altered = not wherry.verify(candidate.target.uri, level="digest").ok
        except WherryError:
            altered = True
        if not altered:
            assert refusal() == expected, place
        found["error" if altered else "same"] += 1
    file.write_bytes(whole)
    print(found)
    assert found["error"]
