"""A file that is removed between two looks at it is an error that names it, not a bug of wherry."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from wherry.errors import NotFoundError
from wherry.storage.stores import locate

HEADERS = {
    "a.safetensors": "wherry.integrations.formats.safetensors.placed_tensors",
    "a.npz": "wherry.integrations.formats.npz.read_contents",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_file_that_goes_after_its_header_was_read_is_named(name, tmp_path, monkeypatch):
    module, _, function = HEADERS[name].rpartition(".")
    imported = __import__(module, fromlist=[function])
    np.savez(tmp_path / "a.npz", w=np.arange(6, dtype="f4"))
    file = tmp_path / name
    if name != "a.npz":
        wherry.convert(tmp_path / "a.npz", file, to="safetensors", lineage=False)
    real = getattr(imported, function)

    def read(*words):
        found = real(*words)
        file.unlink()
        return found

    monkeypatch.setattr(imported, function, read)
    with pytest.raises(NotFoundError, match="removed while it was read") as caught:
        wherry.open(file)
    assert caught.value.uri == str(file)


def test_a_file_that_is_there_has_its_size(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    assert locate(tmp_path / "a").present().size == 3
