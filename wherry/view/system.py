"""system: a view of the source in another system's layout, by the declarations of a model family.

The family is that of the config, otherwise the only one whose layouts fit every tensor.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from wherry.core.request import CONTAINERS, NONE, SCAN
from wherry.errors import AmbiguousError, UnrepresentableError, UsageError, WherryError
from wherry.families import (
    convert_layout,
    families,
    family_of_config,
    load_family,
    load_family_file,
    side_by_side,
    system_of_format,
)
from wherry.families.companions import config_file, facts_beside, outfit, source_config, target_config
from wherry.storage.location import MOST_CONFIG
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate
from wherry.view.view import LayoutView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.request import LayoutRequest
    from wherry.families.schema import Family, System
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format

CONFIG = "config.json"


def layout_options() -> frozenset[str]:
    """All names that `--set` accepts for layouts: forms and conventions of all systems, and `scan`."""
    systems = [system for name in families() for system in load_family(name).systems.values()]
    return frozenset(name for system in systems for name in (*system.forms, *system.conventions)) | {SCAN}


def table(family: str | None = None, family_file: str | None = None) -> dict[str, dict[str, list[str]]]:
    """Parameter → system → key paths and axes, the output of `wherry layouts`.

    Raises:
        UsageError: the family is unknown, or the file does not declare a family.
    """
    return side_by_side(load_family_file(family_file) if family_file else load_family(family or ""))


def view(
    checkpoint: Checkpoint, row: Format, asked: Mapping[str, str], wish: LayoutRequest, only: str | None
) -> LayoutView | None:
    """The view that `wherry.view.choose.relaid` returns; None if the tree does not change.

    Args:
        checkpoint: the opened source.
        row: the target format.
        asked: forms and conventions.
        wish: the other layout options.
        only: `params` or None.

    Raises:
        WherryError: see `relaid`.
    """
    config = _config(checkpoint, wish)
    written = _written(checkpoint)
    family = _family(checkpoint, row, wish, config, written, asked=bool(asked))
    pair = _systems(family, checkpoint, row, wish) if family else None
    if family is None or pair is None or not _needed(*pair, row, checkpoint, wish, asked=bool(asked)):
        return None
    source, target = pair
    theirs = {*target.forms, *target.conventions}
    _require_options(asked, source, target, row)
    known = {name: text for name, text in written.items() if name in source.conventions}
    mine = {name: text for name, text in asked.items() if name not in theirs}
    config, told_by = source_config(checkpoint, family, source, wish.config)
    projected = convert_layout(
        checkpoint.manifest, family, source.name, target.name, config=config, config_source=told_by,
        source_options={**known, **mine},
        options={name: text for name, text in asked.items() if name in theirs},
        only=only, dtype=wish.dtype, target_format=row.name, facts=facts_beside(checkpoint, family, source),
    )  # fmt: skip
    given = config if source is target else target_config(family, target, wish.config)
    made = outfit(projected, given, checkpoint, wish.assets)
    return LayoutView(checkpoint, projected, made, wish.dtype, only)


def _require_options(asked: Mapping[str, str], source: System, target: System, row: Format) -> None:
    """Refuse an option that neither of these two systems accepts, before one of them reports it as its own error."""
    known = [*row.options, *target.forms, *target.conventions, *source.forms, *source.conventions]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UsageError(
            f"unknown option {', '.join(map(repr, unknown))} for format {row.name} and its layout",
            cure=f"choose one of: {', '.join(dict.fromkeys(known)) or 'none'}",
        )


def _needed(
    source: System, target: System, row: Format, checkpoint: Checkpoint, wish: LayoutRequest, *, asked: bool
) -> bool:
    if asked or wish.explicit:
        return True
    plain = {row.name, checkpoint.detection.format} & CONTAINERS
    return source is not target and not plain


def _config(checkpoint: Checkpoint, wish: LayoutRequest) -> dict[str, Any] | None:
    """A Hugging Face config, which names the model: given, or beside the source of any system."""
    if wish.config:
        return config_file(wish.config)
    if CONFIG not in {companion.name for companion in checkpoint.manifest.companions}:
        return None
    try:
        found = json.loads(checkpoint.reader.companion(CONFIG).read_whole(MOST_CONFIG))
    except ValueError as error:
        raise UsageError(
            f"invalid JSON in {CONFIG}: {error}", uri=checkpoint.uri, cure="pass --config FILE"
        ) from error
    return found if isinstance(found, dict) else None


def _family(
    checkpoint: Checkpoint, row: Format, wish: LayoutRequest, config: Mapping[str, Any] | None,
    written: Mapping[str, str], *, asked: bool,
) -> Family | None:  # fmt: skip
    if wish.family == NONE:
        return None
    if wish.family_file:
        return load_family_file(wish.family_file)
    if wish.family:
        return load_family(wish.family)
    name = written.get("family") or (family_of_config(config) if config else None)
    if name in families():
        return load_family(name or "")
    if {row.name, checkpoint.detection.format} & CONTAINERS and not (asked or wish.explicit):
        return None
    if name is not None:
        raise UsageError(
            f"the checkpoint was written with family {name!r}, which a family file declares", uri=checkpoint.uri,
            cure=f"pass that --family-file, or keep the tree with --family {NONE}",
        )  # fmt: skip
    fitting = [one for one in map(load_family, families()) if _fits(one, checkpoint, row)]
    if len(fitting) > 1 and not all(_same_system(one, checkpoint, row) for one in fitting):
        raise AmbiguousError(
            f"several families fit this checkpoint: {', '.join(one.name for one in fitting)}",
            uri=checkpoint.uri,
            cure=f"choose with --family {fitting[0].name}, or keep the tree with --family {NONE}",
        )
    if not fitting and asked:
        raise UsageError(
            "no known model family fits every tensor", uri=checkpoint.uri,
            cure="pass --family, or declare one in a --family-file; run `wherry layouts` to list the families",
        )  # fmt: skip
    return fitting[0] if fitting else None


def _written(checkpoint: Checkpoint) -> dict[str, str]:
    """The layout that wherry recorded when it wrote the source: family, forms and conventions."""
    sidecar = read_sidecar(locate(checkpoint.uri))
    layout: dict[str, Any] = sidecar.manifest.origin.get("layout") or {} if sidecar else {}
    return {"family": layout["family"], **layout["to"]} if layout else {}


def _same_system(family: Family, checkpoint: Checkpoint, row: Format) -> bool:
    """Whether source and target are the same system: then any of several fitting families can be used."""
    return system_of_format(family, checkpoint.detection.format) is system_of_format(family, row.name)


def _fits(family: Family, checkpoint: Checkpoint, row: Format) -> bool:
    """Whether both systems are declared and no tensor of the source is unknown."""
    source = system_of_format(family, checkpoint.detection.format)
    target = system_of_format(family, row.name)
    if source is None or target is None:
        return False
    try:
        config, told_by = source_config(checkpoint, family, source, None)
        convert_layout(
            checkpoint.manifest, family, source.name, source.name, config=config, config_source=told_by
        )
    except UnrepresentableError:
        return False
    except WherryError:
        return True  # its tensors are known; other errors are reported when the family is used
    return True


def _systems(
    family: Family, checkpoint: Checkpoint, row: Format, wish: LayoutRequest
) -> tuple[System, System] | None:
    source = system_of_format(family, checkpoint.detection.format)
    target = system_of_format(family, row.name)
    if source is not None and target is not None:
        return source, target
    if wish.explicit:
        lacking = row.name if target is None else checkpoint.detection.format
        raise UnrepresentableError(
            f"family {family.name} has no system with checkpoints of format {lacking}",
            uri=checkpoint.uri,
            cure=f"choose one of: {', '.join(sorted(family.systems))}, or declare others with --family-file",
        )
    return None
