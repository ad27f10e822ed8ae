"""Files with private and public keys for signatures."""

from __future__ import annotations

from pathlib import Path

import pytest


def key_pair(folder: Path) -> tuple[Path, Path]:
    """A private key that no password locks, and the public one."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from cryptography.hazmat.primitives.asymmetric import ec

    return write_keys(folder, ec.generate_private_key(ec.SECP256R1()))


def write_keys(folder, key, name="key", password=None):
    from cryptography.hazmat.primitives import serialization

    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form, pem = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    (folder / f"{name}.pem").write_bytes(key.private_bytes(pem, form, lock))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pem", folder / f"{name}.pub"
