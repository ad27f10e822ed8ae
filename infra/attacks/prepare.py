"""What attacks start from: sound checkpoints that the libraries write, a small one for the verbs, and a pair of keys.

`python -m infra.attacks.prepare FOLDER [SYSTEM...]` is a process of its own, so that the fork server never imports a
library that starts threads.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from infra.attacks import lies
from infra.attacks.case import Sound

SOUND = "sound"  # a folder for each maker: the checkpoint lies where `path` says
HOME = "home"  # of wherry, with a ledger
GOOD, KEYS = "good/model.safetensors", "keys"
DCP = "dcp-metadata"  # metadata of DCP that lies
SEEDS = "seeds"  # small inputs of single parsers
WRITTEN = "written"  # what wherry writes, with its sidecar and signature


def write_good(folder: Path) -> Path:
    """A safetensors file of two tensors."""
    row = {"dtype": "F32", "shape": [2, 2]}
    text = json.dumps(
        {"a": {**row, "data_offsets": [0, 16]}, "b": {**row, "data_offsets": [16, 32]}}
    ).encode()
    place = folder / GOOD
    place.parent.mkdir(parents=True)
    place.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(32)))
    return place


def write_keys(folder: Path) -> Path:
    """A key pair of P-256."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    public = key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    place = folder / KEYS
    place.mkdir()
    (place / "private.pem").write_bytes(private)
    (place / "public.pem").write_bytes(public)
    return place


def write_written(folder: Path) -> None:
    """A signed folder of wherry's own, and a registry, whose tables take MLflow half a minute to create."""
    import wherry
    from wherry.integrations import signing

    wherry.convert(folder / GOOD, folder / WRITTEN, to="dcp")
    wherry.register(folder / WRITTEN, "sound")
    signing.sign(folder / WRITTEN, folder / KEYS / "private.pem")


def write_sound(folder: Path, systems: Sequence[str] = ()) -> None:
    """Run each maker of the tests, of small trees and of small models as their systems save them with their configs.

    One that fails, for example without its library, is reported and left out.
    """
    from tests.support import made, model_files

    makers = {make.__name__: (system, make) for system, rows in made.MAKERS.items() for make in rows}
    for family, rows in model_files.MAKERS.items():
        makers |= {f"{family}-{name}": (family, make) for name, make in rows.items()}
    for name, (system, make) in makers.items():
        if systems and system not in systems:
            continue
        home = folder / SOUND / name
        home.mkdir(parents=True)
        try:
            found = make(home / "made")
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            continue
        path = found[0] if isinstance(found, tuple) else found
        (home / "path").write_text(str(path.relative_to(home)))


def sound(folder: Path) -> Iterator[Sound]:
    """Each of them."""
    for note in sorted((folder / SOUND).glob("*/path")):
        yield Sound(note.parent.name, note.parent, note.parent / note.read_text())


def write_dcp_lies(folder: Path) -> None:
    """Metadata of DCP with one field of every piece of data replaced; made here, for it takes torch to unpickle it."""
    file = folder / SOUND / "dcp" / "made" / ".metadata"
    for field in ("relative_path", "offset", "length") if file.exists() else ():
        for number, value in enumerate((*lies.NAMES, *lies.NUMBERS, -1, None, 0.5)):
            if isinstance(value, str) == (field == "relative_path"):
                found = pickle.loads(file.read_bytes())
                for info in found.storage_data.values():
                    setattr(info, field, value)
                place = folder / DCP / f"{field}-{number}"
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(pickle.dumps(found))


def _receipt() -> bytes:
    from wherry.core.receipt import CheckpointRef, Receipt

    digest, time = "sha256:" + "0" * 64, "2026-01-01T00:00:00+00:00"
    one = CheckpointRef("/a", "dcp", "2.9", digest, digest, "f", step=1)
    made = Receipt(
        one, one, "plan", started=time, finished=time, verification={"ok": True, "level": "digest"},
        parents=[{"checkpoint": asdict(one), "weight": 0.5}],
    )  # fmt: skip
    return json.dumps(made.to_json()).encode()


def write_seeds(folder: Path) -> None:
    """Small sound inputs of the parsers for which no checkpoint has a file."""
    import numpy as np

    from infra.attacks import arrays, heads
    from tests.support import tf_bundle

    place = folder / SEEDS
    place.mkdir()
    tables = Path(__file__).resolve().parents[2] / "infra" / "wherry.toml"
    texts = {
        "a.toml": tables.read_bytes(),
        "a.yml": b"base_emb_dim: 8\nlogical_axis_rules: [['embed', 'data'], {a: 1e-5}]\n"
        b"list:\n- a\n- b: {c: d}\ntext: |\n  x\n",
        "a.gin": b"EMBED = 8\nnetwork.T5Config:\n  emb_dim = %EMBED\n  mlp = ('gelu', 'linear')\n"
        b"network.T5Config.heads = 2\n",
        "a.path": b"params/layers.0/'a b'/w",
        "b.path": b"a\\/b",
        "a.treedef": b"PyTreeDef({'params': {'layers': [*, (*, *)], 'w': CustomNode(namedtuple[State], [*, None])}})",
        "a.receipt": _receipt(),
        "a.lease": b'{"host": "h", "pid": 1, "namespace": "n", "start": 1, "token": "01234567"}',
        "a.journal": b'{"plan": "x"}\n{"done": [["a/b", 0, 8, [0], "AAAA", [[0, 8, 1]]]]}\n',
        "a.gguf": heads.gguf(),
        "a.node": arrays.node(0, [(b"w/.zarray", 0, 0), (b"w/0", 0, 0)]),
        "b.node": arrays.node(1, [(b"a", 0, 90), (b"b", 0, 90)]),
        "a.zarr3": json.dumps(arrays.ZARR3).encode(),
    }
    for name, data in texts.items():
        (place / name).write_bytes(data)
    golden = Path(__file__).resolve().parents[2] / "tests" / "golden" / "bundle-2.zip"
    (place / "a.zip").write_bytes(golden.read_bytes())
    tf_bundle.write(place / "bundle", {"a": np.arange(6, dtype="f4"), "b/c": np.ones((2, 3), "f4")})


def write(folder: Path, systems: Sequence[str] = ()) -> None:
    """Everything."""
    os.environ["WHERRY_HOME"] = str(folder / HOME)
    write_good(folder)
    write_keys(folder)
    write_written(folder)
    write_sound(folder, systems)
    write_dcp_lies(folder)
    write_seeds(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:])
