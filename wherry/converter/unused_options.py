"""unused_options: an option that changes nothing in a conversion is refused.

Each option of a target, each config, folder of companions and fact decides something of the result or is compared with
the source; else it is a usage error. Who reads an option says so: a view of the source names the options that it is
made by (`Checkpoint.uses`), a format takes its own by name, and forms and rules of a tree must change it. What is
left was read by nobody. A value that would have been taken without the option is used all the same.

`--ignore` and `--allow-opaque` are permissions, not statements: what they permit need not occur. `--only`, `--family
none`, `split` and `join` state what the target is, and the source may be that already. Of several targets with the same
statement, one must use it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.core.account import COMPANIONS
from wherry.core.option import options_of
from wherry.core.request import NONE, SCAN, LayoutRequest
from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from wherry.core.request import TargetRequest
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format

_OVERFLOW = "--allow-overflow"


@dataclass(frozen=True, slots=True)
class UnusedOption:
    """An option that changes nothing in a target.

    Attributes:
        name: `--config`, or the name of a `--set`.
        value: its value.
        reason: why nothing reads it.
    """

    name: str
    value: Any
    reason: str


def unused_options(
    seen: Checkpoint, row: Format, target: TargetRequest, ignore: Iterable[str], left: Iterable[str]
) -> Iterator[UnusedOption]:
    """The options of a target that its plan does not depend on.

    Args:
        seen: the source in the layout of the target.
        row: the target format.
        target: the options.
        ignore: the rules for what is left out.
        left: the names of `--set` that the view leaves to the tree and the format, which judge them.
    """
    has_files = row.holds.companions or bool(row.holds.stated)
    files = has_files and COMPANIONS not in ignore
    uses = seen.uses | (seen.uses_in_files if files else frozenset())
    changes_values = bool(seen.bounds or seen.manifest.origin.get("merge"))
    for name, value in _statements(target).items():
        if name in uses or name in left or (name == _OVERFLOW and changes_values):
            continue
        if name == _OVERFLOW:
            reason = "no value is cast or scaled, so none can overflow"
        elif name in seen.uses_in_files and has_files:
            reason = f"--ignore {COMPANIONS} leaves out the file that it changes"
        elif name in seen.uses_in_files:
            reason = f"it changes a companion file, and {row.name} holds none"
        elif seen.laid_out:
            reason = "the model and the layout of the target do not depend on it"
        else:
            reason = (
                f"{SCAN} reads no family" if SCAN in target.options else "the tree is kept without a layout"
            )
        yield UnusedOption(name, value, reason)


def require_used(
    uri: str, targets: Sequence[TargetRequest], unused: Sequence[tuple[UnusedOption, ...]]
) -> None:
    """Refuse an option that no target uses of those that state it.

    Args:
        uri: the source.
        targets: the targets.
        unused: the unused options of each.

    Raises:
        UsageError: there is one; the first is named with the reason.
    """
    for one in (option for row in unused for option in row):
        stating = [at for at, target in enumerate(targets) if _statements(target).get(one.name) == one.value]
        if all(any(other.name == one.name for other in unused[at]) for at in stating):
            spelled = (
                one.name if one.name.startswith("--") else f"--set {shlex.quote(f'{one.name}={one.value}')}"
            )
            raise UsageError(
                f"{spelled} changes nothing in this conversion: {one.reason}",
                uri=uri,
                cure="remove the option",
            )


def _statements(target: TargetRequest) -> dict[str, Any]:
    """What a target states, by name; `--family none` only keeps the tree."""
    layout = ((one.flag, getattr(target.layout, one.name)) for one in options_of(LayoutRequest))
    return {**{name: value for name, value in layout if value not in (None, NONE, False)}, **target.options}
