"""The arguments of a run, which are the config of its model: a Namespace within `common.pt`.

They are shown as the companion `megatron_args.json`, and a target's file of this name becomes the Namespace of its
`common.pt`. Numbers, texts, and lists and tables of such are shown; objects of classes (dtypes, enumerations) say how a
run computes, not what. Nothing is unpickled: the inert machine reads the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError
from wherry.integrations.containers.torch.archive import read_object
from wherry.integrations.containers.torch.objects import TypedObject, pickle_object
from wherry.integrations.containers.zip.read import read_directory
from wherry.integrations.formats.megatron.names import ARGS, ARGUMENTS, COMMON, ITERATION, OPAQUE
from wherry.text.json_document import parse_json
from wherry.text.limits import SMALL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.integrations.containers.pickle.tree import PickleTree
    from wherry.storage.location import Location

_NAMESPACE = "argparse.Namespace"
_TUPLE = "tuple"
_MODEL = "model"
_FORM = 3.0  # of checkpoints since 2021: query, key and value of each group follow one another


@dataclass(frozen=True, slots=True)
class MegatronRun:
    """What `common.pt` says of a run.

    Attributes:
        arguments: of the run; empty if it has none.
        step: the iteration; None if it states none.
    """

    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int | None = None

    @property
    def text(self) -> bytes:
        """The arguments as a file."""
        return (json.dumps(self.arguments, indent=2) + "\n").encode()


def read_record(file: Location) -> MegatronRun:
    """Read `common.pt`.

    Raises:
        CorruptError, HostileError, UnsupportedError: as of files of torch.
    """
    place = replace(file, opaque=file.opaque | OPAQUE)
    return record_of(read_object(place, read_directory(place), {}).tree, file.uri)


def record_of(tree: PickleTree, uri: str) -> MegatronRun:
    """The record in the leaves of a pickle.

    Raises:
        CorruptError: the step is not a number.
    """
    step = tree.values.get((ITERATION,))
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise CorruptError(
            f"{COMMON}: {ITERATION} is not a number", uri=uri, cure="restore the file from a backup"
        )
    return MegatronRun(_arguments(tree), step)


def _arguments(tree: PickleTree) -> dict[str, Any]:
    """The plain arguments, nested."""
    odd = {
        path[1]
        for path, kind in tree.types.items()
        if path[:1] == (ARGS,) and len(path) > 1 and not kind.endswith(_TUPLE)
    }
    found: dict[str, Any] = {}
    for path, value in tree.values.items():
        if path[:1] == (ARGS,) and len(path) > 1 and path[1] not in odd:
            _put(found, path[1:], value)
    for path, kind in tree.empties.items():
        if path[:1] == (ARGS,) and len(path) > 1 and path[1] not in odd:
            _put(found, path[1:], {"none": None, "dict": {}}.get(kind, []))
    lists = sorted((path for path in tree.lists if path[:1] == (ARGS,) and path[1:]), key=len, reverse=True)
    for path in lists:
        if path[1] not in odd:
            table = found
            for part in path[1:-1]:
                table = table[part]
            node = table.get(path[-1])
            if isinstance(node, dict):
                table[path[-1]] = [node[at] for at in sorted(node, key=int)]
    return found


def _put(table: dict[str, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = value


def parse_arguments(file: Location) -> dict[str, Any]:
    """The arguments of a file `megatron_args.json`.

    Raises:
        CorruptError: it is not a table.
    """
    found = parse_json(file.read_whole(1 << 24), ARGUMENTS, uri=file.uri, limits=SMALL)
    if not isinstance(found, dict):
        raise CorruptError(f"{ARGUMENTS} is not a table of arguments", uri=file.uri, cure="correct the file")
    return found


def common_pickle(
    arguments: Mapping[str, Any], step: int | None, model: Mapping[str, TensorSpec] | None = None
) -> tuple[bytes, list[TensorSpec]]:
    """The object of a new `common.pt`, or with a model that of a rank's file."""
    args = {ARGS: TypedObject(_NAMESPACE, dict(arguments))} if arguments else {}
    own = {_MODEL: dict(model)} if model is not None else {}
    return pickle_object({**args, ITERATION: step or 0, "checkpoint_version": _FORM, **own})
