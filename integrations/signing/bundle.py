"""The envelope of a signature: keys, the in-toto statement, DSSE and the Sigstore bundle that holds them.

Written from the published formats (DSSE 1.0, in-toto Statement v1, Sigstore bundle 0.3, model signing predicate 1.0);
see `wherry.integrations.signing` for the on-disk format. The input is untrusted: it is parsed defensively, and its
contents are not used before the signature is verified.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from wherry.core.config_text import read_config
from wherry.core.digest import ALGORITHMS
from wherry.core.json_document import parse_json
from wherry.core.limits import JsonLimits
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import (
    CorruptError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    describe_exception,
    missing_extra,
)
from wherry.store.location import Location

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey


PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PASSWORD = "WHERRY_SIGNING_PASSWORD"  # noqa: S105  the name of the variable
IDENTITY = "wherry"
# Of a signature: enough for 100,000 files, each with its name, algorithm and digest, in base64.
_LIMITS = JsonLimits(nbytes=64 << 20, nodes=1 << 20)
_HASHES = {256: "SHA256", 384: "SHA384", 521: "SHA512"}


def load_key(key: str | os.PathLike[str]) -> EllipticCurvePrivateKey:
    """Load the private key from a PEM file; called before a conversion with signing, so that it fails early.

    Raises:
        UsageError, NotFoundError, MissingExtraError: see `sign`.
    """
    password = os.environ.get(PASSWORD)
    loaded = _load_key(key, "load_pem_private_key", password.encode() if password else None)
    return _of_curve(loaded, key)


def load_public_key(key: str | os.PathLike[str]) -> EllipticCurvePublicKey:
    """Load the public key from a PEM file.

    Raises:
        UsageError, NotFoundError, MissingExtraError: as `load_key`.
    """
    return _of_curve(_load_key(key, "load_pem_public_key"), key)


def _load_key(key: str | os.PathLike[str], loader: str, *password: bytes | None) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise missing_extra("cryptography", "sign", "signing") from error
    data = read_config(key)
    file, private = os.fspath(key), "private" in loader
    if private and b"PUBLIC KEY-----" in data:
        raise UsageError(
            "this is a public key; a signature is made with the private key", uri=file,
            cure="pass the file from which it was made; its first line has the words PRIVATE KEY",
        )  # fmt: skip
    if not private and b"PRIVATE KEY-----" in data:
        raise UsageError(
            "this is a private key; a signature is checked with the public key",
            uri=file,
            cure=Cure(
                "write the public key: `openssl ec -in {} -pubout -out public.pem`; then pass {}",
                shlex.quote(file),
                Argument("key", "public.pem"),
            ),
        )
    try:
        return getattr(serialization, loader)(data, *password)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            "cannot load the key",
            uri=file,
            cure=f"pass a PEM file; for an encrypted key, set {PASSWORD} to its password",
        ) from error


def _of_curve(key: Any, file: str | os.PathLike[str]) -> Any:
    curve = getattr(key, "curve", None)
    if curve is None or curve.name not in ("secp256r1", "secp384r1", "secp521r1"):
        raise UsageError(
            "unsupported key; expected an elliptic-curve key on P-256, P-384 or P-521",
            uri=os.fspath(file),
            cure="create one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem",
        )
    return key


def seal_statement(
    private: EllipticCurvePrivateKey,
    name: str,
    digests: Mapping[str, str],
    how: Mapping[str, Any],
    identity: Any,
) -> bytes:
    """Sign the statement and return the text of the signature file.

    Args:
        private: the key.
        name: name of the model.
        digests: file → hash, in the order of the list.
        how: how the files were selected and hashed, in the form of the predicate.
        identity: the checkpoint's digests; left out if empty.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    rows = [{"name": key, "algorithm": how["hash_type"], "digest": value} for key, value in digests.items()]
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": _root(digests.values())}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": how,
            **({IDENTITY: identity} if identity else {}),
            "resources": rows,
        },
    }
    payload = json.dumps(statement).encode()
    public = private.public_key()
    signature = private.sign(_pre_authenticated(payload), ec.ECDSA(_hash_for(public)))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
    }
    material = {"publicKey": {"hint": hint(public)}, "tlogEntries": []}
    bundle = {"mediaType": MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope}
    return json.dumps(bundle).encode() + b"\n"


def open_signature(place: Location, public: EllipticCurvePublicKey) -> dict[str, Any]:
    """The predicate of a signature, verified with this key.

    Raises:
        NotFoundError: the signature does not exist.
        CorruptError: the signature file is invalid or inconsistent.
        MismatchError: another key made the signature, or it was altered.
        UnsupportedError: a signature of another kind.
    """
    entry = place.stat()
    if entry is None:
        raise NotFoundError(
            "signature not found",
            uri=place.uri,
            cure=Cure("run {}", Command("sign", Blank("URI"), Argument("key", Blank("KEY")))),
        )
    try:
        data = place.read_whole(_LIMITS.nbytes)
        return _predicate(_document(data, place.uri), public, place.uri)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(
            f"invalid signature: {describe_exception(error)}", uri=place.uri, cure="sign it again"
        ) from error


def _document(data: bytes, uri: str) -> Any:
    """JSON of a signature, which is read before it is known who wrote it."""
    return parse_json(data, "the signature", uri=uri, limits=_LIMITS, cure="sign it again")


def hint(public: EllipticCurvePublicKey) -> str:
    """SHA-256 of the public key's PEM text, by which verifiers know the key."""
    from cryptography.hazmat.primitives import serialization

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.PEM, form)).hexdigest()


def _predicate(bundle: dict[str, Any], public: EllipticCurvePublicKey, uri: str) -> dict[str, Any]:
    envelope = bundle["dsseEnvelope"]
    for name, found, wanted in (
        ("bundle", bundle["mediaType"], MEDIA_TYPE),
        ("payload", envelope["payloadType"], PAYLOAD_TYPE),
    ):
        if found != wanted:
            raise UnsupportedError(f"unsupported signature: {name} of type {found}", uri=uri)
    payload = base64.b64decode(envelope["payload"], validate=True)
    _require_signed(public, payload, envelope["signatures"], uri)
    statement = _document(payload, uri)
    kinds = statement["_type"], statement["predicateType"], statement["predicate"]["serialization"]["method"]
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE, "files"):
        raise UnsupportedError(
            f"unsupported statement type {', '.join(kinds)}", uri=uri, cure="verify it with model_signing"
        )
    _require_consistent(statement, uri)
    return statement["predicate"]


def _require_signed(
    public: EllipticCurvePublicKey, payload: bytes, signatures: list[dict[str, str]], uri: str
) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec

    if len(signatures) != 1:
        raise UnsupportedError(f"expected one signature in the envelope, got {len(signatures)}", uri=uri)
    signature = base64.b64decode(signatures[0]["sig"], validate=True)
    try:
        public.verify(signature, _pre_authenticated(payload), ec.ECDSA(_hash_for(public)))
    except InvalidSignature as error:
        raise MismatchError(
            "signature mismatch: it is by another key, or was altered",
            uri=uri,
            cure="get the signer's public key; do not use the checkpoint until its signature is valid",
        ) from error


def _require_consistent(statement: dict[str, Any], uri: str) -> None:
    rows = statement["predicate"]["resources"]
    algorithm = statement["predicate"]["serialization"]["hash_type"]
    named = [algorithm, *(row["algorithm"] for row in rows)]
    odd = next((one for one in named if one not in ALGORITHMS or one != algorithm), None)
    if odd is not None:
        raise UnsupportedError(
            f"unsupported hash algorithm {odd}", uri=uri, cure="verify it with model_signing"
        )
    if len({row["name"] for row in rows}) != len(rows):
        raise CorruptError("duplicate file name in the signature", uri=uri)
    if [one["digest"]["sha256"] for one in statement["subject"]] != [_root(row["digest"] for row in rows)]:
        raise CorruptError("digest mismatch: the subject's digest differs from that of its files", uri=uri)


def _root(digests: Iterable[str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def _pre_authenticated(payload: bytes) -> bytes:
    """The bytes that DSSE signs: the payload with its length and type."""
    return f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def _hash_for(public: EllipticCurvePublicKey) -> Any:
    from cryptography.hazmat.primitives import hashes

    return getattr(hashes, _HASHES[public.curve.key_size])()
