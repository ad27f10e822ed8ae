"""What every store of objects keeps to: the same suite over memory, Google's, Amazon's and SeaweedFS."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from wherry.store.content import checksum_of, joined_checksum
from wherry.store.store import AnonymousUpload

OTHER = "1"  # a mark that no object has


def views(*pieces):
    return [memoryview(one) for one in pieces]


def sent(backend, upload, sizes):
    """Send parts of random bytes in reverse order; returns the parts and all bytes."""
    data = [os.urandom(size) for size in sizes]
    parts = [
        backend.objects.put_part(upload, number, views(data[number][:7], data[number][7:]))
        for number in reversed(range(len(data)))
    ]
    return parts[::-1], b"".join(data)


def uploaded(backend, path, run, sizes):
    upload = backend.objects.begin(path, run)
    parts, data = sent(backend, upload, sizes)
    return backend.objects.assemble(upload, parts), data


def stated(parts):
    """Number, size and mark of parts; not every store lists their checksums."""
    return [(part.number, part.nbytes, part.mark) for part in parts]


def names(backend):
    """Names of all objects below the folder of the test."""
    return sorted(entry.name for entry in backend.place.walk())


def test_an_object_that_does_not_exist(backend):
    path = backend.path("absent")
    assert backend.objects.head(path) is None
    assert not backend.objects.remove_object(path, OTHER)
    with pytest.raises(FileExistsError):
        backend.objects.put_object(path, b"x", "run", replaces=OTHER)
    assert backend.objects.head(path) is None


def test_a_put_creates_and_replaces_only_what_it_has_seen(backend):
    path, objects = backend.path("lease"), backend.objects
    first = objects.put_object(path, b"one", "a")
    assert objects.head(path) == first
    assert (first.nbytes, first.run) == (3, "a")
    assert objects.put_object(path, b"one", "a") == first, "a repeated call finds its own object"
    for run, data in (("b", b"one"), ("a", b"two")):
        with pytest.raises(FileExistsError):
            objects.put_object(path, data, run)
    second = objects.put_object(path, b"two", "a", replaces=first.mark)
    assert second.mark != first.mark
    with pytest.raises(FileExistsError):
        objects.put_object(path, b"three", "a", replaces=first.mark)
    assert backend.place.join("lease").read(0, 9) == b"two"


def test_a_removal_applies_to_one_state(backend):
    path, objects = backend.path("lease"), backend.objects
    first = objects.put_object(path, b"one", "a")
    second = objects.put_object(path, b"two", "a", replaces=first.mark)
    assert not objects.remove_object(path, first.mark)
    assert objects.head(path) == second
    assert objects.remove_object(path, second.mark)
    assert objects.head(path) is None


def test_many_objects_are_removed_and_others_stay(backend):
    objects = backend.objects
    paths = [backend.path(f"journal-{number:06d} of {{ä & b}}") for number in range(5)]
    marks = {path: objects.put_object(path, path.encode(), "run").mark for path in paths}
    objects.remove_object(paths[0], marks[paths[0]])
    objects.remove_many({path: marks[path] for path in paths[:4]})
    assert [objects.head(path) is not None for path in paths] == [False] * 4 + [True]
    objects.remove_many({})


def test_the_mark_is_that_of_an_entry(remote):
    made = remote.objects.put_object(remote.path("model"), b"data", "run")
    assert remote.place.join("model").stat().mark == made.mark


def test_parts_in_any_order_become_one_object(backend):
    path, objects = backend.path("deep/model.safetensors"), backend.objects
    upload = objects.begin(path, "run")
    parts, data = sent(backend, upload, [backend.part, backend.part + 1, 3])
    assert [(part.number, part.nbytes) for part in parts] == [
        (0, backend.part),
        (1, backend.part + 1),
        (2, 3),
    ]
    assert objects.head(path) is None
    assert backend.place.join("deep/model.safetensors").stat() is None
    assert stated(objects.parts(upload)) == stated(parts)
    made = objects.assemble(upload, parts)
    assert (made.nbytes, made.run) == (len(data), "run")
    assert backend.place.join("deep/model.safetensors").read(0, len(data) + 1) == data
    assert names(backend) == ["deep/model.safetensors"]
    found = objects.head(path)
    assert (found.nbytes, found.run, found.mark) == (made.nbytes, made.run, made.mark)


def test_the_store_reports_the_checksums_that_follow_from_ours(backend):
    """Azure computes none of an object that is made of parts."""
    upload = backend.objects.begin(backend.path("model"), "run")
    parts, data = sent(backend, upload, [backend.part, 5])
    made = backend.objects.assemble(upload, parts)
    algorithm = parts[0].checksum.partition(":")[0]
    assert algorithm in backend.place.store.capabilities.checksums
    pieces = data[: backend.part], data[backend.part :]
    assert [part.checksum for part in parts] == [checksum_of(views(one), algorithm) for one in pieces]
    if algorithm == "md5":
        assert joined_checksum(parts) == ""
        assert not made.checksums
        assert not backend.objects.head(backend.path("model")).checksums
        return
    ours = checksum_of(views(data))
    assert joined_checksum(parts) == ours
    assert f"crc32c:{backend.objects.head(backend.path('model')).checksums['crc32c']}" == ours
    assert f"crc32c:{made.checksums.get('crc32c')}" in (ours, "crc32c:None")


def test_a_part_can_be_sent_again_and_replaced(backend):
    objects = backend.objects
    upload = objects.begin(backend.path("model"), "run")
    old, new = bytes(backend.part), os.urandom(backend.part)
    objects.put_part(upload, 0, views(old))
    parts = [objects.put_part(upload, 0, views(new)) for _ in range(2)][1:]
    assert stated(objects.parts(upload)) in (stated(parts), []), "the new state or none, never the old one"
    objects.assemble(upload, parts)
    assert backend.place.join("model").read(0, 1 << 24) == new


def test_an_empty_object_is_one_empty_part(backend):
    made, _data = uploaded(backend, backend.path("empty"), "run", [0])
    assert made.nbytes == 0
    assert backend.place.join("empty").stat().size == 0


def test_the_object_of_another_run_is_not_replaced(backend):
    path, objects = backend.path("model"), backend.objects
    first, data = uploaded(backend, path, "winner", [backend.part, 9])
    upload = objects.begin(path, "loser")
    parts, _other = sent(backend, upload, [backend.part, 9])
    with pytest.raises(FileExistsError):
        objects.assemble(upload, parts)
    assert stated(objects.parts(upload)) == stated(parts), "the upload is still there"
    assert objects.head(path).mark == first.mark
    assert backend.place.join("model").read(0, 1 << 24) == data
    objects.abort(upload)
    assert names(backend) == ["model"]


def test_one_of_several_writers_wins(backend):
    path, objects = backend.path("model"), backend.objects
    runs = [f"run-{number}" for number in range(4)]
    uploads = [objects.begin(path, run) for run in runs]
    parts = [sent(backend, upload, [backend.part, 3]) for upload in uploads]

    def assemble(number):
        try:
            return objects.assemble(uploads[number], parts[number][0]).run
        except FileExistsError:
            return None

    with ThreadPoolExecutor(4) as pool:
        winners = [run for run in pool.map(assemble, range(4)) if run]
    # SeaweedFS looks whether the object exists, then creates it: several writers can get the answer that they won.
    assert len(winners) == 1 or (winners and backend.name == "seaweed")
    winner = objects.head(path).run
    assert winner in winners
    assert backend.place.join("model").read(0, 1 << 24) == parts[runs.index(winner)][1]


def test_assembly_can_be_repeated(backend):
    path, objects = backend.path("model"), backend.objects
    upload = objects.begin(path, "run")
    parts, _data = sent(backend, upload, [backend.part, 3])
    made = objects.assemble(upload, parts)
    again = objects.assemble(upload, parts)
    assert (again.mark, again.nbytes, again.run) == (made.mark, made.nbytes, made.run)


def test_an_upload_that_was_aborted(backend):
    path, objects = backend.path("model"), backend.objects
    upload = objects.begin(path, "run")
    parts, _data = sent(backend, upload, [backend.part, 3])
    objects.abort(upload)
    objects.abort(upload)
    with pytest.raises(FileNotFoundError):
        objects.parts(upload)
    with pytest.raises(FileNotFoundError):
        objects.assemble(upload, parts)
    assert names(backend) == []
    assert list(objects.uploads(backend.place.path)) == []


def test_another_process_finds_an_upload_and_continues(backend, make_backend):
    objects = backend.objects
    upload = objects.begin(backend.path("dir/model"), "run")
    first = objects.put_part(upload, 0, views(bytes(backend.part)))
    other = objects.begin(backend.path("else"), "run-2")
    found = make_backend(backend.name).objects  # another file system
    assert {(one.path, one.key) for one in found.uploads(backend.place.path + "/")} == {
        (upload.path, upload.key),
        (other.path, other.key),
    }
    assert [one.key for one in found.uploads(backend.path("dir/mod"))] == [upload.key]
    assert {one.run for one in found.uploads(upload.path)} <= {"run", ""}
    assert all(one.run or isinstance(one, AnonymousUpload) for one in found.uploads(upload.path))
    assert stated(found.parts(upload)) == stated([first])
    made = found.assemble(upload, [first, found.put_part(upload, 1, views(b"end"))])
    assert (made.run, made.nbytes) == ("run", backend.part + 3)


def test_an_object_is_copied_in_one_state(backend):
    objects, source, path = backend.objects, backend.path("area/model"), backend.path("model")
    made, data = uploaded(backend, source, "run", [backend.part, 3])
    with pytest.raises(FileNotFoundError):
        objects.copy_object(source, OTHER, path, "run")
    with pytest.raises(FileNotFoundError):
        objects.copy_object(backend.path("absent"), made.mark, path, "run")
    assert objects.head(path) is None
    copy = objects.copy_object(source, made.mark, path, "other")
    assert (copy.run, copy.nbytes) == ("other", len(data))
    assert backend.place.join("model").read(0, 1 << 24) == data
    assert objects.copy_object(source, made.mark, path, "other").mark == copy.mark, "a repeated call"
    with pytest.raises(FileExistsError):
        objects.copy_object(source, made.mark, path, "third")
    assert objects.head(path).run == "other"
    assert list(objects.uploads(backend.place.path)) == []


def test_a_large_object_is_copied_by_ranges(make_backend, monkeypatch):
    """Amazon copies ranges of 128 MiB at least; here they are as small as a part may be."""
    backend = make_backend("s3")
    monkeypatch.setattr("wherry.store.amazon._COPIED", backend.part)
    objects, source, path = backend.objects, backend.path("source"), backend.path("model")
    made, data = uploaded(backend, source, "run", [backend.part, backend.part, 50])
    copy = objects.copy_object(source, made.mark, path, "other")
    assert (copy.run, copy.nbytes) == ("other", len(data))
    assert backend.place.join("model").read(0, 1 << 24) == data
    assert list(objects.uploads(backend.place.path)) == []


def test_an_empty_object_is_copied(backend):
    made, _data = uploaded(backend, backend.path("a"), "run", [0])
    assert backend.objects.copy_object(backend.path("a"), made.mark, backend.path("b"), "run").nbytes == 0


def test_an_object_that_is_replaced_while_it_is_copied_is_not_copied(backend, monkeypatch):
    objects, source = backend.objects, backend.path("source")
    uploaded(backend, source, "run", [backend.part, 3])
    real = type(objects).head

    def head(self, path):
        found = real(self, path)
        return replace(found, mark=OTHER) if path == source else found

    monkeypatch.setattr(type(objects), "head", head)
    with pytest.raises(FileNotFoundError):
        objects.copy_object(source, OTHER, backend.path("model"), "run")
    assert objects.head(backend.path("model")) is None
    assert list(objects.uploads(backend.place.path)) == []


def test_more_parts_than_one_request_takes(make_backend):
    """Google joins 32 objects at a time."""
    backend = make_backend("gs")
    made, data = uploaded(backend, backend.path("model"), "run", [backend.part] * 33 + [1])
    assert made.nbytes == len(data)
    assert backend.place.join("model").read(0, len(data) + 1) == data
    assert names(backend) == ["model"]


def test_a_name_with_unusual_characters(backend):
    objects, path = backend.objects, backend.path("a b/ü+%41&=(1).bin")
    made, data = uploaded(backend, path, "run", [backend.part, 3])
    assert objects.head(path).mark == made.mark
    copy = objects.copy_object(path, made.mark, f"{path}.copy", "run")
    assert copy.nbytes == len(data)
    assert objects.remove_object(path, made.mark)
    upload = objects.begin(path, "run")
    assert [(one.path, one.key) for one in objects.uploads(path)] == [(path, upload.key)]
    objects.abort(upload)
    assert names(backend) == ["a b/ü+%41&=(1).bin.copy"]
