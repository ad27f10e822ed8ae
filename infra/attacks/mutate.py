"""Mutations of sound checkpoints that know their structure: numbers, lengths, texts and blocks, not only bits."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from infra.attacks import lies, prepare
from infra.attacks.case import Case, as_json, document

Change = Callable[[bytearray, random.Random], None]

_FORMS = ("<B", "<H", "<I", "<Q", ">H", ">I", ">Q")
_WORDS = (
    b"..", b"/", b"\0", b"R", b".", b"\x93", b"c", b"(", b"}", b"\x80\x04", b"os\nsystem\n", b"NaN", b"1e999",
    b"null", b'"', b"\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"PK\x01\x02", b"\x28\xb5\x2f\xfd",
)  # fmt: skip


def _flip(data: bytearray, generator: random.Random) -> None:
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)


def _number(data: bytearray, generator: random.Random) -> None:
    form = generator.choice(_FORMS)
    size = struct.calcsize(form)
    if len(data) > size:
        value = generator.choice(lies.NUMBERS) & ((1 << 8 * size) - 1)
        struct.pack_into(form, data, generator.randrange(len(data) - size), value)


def _near(data: bytearray, generator: random.Random) -> None:
    """A length one more or less than it was."""
    at = generator.randrange(len(data))
    data[at] = data[at] + generator.choice((-1, 1)) & 255


def _cut(data: bytearray, generator: random.Random) -> None:
    del data[generator.randrange(len(data)) :]


def _remove(data: bytearray, generator: random.Random) -> None:
    at = generator.randrange(len(data))
    del data[at : at + generator.choice((1, 2, 4, 8, 64))]


def _repeat(data: bytearray, generator: random.Random) -> None:
    at, size = generator.randrange(len(data)), generator.choice((1, 4, 16, 200))
    data[at:at] = data[at : at + size] * generator.choice((1, 2, 50))


def _move(data: bytearray, generator: random.Random) -> None:
    one, other = generator.randrange(len(data)), generator.randrange(len(data))
    size = generator.choice((2, 8, 40))
    data[other : other + size] = data[one : one + size]


def _insert(data: bytearray, generator: random.Random) -> None:
    at = generator.randrange(len(data) + 1)
    data[at:at] = generator.choice(_WORDS)


def _zero(data: bytearray, generator: random.Random) -> None:
    at, size = generator.randrange(len(data)), generator.choice((1, 8, 64, 4096))
    data[at : at + size] = bytes(len(data[at : at + size]))


CHANGES: tuple[Change, ...] = (_flip, _number, _near, _cut, _remove, _repeat, _move, _insert, _zero)


def mutate(data: bytes, generator: random.Random, most: int = 3) -> bytes:
    """The bytes with up to so many changes; half of them near the beginning, where heads are."""
    found = bytearray(data)
    for _ in range(generator.randint(1, most)):
        if not found:
            break
        change = generator.choice(CHANGES)
        if len(found) > 512 and generator.random() < 0.5:
            head = found[:512]
            change(head, generator)
            found[:512] = head
        else:
            change(found, generator)
    return bytes(found)


def _text(file: Path, generator: random.Random) -> bytes | None:
    """A document that lies; None for a file without one."""
    sound = document(file)
    where = list(lies.places(sound)) if sound else []
    if not where or generator.random() < 0.3:
        return None
    return as_json(lies.lie(sound, generator.choice(where), generator))


def _change(seed: str, at: Path) -> None:
    """Change one file of a checkpoint, half the time one that says what the others are."""
    generator = random.Random(zlib.crc32(seed.encode()))
    files = [at] if at.is_file() else sorted(file for file in at.rglob("*") if file.is_file())
    small = [file for file in files if file.name.startswith((".", "_", "manifest")) or file.suffix == ".json"]
    file = generator.choice(small if small and generator.random() < 0.5 else files)
    text = _text(file, generator)
    file.write_bytes(mutate(file.read_bytes(), generator) if text is None else text)


def cases(place: Path, count: int, seed: int = 0) -> Iterator[Case]:
    """So many mutations of the sound checkpoints of a folder, evenly."""
    sound = list(prepare.sound(place))
    for number in range(count if sound else 0):
        one = sound[number % len(sound)]
        change = partial(_change, f"{seed} {number}")
        yield Case(f"{one.name}/mutation-{seed}-{number}", one.changed(change))
