"""Finds a PaxML checkpoint and determines its layout.

Facts (paxml 1.4.0 read and run): `<job>/checkpoints/checkpoint_<step>/`, eight digits, has the items `state/` and
`metadata/` (from version 1.0 on; before, the arrays are in the step folder itself). `state/` holds one zarr folder for
each array, or since 1.2 optionally an OCDBT database with Orbax's tree files, or with the Flax checkpoint type one
msgpack file `checkpoint` of `{flattened_state, str_pytree_state}`; its step folder has no leading zeros, and the oldest
are a file `checkpoint_<step>`. Temporary names are Orbax's, before 1.0 `tmp_<n>.checkpoint_<n>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from wherry.core.detection import verdict_of_damage
from wherry.core.steps import step_number
from wherry.errors import IncompleteError, WherryError
from wherry.formats.format import Glimpse
from wherry.formats.glimpse import Signs
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.commit import missing_commit
from wherry.integrations.containers.orbax.detection import look
from wherry.integrations.formats.paxml import metadata, names

if TYPE_CHECKING:
    from wherry.core.detection import Verdict
    from wherry.storage.location import Location

STATE = "state"
MSGPACK = orbax.MSGPACK
COMMITTED = orbax.COMMITTED
NEWEST = 1.2
_ENVELOPE = b"\xafflattened_state"
_ENVELOPE_BYTES = 64
_TEMPORARY = re.compile(r"tmp_\d+\.checkpoint_\d+")
_NAME_MARKS = (f"{names.VARIABLES}.", f"{names.OPTIMIZER}_")


SIGNS = Signs(
    head=b".{0,48}" + _ENVELOPE,
    entries=frozenset({metadata.FOLDER, MSGPACK}),
    folders=True,
    named=STATE,
    starts=(orbax.PROCESS_PREFIX,),
)


class StateLayout(Enum):
    """The storage of the state; the value is its wording in the format version."""

    ARRAYS = "per-array zarr2 directories"
    OCDBT = "ocdbt"
    FLAX = "one msgpack"


@dataclass(frozen=True, slots=True)
class Place:
    """A PaxML checkpoint.

    Attributes:
        home: the step folder; the folder or file of the state if it is separate.
        state: the folder of the arrays, or the msgpack file.
        layout: the storage of the state.
        metadata: the item `metadata`; version 0.0 if there is none.
        damage: the error of reading that item, if any.
    """

    home: Location
    state: Location
    layout: StateLayout
    metadata: metadata.Metadata
    damage: WherryError | None = None

    @property
    def version(self) -> str:
        """The text of the format version."""
        return f"paxml {self.metadata.version:.1f}, {self.layout.value}"

    @property
    def step(self) -> int | None:
        """The step in the folder's name."""
        name = orbax.final_name(self.home.name)
        own = step_number(name.rpartition(".")[2])
        return step_number(self.home.parent.name) if own is None and self.home.name == STATE else own

    def verdict(self) -> tuple[Verdict, str | None]:
        """The verdict and its reason, from names only."""
        try:
            self.require_committed()
        except OSError:
            raise
        except WherryError as error:
            return verdict_of_damage(error.verdict), error.what
        return "ok", None

    def require_committed(self) -> None:
        """Refuse a save whose names and small files say that it was not committed.

        Raises:
            IncompleteError: a sign of the commit is missing.
            CorruptError: a small file is invalid.
        """
        if self.damage is not None:
            raise self.damage
        protocol, item = (
            self.home.store.protocol,
            self.state.parent if self.layout is StateLayout.FLAX else self.state,
        )
        alone = self.home == self.state
        if _TEMPORARY.fullmatch(self.home.name):
            reason = "the folder has the name of a save that was never committed"
        elif protocol in orbax.RENAMELESS and not alone and not self.home.join(COMMITTED).exists():
            reason = f"missing {COMMITTED}, which PaxML requires on {protocol}://"
        else:
            reason = None if alone and self.layout is StateLayout.FLAX else missing_commit(item)
        if reason is not None:
            raise IncompleteError(reason, uri=self.home.uri, cure="use another step")


_FOUND: WeakKeyDictionary[Glimpse, Place | None] = WeakKeyDictionary()


def find(glimpse: Glimpse) -> Place | None:
    """The PaxML checkpoint at a location, or around a state at a location, or None; searched once for each glimpse."""
    if glimpse not in _FOUND:
        _FOUND[glimpse] = _find(glimpse)
    return _FOUND[glimpse]


def _find(glimpse: Glimpse) -> Place | None:
    if glimpse.is_file:
        lone = step_number(glimpse.location.name) is not None and _is_flax(glimpse.head)
        return _alone(glimpse.location, StateLayout.FLAX) if lone else None
    if not glimpse.is_dir:
        return None
    if metadata.FOLDER in glimpse.entries:
        return _in_step(glimpse)
    if glimpse.location.name == STATE and glimpse.location.parent.join(metadata.FILE).exists():
        return _in_step(Glimpse(glimpse.location.parent))
    layout = _layout(glimpse)
    if layout is StateLayout.FLAX:
        return _alone(glimpse.location, layout, glimpse.location.join(MSGPACK))
    return _alone(glimpse.location, layout) if layout is StateLayout.ARRAYS and has_names(glimpse) else None


def _is_state(glimpse: Glimpse, layout: StateLayout) -> bool:
    """Whether the state itself shows that it is PaxML's; only of a step whose item `metadata` cannot be read."""
    if layout is not StateLayout.OCDBT:
        return layout is StateLayout.FLAX
    item = look(glimpse)
    return (
        item is not None
        and item.leaves is not None
        and any(path[:1] == (names.VARIABLES,) for path in item.leaves.arrays)
    )


def has_names(glimpse: Glimpse) -> bool:
    """Whether a folder has arrays with PaxML's names."""
    return any(entry.is_dir and name.startswith(_NAME_MARKS) for name, entry in glimpse.entries.items())


def _alone(home: Location, layout: StateLayout, state: Location | None = None) -> Place:
    return Place(home, state or home, layout, metadata.Metadata())


def _in_step(glimpse: Glimpse) -> Place | None:
    place = glimpse.location.join(STATE)
    inside = Glimpse(place)
    layout = _layout(inside)
    if layout is None and not (STATE in glimpse.entries or step_number(glimpse.location.name) is not None):
        return None
    found, damage = metadata.Metadata(), None
    try:
        found = metadata.read_metadata(glimpse.location)
    except OSError:
        raise
    except WherryError as error:
        damage = error
    if layout is None:
        lost = IncompleteError(
            "missing arrays: the state has none", uri=glimpse.location.uri, cure="use another step"
        )
        return Place(glimpse.location, place, StateLayout.ARRAYS, found, lost) if found.unpadded else None
    is_paxml = bool(found.version) and (
        bool(found.unpadded) or bool(found.notes) or layout is StateLayout.FLAX
    )
    if not (is_paxml or has_names(inside) or (damage is not None and _is_state(inside, layout))):
        return None
    return Place(
        glimpse.location, place.join(MSGPACK) if layout is StateLayout.FLAX else place, layout, found, damage
    )


def _layout(glimpse: Glimpse) -> StateLayout | None:
    """The storage of the state in a folder; None without a state."""
    entries = glimpse.entries
    if orbax.MANIFEST in entries or any(name.startswith(orbax.PROCESS_PREFIX) for name in entries):
        return StateLayout.OCDBT
    file = entries.get(MSGPACK)
    if file is not None and not file.is_dir:
        return StateLayout.FLAX if _is_flax(glimpse.location.join(MSGPACK).read(0, _ENVELOPE_BYTES)) else None
    folders = any(entry.is_dir and not orbax.is_reserved(name) for name, entry in entries.items())
    return StateLayout.ARRAYS if folders or orbax.STRINGS in entries else None


def _is_flax(head: bytes) -> bool:
    """Whether a msgpack map starts with PaxML's envelope; the headers of map and key may have several widths."""
    return _ENVELOPE in head[:_ENVELOPE_BYTES]
