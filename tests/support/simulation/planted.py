"""Faults that are planted into the product, each of which the state machine test must find.

Each replaces one function of the product, or of the adapter where that does what the mover does, as a careless change
might. `PLANTED` has them by name, with the store in whose worlds they show.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from tests.support.simulation.targets import NAME, FilesTarget
from tests.support.simulation.world import FOLDER
from wherry.store import folders
from wherry.store.amazon import AmazonStore
from wherry.target import clean, journal, leftovers, object_staging, signed_log, upload_run
from wherry.target import lease as leases
from wherry.target import staging as stagings
from wherry.target.lease import Lease, LeaseFile, LeaseObject, Verdict, Watch
from wherry.target.object_staging import ObjectStaging
from wherry.target.staging import FormerArea
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import SentBefore, UploadedFile

PLANTED: dict[str, tuple[str, Callable[[ExitStack], None]]] = {}


def planted(store):
    """Note a function that plants a fault: it gets a stack for its patches."""

    def note(function):
        PLANTED[function.__name__] = (store, function)
        return function

    return note


@contextmanager
def plant(name):
    """Let a fault be there while the block runs."""
    with ExitStack() as stack:
        PLANTED[name][1](stack)
        yield


def _replace(stack, owner, name, value):
    stack.enter_context(patch.object(owner, name, value))


# ---- the file system -------------------------------------------------------------------------------------------------


@planted("files")
def commit_before_the_names_are_durable(stack):
    """The staged files are renamed before their names are synced."""
    real = stagings.sync_tree
    _replace(stack, stagings, "sync_tree", lambda path: None if path.name == "out" else real(path))


@planted("files")
def commit_whose_name_is_not_synced(stack):
    """Success is said before the folder of the target is synced."""
    real = stagings.FileStaging._commit

    def commit(self, sidecar):
        with patch.object(stagings, "sync_folder", lambda _path: None):
            real(self, sidecar)

    _replace(stack, stagings.FileStaging, "_commit", commit)


@planted("files")
def log_before_its_sync(stack):
    """Pieces are recorded before their bytes are durable."""
    _replace(stack, FilesTarget, "sync", lambda self: self._dirty.clear())


@planted("files")
def names_that_cannot_be_listed_are_left_out(stack):
    """A folder whose listing fails is not synced, and nobody says so."""

    def sync_tree(path):
        if path.is_dir():
            for folder, _names, _files in os.walk(path):
                folders.sync_folder(type(path)(folder))

    _replace(stack, stagings, "sync_tree", sync_tree)


@planted("files")
def lease_aged_by_wall_clock(stack):
    """A lease has expired if the clock of this machine says so."""

    def look(self):
        self.sighting = self._see()
        if self.sighting is None:
            return Verdict.FREE
        age = leases.time.time() - self.sighting.state[3] / 1e9
        return Verdict.EXPIRED if age > self.expiry else Verdict.ALIVE

    _replace(stack, Watch, "look", look)


@planted("files")
def clean_removes_what_a_run_uses(stack):
    """`clean` takes every lease."""
    real = leftovers.judge_all

    def judge(watches):
        return {path: found._replace(verdict=Verdict.EXPIRED) for path, found in real(watches).items()}

    _replace(stack, leftovers, "judge_all", judge)


@planted("files")
def overwriting_rename(stack):
    """The commit replaces what is there."""
    target_path, rename, exists = (
        Path(f"{FOLDER}/{NAME}"),
        stagings.rename_without_replacing,
        stagings.is_there,
    )

    def replace_file(source, target):
        rename(source, target) if source.is_dir() else source.replace(target)

    _replace(stack, stagings, "rename_without_replacing", replace_file)
    _replace(stack, stagings, "is_there", lambda path: exists(path) and path != target_path)


@planted("files")
def file_without_a_commit_in_one_step(stack):
    """A single file is not refused where its name is given to an empty file first."""
    _replace(stack, stagings, "names_files_at_once", lambda *_files: True)


@planted("files")
def resume_ignores_the_header(stack):
    """The log of another conversion is used."""
    real = journal.past_in
    _replace(stack, journal, "past_in", lambda lines, _header: real(lines, {}))


@planted("files")
def signatures_are_not_checked(stack):
    """Whoever can write into a log decides what counts as written."""
    real = signed_log.hmac.digest
    _replace(stack, signed_log, "hmac", SimpleNamespace(compare_digest=lambda *_: True, digest=real))


@planted("files")
def lease_released_by_who_does_not_hold_it(stack):
    """A run that has lost its lease removes that of the next one."""
    real = LeaseFile.remove

    def remove(self):
        with patch.object(LeaseFile, "holds", lambda _self: True):
            return real(self)

    _replace(stack, LeaseFile, "remove", remove)


@planted("files")
def takeover_without_a_new_token(stack):
    """The area of a run that may still be at work is used as it is: its open files are those of the next run."""
    _replace(stack, FormerArea, "is_abandoned", lambda _self, _dead: True)


@planted("files")
def takeover_of_a_lease_that_has_changed(stack):
    """What was judged is not compared with what is replaced."""
    real = LeaseFile._replace
    _replace(stack, LeaseFile, "_replace", lambda self, draft, _seen: real(self, draft, self.look()))


@planted("files")
def copy_that_is_not_synced(stack):
    """The names of a copied area are not durable before its log is."""
    real = stagings.copy_area

    def copy_area(former, area):
        with patch.object(stagings, "sync_tree", lambda _path: None):
            real(former, area)

    _replace(stack, stagings, "copy_area", copy_area)


@planted("files")
def emptiest_log_is_resumed(stack):
    """Of several areas the one with the least in its log is resumed."""

    def progress(left, _name, _lease):
        log = left.path / stagings.JOURNAL
        return (-len(log.read_bytes()) if log.exists() else 0), True

    stack.enter_context(patch("wherry.target.staging._progress", progress))


# ---- stores of objects -----------------------------------------------------------------------------------------------


@planted("s3")
def clean_removes_a_live_upload(stack):
    """`clean` of a bucket takes any lease."""
    clean_removes_what_a_run_uses(stack)


@planted("s3")
def clean_of_a_committed_target(stack):
    """`clean` does not look whether the target was committed."""
    _replace(stack, clean, "is_committed", lambda *_: False)


@planted("s3")
def stalled_writer_goes_on(stack):
    """A run that was stopped does not ask whether it still holds the target."""
    _replace(stack, LeaseObject, "holds", lambda _self: True)
    _replace(stack, Lease, "require_fresh", lambda _self: None)


@planted("s3")
def stalled_writer_removes_what_it_finds(stack):
    """A run that was stopped while it opened the target removes the objects of the run that has it now."""
    _replace(stack, Lease, "require_fresh", lambda _self: None)


@planted("s3")
def heartbeat_that_overwrites(stack):
    """The heartbeat writes the lease in whatever state it is."""

    def renew(self, beat):
        found = self._store.head(self._place.path)
        return self._put(beat, found.mark if found else "")

    _replace(stack, LeaseObject, "renew", renew)


@planted("s3")
def object_lease_released_by_who_does_not_hold_it(stack):
    """A run that has lost its lease removes that of the next one."""
    real = LeaseObject.remove

    def remove(self):
        found = self._store.head(self._place.path)
        self._mark = found.mark if found else ""
        return real(self)

    _replace(stack, LeaseObject, "remove", remove)


@planted("s3")
def recorded_before_its_last_part_is_sent(stack):
    """A piece is recorded when all of its parts are sent but the last one."""

    def has_bytes(self, start, stop):
        sent = range(start // self._part, stop // self._part)
        return self.stored is not None or all(number in self._parts for number in sent)

    _replace(stack, UploadedFile, "has_bytes", has_bytes)


@planted("s3")
def assembled_with_a_part_missing(stack):
    """The last part of an object is forgotten."""
    real = AmazonStore.assemble
    _replace(
        stack, AmazonStore, "assemble",
        lambda self, upload, parts: real(self, upload, parts[:-1] or parts),
    )  # fmt: skip


@planted("s3")
def commit_member_first(stack):
    """What marks the checkpoint as complete is put before the sidecar."""
    real = UploadRun.commit

    def commit(self):
        first = [path for path in self.paths() if path.endswith("/COMMIT")]
        self.finish()
        for path in first:
            self._publish(path)
        paths = self.paths
        with patch.object(UploadRun, "paths", lambda own: (one for one in paths() if one not in first)):
            real(self)

    _replace(stack, UploadRun, "commit", commit)
    _replace(stack, UploadRun, "_require_own", lambda _self: None)


@planted("s3")
def stalled_commit_that_overwrites(stack):
    """The commit of a run that was stopped does not ask for the lease, and replaces what is there."""
    stalled_writer_goes_on(stack)
    real = AmazonStore._call

    def call(self, path, method, nbytes=0, **sent):
        if method == "complete_multipart_upload":
            del sent["IfNoneMatch"]
        return real(self, path, method, nbytes, **sent)

    _replace(stack, AmazonStore, "_call", call)


@planted("s3")
def objects_of_others_are_adopted(stack):
    """The commit does not look for objects that are not its own."""
    _replace(stack, UploadRun, "_require_own", lambda _self: None)
    _replace(stack, ObjectStaging, "_drop_others", lambda *_: None)


@planted("s3")
def log_trusted_without_the_store(stack):
    """Parts that a log names are not looked for."""

    def sent_before(past, objects, _store, _guard):
        found = {
            path: SentBefore(parts=dict(past.parts.get(path, {})), found=one) for path, one in objects.items()
        }
        for path, upload in past.uploads.items():
            if path not in objects:
                found[path] = SentBefore(upload, dict(past.parts.get(path, {})))
        return found, True

    _replace(stack, object_staging, "sent_before", sent_before)


@planted("s3")
def lost_answer_taken_for_a_refusal(stack):
    """A call whose answer was lost finds its own object, and takes it for that of another run."""
    _replace(stack, AmazonStore, "_own", lambda *_: None)


@planted("s3")
def upload_is_left_whose_answer_was_lost(stack):
    """The answer to the beginning of an upload is lost; a second one is begun, and nobody looks for the first."""
    _replace(stack, AmazonStore, "names_uploads", True)


@planted("s3")
def object_log_ignores_the_header(stack):
    """The log of another conversion is used."""
    resume_ignores_the_header(stack)


@planted("gs")
def parts_kept_of_other_bytes(stack):
    """A text that has changed since the interrupted run keeps the parts of which its object was made."""

    def agreeing(before, data, part):
        del data, part
        return replace(before, found=None)

    _replace(stack, upload_run, "agreeing", agreeing)
