"""A source in a bucket is one state of its objects, and is looked at with few requests."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.converter.convert import convert
from wherry.errors import MismatchError
from wherry.ledger.resolve import detect
from wherry.prove.verify import verify


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.safetensors"
    tensors = {f"layers.{number}.w": np.full((64, 300), number, np.float32) for number in range(40)}
    save_file({**tensors, "big": np.ones((3 << 20) // 4, np.float32)}, file)
    return file


# Reads of bytes among the requests.
READS = {
    "gs": lambda requests: [path for _method, path in requests if "alt=media" in path],
    "s3": lambda requests: [path for method, path in requests if method == "GET" and "?" not in path],
    "az": lambda requests: [path for method, path in requests if method == "GET" and "?" not in path],
}


def test_a_read_of_another_state_fails(bucket):
    bucket.put("x", b"before")
    place = bucket.at("x")
    mark = place.stat().mark
    buffer = bytearray(3)
    assert place.store.readinto(place.path, 1, memoryview(buffer), mark) == 3
    assert buffer == b"efo"
    bucket.put("x", b"after!")
    with pytest.raises(MismatchError):
        place.store.readinto(place.path, 1, memoryview(buffer), mark)
    assert place.read(0, 10) == b"after!"


@pytest.mark.parametrize("removed", [False, True])
def test_a_source_that_changes_in_the_middle_is_no_source(bucket, model, tmp_path, removed):
    bucket.put("model.safetensors", model.read_bytes())
    reads = []

    def change(handler, body):
        reads.append(handler.path)
        if len(reads) == 3:  # the head and the header are read: bytes of tensors are next
            place = bucket.at("model.safetensors")
            bucket.proxy.faults.clear()
            if removed:
                place.store.remove(place.path)
            else:
                data = bytearray(model.read_bytes())
                data[-1] ^= 1
                bucket.put("model.safetensors", bytes(data))
        handler.reply(*handler.forward(body))

    paths = {"gs": "/download/", "s3": "/model.safetensors", "az": "/model.safetensors"}
    bucket.proxy.inject(change, 1000, "GET", paths[bucket.protocol])
    target = tmp_path / "out.npz"
    words = f"source was {'removed' if removed else 'modified'} during the conversion"
    with pytest.raises(MismatchError, match=words) as caught:
        convert(f"{bucket.uri}/model.safetensors", target, to="npz", lineage=False)
    assert caught.value.exit_code == 9
    assert "once nothing writes to it" in caught.value.cure
    assert not target.exists()


def test_tensors_are_read_together(bucket, model, tmp_path):
    bucket.put("model.safetensors", model.read_bytes())
    bucket.requests()
    assert verify(f"{bucket.uri}/model.safetensors", level="digest").checked == 41
    reads = [path for path in READS[bucket.protocol](bucket.requests()) if "wherry" not in path]
    assert len(reads) <= 5, "of 41 tensors in 6 MiB, and the header"
    if bucket.protocol == "gs":
        assert all("generation=" in path for path in reads)
    convert(f"{bucket.uri}/model.safetensors", tmp_path / "out.npz", to="npz", lineage=False)
    assert len(bucket.requests()) < 40
    assert verify(tmp_path / "out.npz", level="roundtrip", against=model).ok


@pytest.mark.parametrize(("to", "most"), [("dcp", 4), ("orbax", 17)])
def test_detect_asks_little(bucket, model, tmp_path, to, most):
    convert(model, tmp_path / "made", to=to, lineage=False)
    bucket.upload(tmp_path / "made", "made")
    bucket.requests()
    assert detect(f"{bucket.uri}/made").verdict == "ok"
    assert len(bucket.requests()) <= most
