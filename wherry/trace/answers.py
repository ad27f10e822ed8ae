"""why and impact: what produced a checkpoint, and what was derived from it.

`why` goes up: each conversion from the first known source on, with its plan, options, software and verification.
`impact` goes down: everything that was derived from a checkpoint, with the affected model versions and places. The
order depends only on the conversions, so that a rebuilt ledger gives the same output.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wherry.core.html import html_table
from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import Receipt, require_types
from wherry.core.threads import without_collection
from wherry.core.units import plural, short
from wherry.trace.lineage import LineageTree, find_named, tree_of
from wherry.trace.lineage_text import DEEPEST, facts, how, join_lines, omission_line, title
from wherry.trace.nearest import NEIGHBOURS, by_end

if TYPE_CHECKING:
    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Edge
    from wherry.ledger.replay import PlaceRecord, RegistrationRecord
    from wherry.ledger.statements import Statement

SCHEMA = 1
# Fields of a conversion's statement that describe how it was done, in the order of output.
_HOW = (
    "options",
    "software",
    "started",
    "finished",
    "seconds",
    "verification",
    "lossless",
    "warnings",
    "note",
)


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One conversion on the way to a checkpoint, or from it.

    Attributes:
        edge: the conversion.
        distance: number of conversions between them, from 1.
        how: fields of its receipt that describe how it was done.
    """

    edge: Edge
    distance: int
    how: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """One of the `steps` of `lineage why --json` and `lineage impact --json`."""
        return {"edge": self.edge.to_json(), "distance": self.distance, "how": self.how}


@dataclass(frozen=True, slots=True)
class Why:
    """What produced a checkpoint.

    Attributes:
        root: its digest.
        nodes: digest → node, of it and everything above it.
        steps: the conversions, the nearest first.
        origins: digests without a known source.
    """

    root: str
    nodes: Mapping[str, LineageNode]
    steps: tuple[LineageStep, ...]
    origins: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Why: {short(self.root)}, result of {plural(len(self.steps), 'conversion')}>"

    def _repr_html_(self) -> str:
        rows = (
            (one.distance, short(one.edge.source), short(one.edge.target), one.edge.time)
            for one in self.steps
        )
        return html_table(repr(self), ("distance", "source", "target", "time"), rows)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `lineage why --json` prints."""
        return {**_json(self), "origins": list(self.origins)}


@dataclass(frozen=True, slots=True)
class Impact:
    """The checkpoints that were derived from a checkpoint.

    Attributes:
        root: its digest.
        nodes: digest → node, of it and everything below it.
        steps: the conversions, the nearest first.
        versions: model versions of anything derived, as `name version N in registry`, including its own.
        places: known URIs of derived checkpoints that still exist.
        rest: further conversions, which are not among the steps; empty unless only the nearest were requested.
    """

    root: str
    nodes: Mapping[str, LineageNode]
    steps: tuple[LineageStep, ...]
    versions: tuple[str, ...]
    places: tuple[str, ...]
    rest: tuple[Edge, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `lineage impact --json` prints."""
        return {**_json(self), "versions": list(self.versions), "places": list(self.places)}


def why(about: str | os.PathLike[str]) -> Why:
    """What produced a checkpoint: every conversion above it.

    Only the checkpoints above it are read, however large the ledger is and however much was derived from it.

    Args:
        about: a URI, the beginning of a digest (8 hex digits or more), or a model URI.

    Raises:
        NotFoundError, AmbiguousError, StorageError: as `lineage.show`.
    """
    tree, recorded = _ask(about, up=True)
    steps = _steps(tree, recorded, up=True)
    met = {tree.root, *(step.edge.source for step in steps)}
    made = {step.edge.target for step in steps}
    return Why(tree.root, _choose_nodes(tree, met), steps, tuple(sorted(met - made)))


def impact(about: str | os.PathLike[str], *, receipts: bool = True, brief: bool = False) -> Impact:
    """Everything that was derived from a checkpoint.

    Args:
        about: as for `why`.
        receipts: whether to read how each conversion was done. Without it, `how` of every step is empty, and a
            checkpoint with thousands of descendants is answered in half the time.
        brief: whether a large lineage is shortened to the nearest conversions, see `wherry.trace.nearest`; versions
            and places are complete.

    Raises:
        NotFoundError, AmbiguousError, StorageError: as `lineage.show`.
    """
    tree, recorded = _ask(about, up=False, receipts=receipts, brief=brief)
    steps = _steps(tree, recorded, up=False)
    derived = {step.edge.target for step in steps} - {tree.root}
    nodes = _choose_nodes(tree, {tree.root, *derived})
    places, rows = _standing({edge.target for edge in tree.rest} - nodes.keys())
    places += [place for digest in derived for place in nodes[digest].places]
    rows += [row for node in nodes.values() for row in node.registrations]
    versions = {f"{row.name} version {row.version} in {row.registry}" for row in rows if row.version}
    present = {place.uri for place in places if not place.gone}
    return Impact(tree.root, nodes, steps, tuple(sorted(versions)), tuple(sorted(present)), tree.rest)


def _standing(digests: set[str]) -> tuple[list[PlaceRecord], list[RegistrationRecord]]:
    """The places and registrations of checkpoints whose nodes were not read."""
    from wherry.ledger.nodes import standing
    from wherry.ledger.record import open_ledger

    if not digests:
        return [], []
    with open_ledger() as ledger, without_collection():
        return standing(ledger, digests)


def render_why(found: Why) -> str:
    """The result of `why` as plain text."""
    lines = [title(found.nodes[found.root]), *(f"  {line}" for line in facts(found.nodes[found.root]))]
    for step in found.steps:
        about = found.nodes[step.edge.source]
        lines += _describe_step(step, f"converted from {title(about)}", (*_details(step), *facts(about)))
    origins = ", ".join(short(digest) for digest in found.origins)
    lines.append(f"no known source: {origins}" if origins else "no origin: the conversions form a cycle")
    return join_lines(lines)


def render_impact(found: Impact) -> str:
    """The result of `impact` as plain text."""
    lines = [title(found.nodes[found.root]), *(f"  {line}" for line in facts(found.nodes[found.root]))]
    for step in found.steps:
        about = found.nodes[step.edge.target]
        lines += _describe_step(step, f"converted to {title(about)}", (how(step.edge), *facts(about)))
    lines += omission_line(found.steps, found.rest)
    derived = {edge.target for edge in (*(step.edge for step in found.steps), *found.rest)} - {found.root}
    # If not all conversions are shown, only as many versions as neighbours of a checkpoint.
    shown = found.versions[:NEIGHBOURS] if found.rest else found.versions
    more = len(found.versions) - len(shown)
    versions = (", ".join(shown) or "none") + (f" and {more:,} more" if more else "")
    lines.append(
        f"derived checkpoints: {len(derived)}, places: {len(found.places)}, affected model versions: {versions}"
    )
    return join_lines(lines)


def _ask(
    about: str | os.PathLike[str], *, up: bool, receipts: bool = True, brief: bool = False
) -> tuple[LineageTree, Mapping[tuple[str, str, str], Mapping[str, Any]]]:
    """The tree in one direction, and the statement or receipt of each of its conversions."""
    from wherry.ledger.record import open_ledger
    from wherry.ledger.statements import statements_of

    with open_ledger() as ledger, without_collection():
        root, sidecar = find_named(ledger, os.fspath(about))
        tree = tree_of(ledger, root, sidecar, up=up, down=not up, brief=brief)
        if not receipts:
            return tree, {}
        numbers = {edge.statement for edge in tree.edges if edge.statement is not None}
        bodies = {one.seq: one for one in statements_of(ledger, numbers)}
    recorded = {
        _mark(edge): _conversion(bodies, edge.statement) for edge in tree.edges if edge.statement is not None
    }
    receipt = sidecar.receipt if sidecar is not None else None
    if receipt is None:
        return tree, recorded
    target, body = receipt.target.checkpoint_digest, receipt.to_json()
    own = {(one.checkpoint_digest, target, receipt.plan_digest): body for one in receipt.sources}
    return tree, {**own, **recorded}


def _conversion(bodies: Mapping[int, Statement], number: int) -> Mapping[str, Any]:
    """The body of the statement that records a conversion."""
    from wherry.ledger.schema import damage_error

    if number not in bodies:
        raise damage_error(f"references: to statement {number}, which is not in it")
    try:
        require_types(Receipt, bodies[number].body)
    except TypeError as error:
        raise damage_error(f"statement {number}: {error}") from error
    return bodies[number].body


def _mark(edge: Edge) -> tuple[str, str, str]:
    return edge.source, edge.target, edge.plan_digest


def _steps(
    tree: LineageTree, recorded: Mapping[tuple[str, str, str], Mapping[str, Any]], *, up: bool
) -> tuple[LineageStep, ...]:
    """The conversions breadth first, each once; those at the same distance in the order of the ledger."""
    edges = by_end(tree.edges, up=up)
    found: list[LineageStep] = []
    level, seen, distance = {tree.root}, {tree.root}, 1
    while level:
        here = [edge for digest in level for edge in edges.get(digest, ())]
        for edge in sorted(here, key=lambda edge: (edge.statement or math.inf, edge.time, _mark(edge))):
            body = recorded.get(_mark(edge), {})
            found.append(LineageStep(edge, distance, {name: body[name] for name in _HOW if name in body}))
        level = {edge.source if up else edge.target for edge in here} - seen
        seen |= level
        distance += 1
    return tuple(found)


def _json(found: Why | Impact) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "root": found.root,
        "nodes": {digest: node.to_json() for digest, node in found.nodes.items()},
        "steps": [step.to_json() for step in found.steps],
    }


def _choose_nodes(tree: LineageTree, digests: set[str]) -> dict[str, LineageNode]:
    return {digest: tree.nodes[digest] for digest in sorted(digests)}


def _describe_step(step: LineageStep, headline: str, lines: Iterable[str]) -> Iterator[str]:
    """The lines of a step, indented by its distance; beyond `DEEPEST`, the headline states the distance."""
    indent = "  " * min(step.distance - 1, DEEPEST)
    far = f" ({plural(step.distance, 'conversion')} away)" if step.distance > DEEPEST else ""
    yield f"{indent}{headline}{far}"
    yield from (f"{indent}  {line}" for line in lines)


def _details(step: LineageStep) -> Iterator[str]:
    yield how(step.edge)
    recorded = step.how
    if options := {name: value for name, value in recorded.get("options", {}).items() if value is not None}:
        yield "options: " + ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    if software := recorded.get("software"):
        yield "software: " + ", ".join(f"{name} {version}" for name, version in software.items())
    checked = recorded.get("verification")
    yield (
        f"read back: {plural(checked['tensors'], 'tensor')}"
        if checked and "tensors" in checked
        else "not read back"
    )
    yield from (f"warning: {warning}" for warning in recorded.get("warnings", ()))
