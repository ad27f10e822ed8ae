"""MeasuredView: a plain checkpoint as if it had been saved in other types or codes, and how far these are from it.

What is lost is bounded by the plan, and measured while the values are made.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping

from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.contents import Contents
from wherry.formats.format import Opened
from wherry.mover.decode import Parts
from wherry.quantized.computed_reader import ComputedReader


class QuantisationError:
    """How far codes are from the values: the largest error, and that as a share of the bound; several threads add."""

    def __init__(self) -> None:
        self.error = self.share = 0.0
        self._lock = threading.Lock()

    def add(self, error: float, share: float) -> None:
        """Record what was measured of some values."""
        with self._lock:
            self.error, self.share = max(self.error, error), max(self.share, share)


class MeasuringReader(ComputedReader):
    """A reader that makes values of plain tensors and measures them; used from several threads.

    Attributes:
        measured: how far the values that were made are from the plain ones.
    """

    def __init__(
        self, reader: Contents, stored: Mapping[KeyPath, TensorSpec], files: Mapping[str, bytes]
    ) -> None:
        """See ComputedReader."""
        super().__init__(reader, stored, files)
        self._parts = Parts(reader, stored)
        self.measured = QuantisationError()


class MeasuredView(Checkpoint):
    """A checkpoint in other types or codes; its source must stay open while the view is used."""

    is_view = True

    def __init__(self, source: Checkpoint, manifest: Manifest) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the plain checkpoint.
            manifest: what the view holds.
        """
        self._source = source
        super().__init__(Opened(source.detection, manifest, self._over(source.reader), source.ignored))
        self.laid_out, self.snippet, self.parts = source.laid_out, source.snippet, source.parts
        self.uses, self.uses_in_files = source.uses, source.uses_in_files
        self.bounds, self.notes = source.bounds, source.notes

    @property
    def original(self) -> Checkpoint:
        """The stored checkpoint."""
        return self._source.original

    @property
    def parameters(self) -> int:
        """The number of elements of the source's tensors."""
        return self._source.parameters

    @property
    def measured(self) -> QuantisationError:
        """How far the values that were made are from the source's."""
        assert isinstance(self.reader, MeasuringReader), "`_over` gives no other"
        return self.reader.measured

    def reader_over(self, reader: Contents) -> Contents:
        """A reader of the view over one of the stored checkpoint."""
        return self._over(self._source.reader_over(reader))

    @abstractmethod
    def _over(self, reader: Contents) -> MeasuringReader:
        """A reader of the view over one of the source."""
