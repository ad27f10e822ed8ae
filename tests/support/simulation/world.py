"""A world of a simulation: a folder of one store, with one target in it, and what must hold there after every step.

- What is visible at the target is whole, of one conversion, and stays as it is.
- What a log calls durable is durable when the log says so.
- One process has made the target, and says so; nobody else does.
- No process writes into a file of another one.
"""

from __future__ import annotations

import json
import stat

from greenlet import getcurrent

from tests.support.simulation.buckets import Bucket, simulated_store
from tests.support.simulation.files import ROOT, Files
from tests.support.simulation.schedule import Thread
from tests.support.simulation.targets import MARKER, NAME, SIDECAR, move_of
from wherry.errors import StorageError, UnsupportedError
from wherry.store.folders import is_staging
from wherry.store.local_store import LocalStore
from wherry.store.location import Location
from wherry.store.sidecar import sidecar_name
from wherry.target import signed_log
from wherry.target.journal import decode_all, encode_all
from wherry.target.signed_log import journal_key
from wherry.target.staging import JOURNAL

FILE_SIDECAR = sidecar_name(NAME)
FOLDER = f"{ROOT}/models"


class World:
    """What both kinds of worlds share.

    Attributes:
        conversions: by name.
        maker: the process in whose call the target became visible; None before, or if no process was running then.
        made: what is visible; None before.
        reported: the processes that have said that they committed the target.
        owned: process → the area that it opened.
        is_forged: whether somebody has written into a log.
    """

    def __init__(self, simulation, conversions):
        self.simulation = simulation
        self.conversions = {one.name: one for one in conversions}
        self.single = conversions[0].single
        self.maker, self.made = None, None
        self.reported, self.owned, self.is_forged = [], {}, False
        simulation.observe = self.observe

    def observe(self):
        """Check what is visible."""
        found = self.visible()
        if self.made is None:
            if found is None:
                return
            self._require_whole(found)
            self.made = found
            thread = getcurrent()
            self.maker = thread.process if type(thread) is Thread else None
        elif found != self.made:
            if found is None and not self.reported and self._may_be_lost():
                self.made = self.maker = None
                return
            raise self.simulation.breaks(
                f"the target has changed after it was visible: {_brief(found)}, was {_brief(self.made)}"
            )

    @property
    def refusals(self):
        """The error of every writer, if the store cannot commit the target."""
        return ()

    def forged(self, plan):
        """A line without a signature that names all pieces of a conversion."""
        pieces = self.conversions[plan].pieces if plan in self.conversions else ()
        line = json.dumps(
            encode_all([move_of(number, piece) for number, piece in enumerate(pieces)])
        ).encode()
        return line + b"\t" + b"00" * 32 + b"\n"

    def logged(self, conversion):
        """The pieces that a log names and that the next run resumes; unknown where it asks the store."""
        return []

    def is_obstructed(self):
        """Whether all that is there is a part that came after the upload of a stalled run was aborted (Google)."""
        return False

    def excuses(self, process, error):
        """Whether a process that nothing but lost answers disturbed may end with an error of the storage."""
        return self.is_forged or bool(process.struck)

    def _may_be_lost(self):
        """Whether a target that nobody has reported can be gone again."""
        return False

    def _require_whole(self, found):
        """The files are all those of one conversion, with its bytes."""
        files = {name: data for name, (_mark, data) in found.items()}
        text = files.get(FILE_SIDECAR if self.single else SIDECAR)
        if text is None:
            raise self.simulation.breaks(f"a target is visible without its sidecar: {sorted(files)}")
        try:
            row = json.loads(text)
            conversion = self.conversions[row["conversion"]]
        except (ValueError, KeyError):
            raise self.simulation.breaks(f"a target is visible with the sidecar {text!r}") from None
        if self.single:
            expected = {NAME: conversion.files[""], FILE_SIDECAR: text}
        else:
            expected = {**conversion.files, MARKER: b"done", SIDECAR: text}
        if files != expected:
            raise self.simulation.breaks(f"a target is visible that is not whole: {files}, not {expected}")

    def report(self, process):
        """A process says that it has committed the target."""
        self.reported.append(process)
        if len(self.reported) > 1:
            raise self.simulation.breaks(
                f"two processes say that they made the target: {[one.name for one in self.reported]}"
            )
        if self.made is None:
            raise self.simulation.breaks(
                f"{process.name} says that it made the target, and nothing is visible"
            )
        if self.maker not in (None, process):
            raise self.simulation.breaks(f"{process.name} says that it made the target of {self.maker.name}")


class FilesWorld(World):
    """A folder of a file system."""

    def __init__(self, simulation, conversions, lacks=()):
        super().__init__(simulation, conversions)
        self.files = simulation.files = Files(simulation, lacks)
        made = self.files._node(stat.S_IFDIR | 0o755)
        self.files._change((self.files.root, "models", made))
        self.files._settle(range(1))
        self.files.written = self._written
        simulation.error_of = lambda fault: OSError(5, f"input/output error ({fault.kind})")
        self.place = Location(LocalStore(), f"{FOLDER}/{NAME}")
        lose = simulation.on_power

        def lose_power():
            before = self.made is not None
            lose()
            if before and self.reported and self.visible() is None:
                raise self.simulation.breaks("a loss of power has undone a commit that was reported")
            self.observe()

        simulation.on_power = lose_power

    @property
    def refusals(self):
        """A file cannot appear whole where there is neither `renameat2` nor a hard link."""
        refused = self.single and {"links", "renameat2"} <= self.files.lacks
        return (UnsupportedError,) if refused else ()

    def excuses(self, process, error):
        """Without locks, a process that has lost its lease can take the area of the present owner: both end so."""
        return super().excuses(process, error) or "flock" in self.files.lacks

    def visible(self):
        node = self.files.find(f"{FOLDER}/{NAME}")
        if node is None:
            return None
        if self.single:
            sidecar = self.files.find(f"{FOLDER}/{FILE_SIDECAR}")
            found = {NAME: (node.serial, _bytes(node))}
            return found | ({FILE_SIDECAR: (sidecar.serial, _bytes(sidecar))} if sidecar else {})
        if node.names is None:
            return {NAME: (node.serial, _bytes(node))}
        return {name: (inner.serial, _bytes(inner)) for name, inner in node.names.items()}

    def _may_be_lost(self):
        return True  # its name was not synced yet

    def left(self):
        """What lies next to the target, and is not of it."""
        # The sidecar of a file that does not exist is replaced by the next commit, and found by nobody before.
        own = {NAME, FILE_SIDECAR} if self.single else {NAME}
        return sorted(set(self.files.find(FOLDER).names) - own)

    def _written(self, process, node, path):
        """Bytes of a file have changed."""
        place = self.files.path_of(node)
        if place is None:
            return
        area, _, inside = place[len(FOLDER) + 1 :].partition("/")
        if area == NAME:
            raise self.simulation.breaks(f"{process.name} writes into the visible target: {place}")
        if not inside or not is_staging(area):
            return
        own = self.owned.get(process)
        identity = area.removeprefix(f".wherry-{NAME}.")
        if own is not None and "." not in identity and own != area:
            raise self.simulation.breaks(f"{process.name} writes into {place}, and has {own}")
        if inside == JOURNAL:
            self._require_durable(area, bytes(node.data))

    def _require_durable(self, area, text):
        """Everything that a journal names is durable, with its names."""
        folder = self.files.find(f"{FOLDER}/{area}")
        plan, done = _logged(text)
        if plan not in self.conversions:
            return
        conversion = self.conversions[plan]
        if NAME not in folder.names:
            return  # it was committed, or never made: the next run does not use the log
        for number in done:
            piece = conversion.pieces[number]
            file = folder.durable.get(NAME)
            if piece.file and file is not None:
                file = file.durable.get(piece.file)
            if file is None:  # without the name of its area, the log is not there either
                raise self.simulation.breaks(
                    f"the log names piece {number}, and the name of its file is not durable"
                )
            if bytes(file.durable[piece.offset : piece.stop]) != piece.data:
                raise self.simulation.breaks(f"the log names piece {number}, and its bytes are not durable")

    def forge(self):
        """Somebody who has no key adds a line to the logs that are there: everything is done."""
        for path, node in self.files.walk(FOLDER):
            if path.endswith(f"/{JOURNAL}") and node.data:
                self.is_forged, (plan, _done) = True, _logged(bytes(node.data))
                node.data += self.forged(plan)
                node.durable, node.dirty = bytes(node.data), []

    def logged(self, conversion):
        """The pieces that the fullest log of a conversion names, which its next run resumes."""
        if self.is_forged:
            return []  # such a log is not used at all
        found = [[]]
        for path, node in self.files.walk(FOLDER):
            area = path[len(FOLDER) + 1 :].partition("/")[0]
            if path.endswith(f"{area}/{JOURNAL}") and area.startswith(
                f".wherry-{NAME}.{conversion.identity}"
            ):
                plan, done = _logged(bytes(node.data))
                usable = self.files.find(f"{FOLDER}/{area}/{NAME}") is not None and not area.endswith(
                    ".draft"
                )
                found.append(done if plan == conversion.name and usable else [])
        return max(found, key=len)

    def opened(self, process, target, done):
        """A process has opened the target, and resumes."""
        self.owned[process] = target.area.rpartition("/")[2]
        for number in sorted(done):
            piece = target.conversion.pieces[number]
            node = self.files.find(f"{target.area}/{NAME}" + (f"/{piece.file}" if piece.file else ""))
            if self.files.find(target.area) is None:
                return  # the process was stopped, and another one has the target
            if node is None or bytes(node.data[piece.offset : piece.stop]) != piece.data:
                raise self.simulation.breaks(f"{process.name} resumes piece {number}, and its bytes are lost")


class ObjectsWorld(World):
    """A folder of a bucket."""

    def __init__(self, simulation, conversions, kind):
        super().__init__(simulation, conversions)
        self.bucket = Bucket(simulation, kind)
        simulation.error_of = lambda fault: StorageError(
            f"the connection was lost ({fault.kind})", cure="try again", retryable=True
        )
        # A store of objects cannot tell a request that is late from one in time: no stop lies between a look at the
        # lease and the act that relies on it.
        simulation.is_look = lambda name, what: name == "head" and what.endswith(".lease")
        self.place = Location(simulated_store(self.bucket), f"bucket/models/{NAME}")
        self._seen = set()

    def visible(self):
        self._look_at_journals()
        blobs, path = self.bucket.blobs, self.place.path
        if self.single:
            if path not in blobs:
                return None
            sidecar = blobs.get(f"bucket/models/{FILE_SIDECAR}")
            found = {NAME: (blobs[path].mark, blobs[path].data)}
            return found | ({FILE_SIDECAR: (sidecar.mark, sidecar.data)} if sidecar else {})
        if f"{path}/{MARKER}" not in blobs:
            return None
        names = [one[len(path) + 1 :] for one in self.bucket.below(f"{path}/")]
        if self.bucket.kind == "az":  # an upload that is aborted is an empty object for a moment
            names = [one for one in names if blobs[f"{path}/{one}"].data]
        return {
            name: (blobs[f"{path}/{name}"].mark, blobs[f"{path}/{name}"].data)
            for name in names
            if not any(map(is_staging, name.split("/")))
        }

    def is_obstructed(self):
        found = self.bucket.below(f"{self.place.path}/")
        return bool(found) and all("/.wherry-parts/" in path for path in found)

    def excuses(self, process, error):
        """Clients attempt again; an object that a former run adds to the log late is an error that a retry mends."""
        late = error.retryable and ("which the store did not list" in str(error) or "/journal-" in str(error))
        return self.is_forged or late

    def report(self, process):
        """A process says that it has committed the target: it leaves no upload, even if nobody learned its id."""
        super().report(process)
        left = [one.path for one in self.bucket.uploads.values() if one.maker is process]
        if left:
            raise self.simulation.breaks(f"{process.name} has made the target and leaves uploads of {left}")

    def left(self):
        """What lies next to the target, and is not of it; uploads too."""
        own = [self.place.path, f"bucket/models/{FILE_SIDECAR}"] if self.single else [f"{self.place.path}/"]
        names = [one for one in self.bucket.blobs if self.made is None or not one.startswith(tuple(own))]
        inner = [one for one in self.bucket.blobs if "/.wherry-parts/" in one]
        # That which was begun late, under a name that another program could use too, is left for a week.
        uploads = [
            f"{one.path} (upload)"
            for one in self.bucket.uploads.values()
            if one.maker is not None or f"/.wherry-{NAME}." in one.path
        ]
        # Azure itself removes blocks at the name of a blob after a week, and nobody else finds them.
        blocks = [f"{path} (blocks)" for path in self.bucket.blocks if path not in self.bucket.known]
        return sorted({*names, *inner, *uploads, *blocks})

    def opened(self, process, target, done):
        """A process has opened the target, and resumes."""
        self.owned[process] = target.area

    def forge(self):
        """Somebody who has no key adds a line to the logs that are there: everything is done."""
        logs = [one for one in self.bucket.blobs if "/journal-" in one]
        for path in sorted(logs)[-1:]:
            self.is_forged = True
            first, found = self.bucket.blobs.get(f"{path.rpartition('-')[0]}-000000"), self.bucket.blobs[path]
            plan, _done = _logged(first.data if first else b"")
            self.bucket.set(path, found.data + self.forged(plan), found.run)
            self._seen.add((path, self.bucket.blobs[path].mark))

    def _look_at_journals(self):
        """Every part that the log of the present owner names is in the store."""
        thread = getcurrent()
        process = thread.process if type(thread) is Thread else None
        for path in [one for one in self.bucket.blobs if "/journal-" in one]:
            found = self.bucket.blobs[path]
            if (path, found.mark) in self._seen:
                continue
            self._seen.add((path, found.mark))
            lease = self.bucket.blobs.get(f"bucket/models/.wherry-{NAME}.lease")
            if process is None or lease is None or lease.run != found.run:
                continue  # of a run that has lost the target: the next one asks the store
            for line in found.data.split(b"\n")[:-1]:
                self._require_sent(json.loads(line.rpartition(b"\t")[0]))

    def _require_sent(self, row):
        for path, part in row.get("parts", []):
            if path not in self.bucket.blobs and not self._has_part(path, part["number"], part["mark"]):
                raise self.simulation.breaks(
                    f"the log names part {part['number']} of {path}, which the store does not have"
                )

    def _has_part(self, path, number, mark):
        if self.bucket.kind == "s3":
            uploads = [one for one in self.bucket.uploads.values() if one.path == path]
            return any(one.parts.get(number + 1, ("",))[0] == mark for one in uploads)
        if self.bucket.kind == "az":
            return mark in self.bucket.blocks.get(path, {})
        folder, _, name = path.rpartition("/")
        parts = self.bucket.below(f"{folder}/.wherry-parts/{name}/")
        return any(
            one.endswith(f"part-{number:05d}") and self.bucket.blobs[one].mark == mark for one in parts
        )


def _logged(text):
    """The conversion and the pieces that a journal names, up to the first line that its key has not signed."""
    rows, mac = [], signed_log._FIRST_MAC
    for line in text.split(b"\n")[:-1]:
        row, _tab, signed = line.rpartition(b"\t")
        mac = signed_log._next_mac(journal_key(), mac, row)
        if mac.hex().encode() != signed:
            break
        rows.append(json.loads(row))
    done = [int(move.source[0][1:]) for row in rows[1:] for move in decode_all(row)]
    return rows[0]["plan"] if rows else "", done


def _bytes(node):
    return bytes(node.data) if node.data is not None else tuple(sorted(node.names))


def _brief(found):
    return None if found is None else {name: data for name, (_mark, data) in found.items()}
