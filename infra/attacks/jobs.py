"""Jobs of a divided conversion that somebody else wrote: their claims, receipts and proofs, altered or signed anew."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks import lies, prepare
from attacks.case import Case

if TYPE_CHECKING:
    from wherry.workers.records import Records

TARGET = "target"
_KINDS = ("job", "claim", "receipt", "proof")
_SIGNED = 60  # lying records of each kind that carry the user's own signature
_UNSIGNED = 8
_TEXTS = (b"", b"\n", b"{}\tmac\n", b"\xff\t\xff\n", b"{" * 9000 + b"\t" + b"0" * 64 + b"\n", bytes(1 << 20))
_NAMES = (
    "claim-receipt-99999-0",
    "claim-receipt-00000-99999999999999999999",
    "receipt-99999-00000000",
    "receipt-00000-ffffffff",
    "proof-99999-00000000",
    "claim-receipt-00000-0\nforged",
    "receipt-\x1b]0;title\x07",
    "x" * 200,
)


def _be(action: Callable[[], object]) -> None:
    """Do something in another process, as another worker would."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not status, "a process that makes the job failed"


def _split(good: Path, folder: Path) -> None:
    from wherry.core.request import TargetRequest, convert_request
    from wherry.workers.job import split

    split(convert_request(str(good), [TargetRequest(str(folder / TARGET), "dcp")], lineage=False), 16)


def _work(folder: Path) -> None:
    from wherry.workers.work import work

    work(str(folder / TARGET))


def written_job(good: Path, folder: Path) -> Records:
    """A job whose units are written and read back, but not committed; one claim is left."""
    from wherry.storage.stores import locate
    from wherry.workers.records import job_records

    _be(partial(_split, good, folder))
    _be(partial(_work, folder))
    _be(partial(_work, folder))
    found = job_records(locate(str(folder / TARGET)))
    kinds = {name.partition("-")[0].partition(".")[0] for name in found.names()}
    assert kinds >= set(_KINDS), f"the job has records of {kinds} only"
    return found


def _name_of(found: Records, kind: str) -> str:
    return next(name for name in found.names() if name.startswith(kind))


def _signed(kind: str, number: int, found: Records) -> None:
    """Replace a record by one that lies in one place, and is signed."""
    from wherry.target.key import journal_key
    from wherry.target.signed_log import sign

    file = Path(found.folder.path) / _name_of(found, kind)
    truth = json.loads(file.read_bytes().rpartition(b"\t")[0])
    [*_, (_, row)] = lies.documents(truth, number + 1, f"job-{kind}")
    file.write_bytes(sign(_writable(row), journal_key()))


def _writable(row: Any) -> dict[str, Any]:
    """The row as JSON can hold it."""
    return json.loads(json.dumps(row, default=str))


def _unsigned(kind: str, number: int, found: Records) -> None:
    file = Path(found.folder.path) / _name_of(found, kind)
    row, _tab, mac = file.read_bytes().rpartition(b"\t")
    [*_, (_, lie)] = lies.documents(json.loads(row), number + 1, f"unsigned-{kind}")
    file.write_bytes(json.dumps(lie).encode("utf-8", "surrogatepass") + b"\t" + mac)


def _text(kind: str, text: bytes, found: Records) -> None:
    (Path(found.folder.path) / _name_of(found, kind)).write_bytes(text)


def _swapped(kind: str, other: str, found: Records) -> None:
    """A record with the contents, and the signature, of one of another kind."""
    folder = Path(found.folder.path)
    shutil.copyfile(folder / _name_of(found, other), folder / _name_of(found, kind))


def _placed(kind: str, put: Callable[[Path], object], found: Records) -> None:
    """A record that is no file of its own."""
    file = Path(found.folder.path) / _name_of(found, kind)
    file.unlink()
    put(file)


def _open_claim(number: int, found: Records) -> None:
    """A lying claim on a unit that is not written."""
    for name in found.names():
        if name.startswith(("receipt", "proof")):
            found.remove(name)
    _signed("claim", number, found)


def _named(name: str, found: Records) -> None:
    (Path(found.folder.path) / name).write_bytes(b"{}\t00\n")


def _many(found: Records) -> None:
    for number in range(20_000):
        (Path(found.folder.path) / f"claim-receipt-00000-{number + 10}").write_bytes(b"")


def _folder_is_link(found: Records) -> None:
    shutil.rmtree(found.folder.path)
    Path(found.folder.path).symlink_to("/etc")


def _data_changed(found: Records) -> None:
    """Everything that the workers have written, but the records."""
    for area in Path(found.folder.path).parent.glob(f".wherry-{TARGET}.*"):
        for file in area.rglob("*"):
            if file.is_file() and area.suffix != ".job":
                file.write_bytes(b"\xff" * file.stat().st_size)


def _made(good: Path, change: Callable[[Records], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        change(written_job(good, folder))
        return folder / TARGET

    return make


def _sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 8 << 30)


_PLACES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "outside": lambda file: file.symlink_to("/etc/passwd"),
    "nowhere": lambda file: file.symlink_to("absent"),
    "sparse": _sparse,
}


def cases(place: Path) -> Iterator[Case]:
    """Every job; `place` has what `prepare` made."""
    make = partial(_made, place / prepare.GOOD)
    yield Case("job/sound", make(lambda _found: None))
    for kind in _KINDS:
        for number in range(_SIGNED):
            yield Case(f"job/signed-{kind}-{number}", make(partial(_signed, kind, number)))
        for number in range(_UNSIGNED):
            yield Case(f"job/unsigned-{kind}-{number}", make(partial(_unsigned, kind, number)))
        for number, text in enumerate(_TEXTS):
            yield Case(f"job/text-{kind}-{number}", make(partial(_text, kind, text)))
        for name, put in _PLACES.items():
            yield Case(f"job/{name}-{kind}", make(partial(_placed, kind, put)))
        for other in _KINDS:
            if other != kind:
                yield Case(f"job/{other}-as-{kind}", make(partial(_swapped, kind, other)))
    for number in range(_SIGNED):
        yield Case(f"job/open-claim-{number}", make(partial(_open_claim, number)))
    for number, name in enumerate(_NAMES):
        yield Case(f"job/name-{number}", make(partial(_named, name)))
    yield Case("job/many", make(_many))
    yield Case("job/link", make(_folder_is_link))
    yield Case("job/data", make(_data_changed))
