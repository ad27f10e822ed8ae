"""Small checkpoints and their conversions, for the tests of audit and metrics."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from wherry.cli import cli
from wherry.converter.references import reference
from wherry.core.digest import SHA256, tensor_digest
from wherry.core.receipt import CheckpointRef, Receipt, utc_now
from wherry.formats.checkpoint import present_fingerprint
from wherry.ledger.record import add_conversion, add_registration, open_ledger, record_registration
from wherry.store.local_store import locate
from wherry.store.sidecar import Sidecar, encode, sidecar_location

REGISTRY = "https://registry.example"


def source(folder: Path, name: str = "source", seed: int = 0) -> Path:
    """An npz file of two tensors."""
    path = folder / f"{name}.npz"
    generator = np.random.default_rng(seed)
    np.savez(path, **{"layer.w": generator.normal(size=(8, 16)), "step": np.ones(3, np.int32)})
    return path


def converted(
    folder: Path, name: str = "source", *, to: str = "safetensors", seed: int = 0
) -> wherry.Receipt:
    """A source and what was made of it, in the ledger."""
    return wherry.convert(source(folder, name, seed), folder / f"{name}.out", to=to)


def evidence(folder: Path) -> Path:
    """The bundle of an audit of a source and what was made of it."""
    converted(folder)
    path = folder / "evidence.zip"
    wherry.audit(bundle=path)
    return path


def registered(receipt: wherry.Receipt, name: str = "model", version: str = "1") -> None:
    """A registration in the ledger alone."""
    with open_ledger() as ledger:
        record_registration(ledger, receipt.target, REGISTRY, name, version)


def flip(path: Path, offset: int = -5) -> None:
    """One bit of a file, with its times as they were."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def carried_out(cure: str) -> None:
    """What a cure prints after its words, as a shell carries it out."""
    for line in cure.partition(": ")[2].split(" && "):
        words = shlex.split(line)
        if words[0] == "mv":
            Path(words[1]).rename(words[2])
            continue
        done = CliRunner().invoke(cli, words[1:])
        assert (words[0], done.exit_code) == ("wherry", 0), done.output


def kinds(report: object) -> set[str]:
    """The kinds of findings that are no mere notes."""
    return {one.kind for one in report.findings if one.severity != "note"}


def fake_registry(monkeypatch, *rows: tuple) -> None:
    """A model registry that has these versions."""
    from wherry.prove import registrations

    service = SimpleNamespace(registered_versions=lambda *_, **__: iter(rows))
    monkeypatch.setattr(registrations, "service", lambda _name: service)


def many(folder: Path, count: int) -> list[CheckpointRef]:
    """So many tiny checkpoints with sidecars, each converted and registered by the ledger; quicker than converting."""
    start = wherry.convert(source(folder), folder / "first", to="safetensors").source
    nodes = [
        taken_stock(folder / f"{number // 100}" / f"model-{number}.safetensors", number)
        for number in range(count)
    ]
    with open_ledger() as ledger, ledger.write() as connection:
        for number, node in enumerate(nodes):
            add_conversion(connection, Receipt(start, node, f"{number:064x}", finished=utc_now()))
            add_registration(connection, node, REGISTRY, f"model-{number % 50}", str(number))
    return nodes


def taken_stock(path: Path, number: int) -> CheckpointRef:
    """A safetensors file with a sidecar."""
    path.parent.mkdir(exist_ok=True)
    held = {"w": np.full((2, 4), number, np.float32), "b": np.arange(4)}
    save_file(held, path)
    with wherry.open(path) as checkpoint:
        manifest, version = checkpoint.manifest, checkpoint.detection.format_version
        leaves = {spec: (hashlib.sha256(held[spec[0]].tobytes()).digest(),) for spec in manifest.tensors}
        digests = {spec: tensor_digest(manifest.tensors[spec], leaf, SHA256) for spec, leaf in leaves.items()}
        mark = present_fingerprint(checkpoint)
    manifest = manifest.with_digests(digests)
    node = reference(str(path), "safetensors", version, manifest, mark, SHA256)
    Path(sidecar_location(locate(path)).path).write_bytes(encode(Sidecar(manifest, node, None, leaves)))
    return node


def rewritten(bundle, change, *, index=True):
    """The bundle with `change(name, data)` applied to each file, under an index that agrees (or not)."""
    target = bundle.with_name("changed.zip")
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(target, "w") as new:
        files = {name: change(name, old.read(name)) for name in old.namelist() if name != "index.json"}
        listing = json.loads(old.read("index.json"))
        if index:
            listing["files"] = {
                name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for name, data in files.items()
                if data is not None
            }
        for name, data in files.items():
            if data is not None:
                new.writestr(name, data)
        new.writestr("index.json", json.dumps(listing))
    return target
