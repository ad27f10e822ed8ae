"""What a universal checkpoint shows: parameters and moments, what was not trained, and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.integrations.formats.deepspeed.rank_files import (
    buffers_of,
    frozen_parameters,
    others_of,
    with_shared,
)
from wherry.integrations.formats.deepspeed.state_files import (
    AGAIN,
    COUNT,
    WEIGHT,
    open_state,
    whole_shape,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.formats.contents import Extent
    from wherry.integrations.formats.deepspeed.rank_files import RankFile
    from wherry.storage.location import Location

_MODULE, _OF_ZERO_3 = "module", "zero_pp_rank_"


class UniversalTree:
    """The tensors and numbers, with their bytes."""

    def __init__(
        self, folder: Location, files: Mapping[str, Mapping[str, Location]], *, trained: bool
    ) -> None:
        """Begin an empty tree.

        Args:
            folder: of the step.
            files: parameter → its files by name.
            trained: whether any parameter has moments.
        """
        self.specs: dict[KeyPath, TensorSpec] = {}
        self.places: dict[KeyPath, tuple[Extent, ...]] = {}
        self.values: dict[KeyPath, Any] = {}
        self._folder, self._files, self._trained = folder, files, trained

    def add(self, name: str, ranks: Sequence[tuple[int, ...]]) -> None:
        """Add a parameter and its states.

        Args:
            name: of the parameter.
            ranks: its shape in each rank that has it.

        Raises:
            IncompleteError: an optimizer had it, and its moments are missing.
            CorruptError: a state is no tensor, or has another shape.
        """
        for file, place in self._files[name].items():
            one = open_state(place)
            if set(self._files[name]) == {WEIGHT} and self._trained and one.joined:
                raise IncompleteError(
                    f"the moments of {name} are missing", uri=self._folder.uri, path=name, cure=AGAIN
                )
            key = (name,) if file == WEIGHT else (f"optimizer.state.{name}.{file.removesuffix('.pt')}",)
            if one.spec is None:
                if file != COUNT:
                    raise CorruptError("expected a tensor", uri=one.location.uri, path=name, cure=AGAIN)
                self.values[key] = one.values[()]
                continue
            shape = one.spec.shape if file == COUNT else whole_shape(name, one, ranks)
            if file not in (COUNT, WEIGHT) and shape != self.specs[name,].shape:
                raise CorruptError(
                    f"{file} has the shape {list(shape)}, {WEIGHT} {list(self.specs[name,].shape)}",
                    uri=self._folder.uri, path=name, cure=AGAIN,
                )  # fmt: skip
            self.specs[key], self.places[key] = TensorSpec(key, shape, one.spec.dtype), one.extents

    def add_rest(self, models: Sequence[Sequence[RankFile]]) -> None:
        """Add what was not trained, buffers and second names, from the files of the ranks.

        Raises:
            UnsupportedError: several tensor-parallel or pipeline ranks have them, each its own part.
        """
        first = models[0]
        rows = [*frozen_parameters(first, in_parts=len(first) > 1), *buffers_of(first[0])]
        if rows and len(models) > 1:
            raise self._in_parts(rows[0][0].path[0])
        for spec, extents in rows:
            self.specs[spec.path], self.places[spec.path] = spec, extents
        for ranks in models:
            with_shared(ranks[0], self.specs, self.places)
        if len(models) == 1 and not first[0].location.name.startswith(_OF_ZERO_3):
            for spec, extents in list(others_of(first[0], self.specs)):
                self.specs[spec.path], self.places[spec.path] = spec, extents

    def is_copy(self, name: str, models: Sequence[Sequence[RankFile]]) -> bool:
        """Whether a folder that no optimizer had is a copy of a tensor of the tree; if it is not, the copy is added.

        Raises:
            CorruptError: the model states do not have it, or it has moments.
            UnsupportedError: several ranks have it, of which DeepSpeed copies the first.
        """
        owners = [ranks[0] for ranks in models if (_MODULE, name) in ranks[0].manifest.tensors]
        if not owners or set(self._files[name]) != {WEIGHT}:
            raise CorruptError(
                f"zero/{name} is no parameter of the model states",
                uri=self._folder.uri, path=name, cure=AGAIN,
            )  # fmt: skip
        if len(owners) > 1:
            raise self._in_parts(name)
        there = (name,) in self.specs
        if not there:
            self.add(name, [owners[0].manifest.tensors[_MODULE, name].shape])
        return there

    def _in_parts(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name} was not trained, and universal checkpoints have no joined form of what several ranks have of it",
            uri=self._folder.uri, path=name, cure="load the checkpoint with DeepSpeed, and save the whole model",
        )  # fmt: skip
