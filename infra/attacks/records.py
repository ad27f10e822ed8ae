"""Records of wherry that somebody else wrote: sidecars, signatures, leases, journals and jobs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infra.attacks import lies, prepare
from infra.attacks.case import Case, Change, Make, Sound, as_json, write_file
from infra.attacks.lies import DIGITS
from wherry.target.staging import JOURNAL

if TYPE_CHECKING:
    from wherry.workers.records import Records

TARGET = "target"  # where the verb `convert here` writes, and where jobs do
_LEASE = {"host": "h", "pid": 1, "namespace": "n", "start": 1, "token": "01234567"}


def _sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 8 << 30)


PLACES: dict[str, Change] = {  # what is put in the place of a record
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "outside": lambda file: file.symlink_to("/etc/passwd"),
    "nowhere": lambda file: file.symlink_to("absent"),
    "sparse": _sparse,
}


def _put(file: Path, put: Change) -> None:
    file.unlink(missing_ok=True)
    put(file)


def _overwrite(files: Iterator[Path]) -> None:
    for file in files:
        if file.is_file():
            file.write_bytes(b"\xff" * file.stat().st_size)


# ---- Sidecars and signatures

_SIDECARS = {  # lying documents, and the digits of numbers
    "wherry.json": (150, ("long", "product", "wide", "point")), "wherry.sig": (60, ("long", "wide")),
}  # fmt: skip
_NO_SIDECARS = (b"", b"{}", b"[]", b"null", b"{" * 5000, b'{"schema": 99}', b"\xff", bytes(4096))


def _sidecars(place: Path) -> Iterator[Case]:
    written = place / prepare.WRITTEN
    sound = Sound("written", written, written)
    for name, (count, forms) in _SIDECARS.items():
        stored = json.loads((written / name).read_bytes())
        texts = {
            **{
                f"{name}/{number}": as_json(row)
                for number, row in enumerate(lies.documents(stored, count, name))
            },
            **{f"{name}/text-{number}": text for number, text in enumerate(_NO_SIDECARS)},
            **{f"digits-{name}/{what}": text for what, text in lies.texts_of_digits(stored, forms)},
        }
        for case, text in texts.items():
            yield Case(case, sound.replaced(written / name, text))


# ---- Leases and anchors

_NO_LEASES = (b"", b"\0" * 99, b"{" * 9000, b"[1]", b"null", b'{"pid":' + b"9" * 9000 + b"}")


def _lease(text: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / f".wherry-{TARGET}.lease").write_bytes(text)
        (folder / f".wherry-{TARGET}.00112233-01234567").mkdir(mode=0o700)
        return folder

    return make


def _leases() -> Iterator[tuple[str, Make]]:
    for number, found in enumerate(lies.documents(_LEASE, 60, "lease")):
        yield f"lease/{number}", _lease(as_json(found))
    for number, text in enumerate(_NO_LEASES):
        yield f"lease/text-{number}", _lease(text)
    for form, digits in DIGITS.items():
        anchor = f'{{"hash": "{"a" * 64}", "seq": %s}}'
        for kind, value in (("number", digits), ("text", f'"{digits}"')):
            yield f"digits-anchor/{kind}-{form}", write_file("anchor.json", (anchor % value).encode())
        lease = f'{{"host": "h", "pid": {digits}, "namespace": "n", "start": {digits}, "token": "01234567"}}'
        yield f"digits-lease/{form}", write_file(f".wherry-{TARGET}.lease", lease.encode())


# ---- Journals


def killed_before_its_commit(good: Path, folder: Path) -> Path:
    """What a conversion leaves that was killed when everything was written: lease, staging area and journal."""
    from wherry.testing.faults import killing, replace_value

    child = os.fork()
    if child == 0:
        import wherry

        with replace_value("wherry.target.staging:rename_without_replacing", killing):
            wherry.convert(good, folder / TARGET, to="torch-zip", lineage=False)
        os._exit(9)
    os.waitpid(child, 0)
    areas = [path for path in folder.iterdir() if path.is_dir()]
    assert areas, "the killed conversion left no staging area"
    return areas[0]


def _flip(at: int, area: Path) -> None:
    data = bytearray((area / JOURNAL).read_bytes())
    data[at % len(data)] ^= 1
    (area / JOURNAL).write_bytes(data)


def _link_out(area: Path) -> None:
    for file in [file for file in area.rglob("*") if file.is_file()]:
        _put(file, PLACES["outside"])


def _link_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/etc")


_LINES = (
    b"\n", b"{}\tmac\n", b"{" * 9000 + b"\t" + b"0" * 64 + b"\n", b"\xff\t\xff\n", bytes(1 << 20), b"a\tb\n" * 9000,
    b"\t" + b"\xc3\xa9".ljust(64, b"0") + b"\n",
)  # fmt: skip
_AREAS: dict[str, Change] = {
    "data": lambda area: _overwrite(file for file in area.rglob("*") if file.name != JOURNAL),
    "links": _link_out,
    "area-is-link": _link_folder,
    "open": lambda area: area.chmod(0o777),
    **{
        name: lambda area, put=PLACES[name]: _put(area / JOURNAL, put)
        for name in ("fifo", "device", "folder", "outside")
    },
    **{f"flipped-{at}": partial(_flip, at) for at in range(0, 400, 40)},
    **{
        f"text-{number}": lambda area, text=text: (area / JOURNAL).write_bytes(text)
        for number, text in enumerate(_LINES)
    },
}


def _journals(place: Path) -> Iterator[tuple[str, Make]]:
    def area(change: Change, folder: Path) -> Path:
        change(killed_before_its_commit(place / prepare.GOOD, folder))
        return folder

    for name, change in _AREAS.items():
        yield f"journal/{name}", partial(area, change)


# ---- Jobs of divided conversions: claims, receipts and proofs, altered or signed anew

_KINDS = ("job", "claim", "receipt", "proof")
_SIGNED, _UNSIGNED = 60, 8  # lying records of each kind, with the user's own signature and without
_TEXTS = (b"", b"\n", b"{}\tmac\n", b"\xff\t\xff\n", b"{" * 9000 + b"\t" + b"0" * 64 + b"\n", bytes(1 << 20))
_NAMES = (
    "claim-receipt-99999-0", "claim-receipt-00000-99999999999999999999", "receipt-99999-00000000",
    "receipt-00000-ffffffff", "proof-99999-00000000", "claim-receipt-00000-0\nforged", "receipt-\x1b]0;title\x07",
    "x" * 200,
)  # fmt: skip


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
    from wherry.store.local_store import locate
    from wherry.workers.records import job_records

    for action in (partial(_split, good, folder), partial(_work, folder), partial(_work, folder)):
        _be(action)
    found = job_records(locate(str(folder / TARGET)))
    kinds = {name.partition("-")[0].partition(".")[0] for name in found.names()}
    assert kinds >= set(_KINDS), f"the job has records of {kinds} only"
    return found


def _file_of(found: Records, kind: str) -> Path:
    return Path(found.folder.path) / next(name for name in found.names() if name.startswith(kind))


def _lying(file: Path, number: int, seed: str) -> object:
    truth = json.loads(file.read_bytes().rpartition(b"\t")[0])
    return [*lies.documents(truth, number + 1, seed)][-1]


def _signed(kind: str, number: int, found: Records) -> None:
    """Replace a record by one that lies in one place, and is signed."""
    from wherry.target.signed_log import journal_key, sign

    file = _file_of(found, kind)
    row = json.loads(json.dumps(_lying(file, number, f"job-{kind}"), default=str))
    file.write_bytes(sign(row, journal_key()))


def _unsigned(kind: str, number: int, found: Records) -> None:
    file = _file_of(found, kind)
    mac = file.read_bytes().rpartition(b"\t")[2]
    file.write_bytes(as_json(_lying(file, number, f"unsigned-{kind}")) + b"\t" + mac)


def _open_claim(number: int, found: Records) -> None:
    """A lying claim on a unit that is not written."""
    for name in found.names():
        if name.startswith(("receipt", "proof")):
            found.remove(name)
    _signed("claim", number, found)


def _many(found: Records) -> None:
    for number in range(20_000):
        (Path(found.folder.path) / f"claim-receipt-00000-{number + 10}").write_bytes(b"")


def _written(found: Records) -> Iterator[Path]:
    """Everything that the workers have written, but the records."""
    for area in Path(found.folder.path).parent.glob(f".wherry-{TARGET}.*"):
        yield from area.rglob("*") if area.suffix != ".job" else ()


def _changes() -> Iterator[tuple[str, Callable[[Records], object]]]:
    yield "sound", lambda _found: None
    for kind in _KINDS:
        for number in range(_SIGNED):
            yield f"signed-{kind}-{number}", partial(_signed, kind, number)
        for number in range(_UNSIGNED):
            yield f"unsigned-{kind}-{number}", partial(_unsigned, kind, number)
        for number, text in enumerate(_TEXTS):
            yield (
                f"text-{kind}-{number}",
                lambda found, kind=kind, text=text: _file_of(found, kind).write_bytes(text),
            )
        for name, put in PLACES.items():
            yield f"{name}-{kind}", lambda found, kind=kind, put=put: _put(_file_of(found, kind), put)
        for other in (
            one for one in _KINDS if one != kind
        ):  # a record with the contents, and the signature, of one of another kind
            yield (
                f"{other}-as-{kind}",
                lambda found, kind=kind, other=other: shutil.copyfile(
                    _file_of(found, other), _file_of(found, kind)
                ),
            )
    for number in range(_SIGNED):
        yield f"open-claim-{number}", partial(_open_claim, number)
    for number, name in enumerate(_NAMES):
        yield (
            f"name-{number}",
            lambda found, name=name: (Path(found.folder.path) / name).write_bytes(b"{}\t00\n"),
        )
    yield "many", _many
    yield "link", lambda found: _link_folder(Path(found.folder.path))
    yield "data", lambda found: _overwrite(_written(found))


def _jobs(place: Path) -> Iterator[tuple[str, Make]]:
    def job(change: Callable[[Records], object], folder: Path) -> Path:
        change(written_job(place / prepare.GOOD, folder))
        return folder / TARGET

    for name, change in _changes():
        yield f"job/{name}", partial(job, change)


def cases(place: Path) -> Iterator[Case]:
    """Every record; `place` has what `prepare` made."""
    yield from _sidecars(place)
    for name, make in (*_leases(), *_journals(place), *_jobs(place)):
        yield Case(name, make)
