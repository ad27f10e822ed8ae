"""Files that are no checkpoints, or none that can be read: empty, of another kind, cut, or a program."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.hostile import zipped


class OddFile(NamedTuple):
    """One file or folder.

    Attributes:
        name: of it.
        format, verdict: as `detect` says them; the flipped bit is found by reading alone.
        make: writes it.
    """

    name: str
    format: str
    verdict: str
    make: Callable[[Path], Any]


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "README.md").write_text("# a folder without weights\n")


def _state() -> dict[str, Any]:
    import torch

    return {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(5), "step": 7}


def _saved() -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(_state(), buffer)
    return buffer.getvalue()


def _flipped(path: Path) -> None:
    """One bit of tensor data; the archive has a checksum of it."""
    import torch

    raw = bytearray(_saved())
    raw[raw.index(_state()["w"].numpy().tobytes()) + 4] ^= 1
    path.write_bytes(raw)
    assert not torch.equal(torch.load(path, weights_only=True)["w"], _state()["w"])


def _module(path: Path) -> None:
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    torch.save(layers, path)


def _script(path: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather export
        torch.jit.save(torch.jit.script(torch.nn.Linear(3, 2)), path)


def _locked(path: Path) -> None:
    """An archive that states a password."""
    path.write_bytes(zipped("test.txt", b"twelve bytes", flags=0x1))


def _texts(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")


ODD = {
    "none-empty-file": OddFile("model.safetensors", "none", "not-a-checkpoint", lambda path: path.touch()),
    "none-password-protected-zip": OddFile("locked.zip", "none", "not-a-checkpoint", _locked),
    "none-bad-pytorch-pt": OddFile(
        "bad.pt", "none", "not-a-checkpoint", lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n")
    ),
    "none-benign-pkl": OddFile(
        "benign.pkl", "none", "not-a-checkpoint",
        lambda path: path.write_bytes(b"\x80\x03](X\x01\x00\x00\x00aX\x01\x00\x00\x00be."),
    ),
    "none-not-a-pickle-bin": OddFile(
        "not_a_pickle.bin", "none", "not-a-checkpoint", lambda path: path.write_bytes(b"cmod\n\xf8\n")
    ),
    "none-readme-folder": OddFile("folder", "none", "not-a-checkpoint", _folder),
    "none-zip": OddFile("archive.zip", "none", "not-a-checkpoint", _texts),
    "torch-whole-module": OddFile("whole_module.pt", "torch-zip", "unsupported", _module),
    "torchscript": OddFile("script.jit", "torchscript", "unsupported", _script),
    "torch-zip-bitflip": OddFile("flipped.pt", "torch-zip", "corrupt", _flipped),
    "torch-zip-truncated": OddFile(
        "cut.pt", "torch-zip", "corrupt", lambda path: path.write_bytes(_saved()[: len(_saved()) * 3 // 5])
    ),
}  # fmt: skip
