"""Writes the frames of archives as soon as they are known, for files that are uploaded in parts.

A frame holds the CRC-32 of the tensor before it, and the directory at the end of an archive those of all its tensors.
On a local disk all frames are written at the end; in an upload, every part with a frame would have to wait in memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from wherry.integrations.containers.zip.write import frame, patch_descriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.integrations.containers.zip.write import ArchivePlan

    # Name of a file, offset, bytes.
    WriteFunction = Callable[[str, int, bytes], None]


class StreamedFrames:
    """The frames of the archives of one checkpoint; thread-safe."""

    def __init__(self, files: Mapping[str, tuple[Sequence[ArchivePlan], int]], write: WriteFunction) -> None:
        """Write what depends on no tensor: archives without tensors, and gaps between archives.

        Args:
            files: name → the archives in it, and its size.
            write: writes into a file.
        """
        self._write = write
        self._homes: dict[KeyPath, tuple[str, ArchivePlan, int]] = {}
        self._crcs: dict[ArchivePlan, dict[KeyPath, int]] = {}
        self._runs: dict[ArchivePlan, list[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()
        for name, (plans, size) in files.items():
            ends = [*(plan.start for plan in plans[1:]), size]
            for plan, end in zip(plans, ends, strict=bool(plans)):  # a file may hold no archive
                self._add(name, plan, end)

    def complete(self, path: KeyPath, crc: int) -> None:
        """Write the frames around a tensor, all of whose bytes are known.

        Args:
            path: of the tensor.
            crc: CRC-32 of its bytes.

        Raises:
            WherryError: the storage failed.
        """
        name, plan, index = self._homes[path]
        with self._lock:
            crcs = self._crcs.setdefault(plan, {})
            crcs[path] = crc
            known, last = dict(crcs), len(crcs) == len(plan.paths)
            if last:
                del self._crcs[plan]
                self._runs.pop(plan, None)
        if last and len(plan.paths) == 1:
            runs = list(frame(plan, known))
        else:
            runs = self._around(plan, index, crc)
            if last:
                *_others, end = frame(plan, known)
                runs.append(end)
        for offset, run in runs:
            self._write(name, offset, run)

    def _add(self, name: str, plan: ArchivePlan, end: int) -> None:
        for index, path in enumerate(plan.paths):
            self._homes[path] = (name, plan, index)
        if not plan.paths:
            for offset, run in frame(plan, {}):
                self._write(name, offset, run)
        stop = plan.start + plan.length
        if stop < end:
            self._write(name, stop, bytes(end - stop))

    def _around(self, plan: ArchivePlan, index: int, crc: int) -> list[tuple[int, bytes]]:
        """The run before the first tensor, and the one after a tensor unless that is the end of the archive."""
        with self._lock:
            runs = self._runs.get(plan)
            if runs is None:
                runs = self._runs[plan] = list(frame(plan, dict.fromkeys(plan.paths, 0)))
        found = runs[:1] if index == 0 else []
        if index + 1 < len(plan.paths):
            offset, run = runs[index + 1]
            found.append((offset, patch_descriptor(run, crc)))
        return found
