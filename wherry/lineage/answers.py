"""why and impact: the two questions of lineage, answered with what is known of every step.

`why` goes up: each conversion on the way from the first known source, with its plan, options, software and proof.
`impact` goes down: everything that was derived from a checkpoint, with the model versions and places that are
concerned. Both are told in the same order whatever ledger answers, so that a rebuilt one gives the same answers.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wherry.core.units import short
from wherry.lineage.lineage import LineageTree, named, tree_of
from wherry.lineage.text import facts, how, title

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Edge
    from wherry.storage.sidecar import Sidecar

SCHEMA = 1
# Fields of a conversion's body that say how it was done, in the order of telling.
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
        distance: how many conversions it is away, from 1.
        how: what its receipt says of the way it was done.
    """

    edge: Edge
    distance: int
    how: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Why:
    """What produced a checkpoint.

    Attributes:
        root: its digest.
        nodes: digest → node, of it and everything above it.
        steps: the conversions, the nearest first.
        origins: digests above which nothing is known.
    """

    root: str
    nodes: Mapping[str, LineageNode]
    steps: tuple[LineageStep, ...]
    origins: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `lineage why --json` prints it."""
        return {"schema": SCHEMA, **asdict(self), "nodes": _nodes_json(self.nodes)}


@dataclass(frozen=True, slots=True)
class Impact:
    """What was derived from a checkpoint.

    Attributes:
        root: its digest.
        nodes: digest → node, of it and everything below it.
        steps: the conversions, the nearest first.
        versions: model versions of anything derived, as `name version N in registry`; its own included.
        places: URIs at which something derived still lies, as far as is known.
    """

    root: str
    nodes: Mapping[str, LineageNode]
    steps: tuple[LineageStep, ...]
    versions: tuple[str, ...]
    places: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `lineage impact --json` prints it."""
        return {"schema": SCHEMA, **asdict(self), "nodes": _nodes_json(self.nodes)}


def why(about: str | os.PathLike[str]) -> Why:
    """What produced a checkpoint: every conversion above it.

    Args:
        about: a URI, the beginning of a digest (8 hex digits or more), or a model URI.

    Raises:
        NotFoundError, AmbiguousError, StorageError: as `lineage.show`.
    """
    tree, told = _asked(about)
    steps = _steps(tree, told, up=True)
    met = {tree.root, *(step.edge.source for step in steps)}
    made = {step.edge.target for step in steps}
    return Why(tree.root, _chosen(tree, met), steps, tuple(sorted(met - made)))


def impact(about: str | os.PathLike[str]) -> Impact:
    """Everything that was derived from a checkpoint.

    Args and Raises: as `why`.
    """
    tree, told = _asked(about)
    steps = _steps(tree, told, up=False)
    derived = {step.edge.target for step in steps} - {tree.root}
    nodes = _chosen(tree, {tree.root, *derived})
    versions = {
        f"{row.name} version {row.version} in {row.registry}"
        for node in nodes.values()
        for row in node.registrations
        if row.version
    }
    places = {place.uri for digest in derived for place in nodes[digest].places if not place.gone}
    return Impact(tree.root, nodes, steps, tuple(sorted(versions)), tuple(sorted(places)))


def render_why(found: Why) -> str:
    """The answer as plain text."""
    lines = [title(found.nodes[found.root]), *(f"  {line}" for line in facts(found.nodes[found.root]))]
    for step in found.steps:
        lines += [f"{'  ' * (step.distance - 1)}made from {title(found.nodes[step.edge.source])}"]
        lines += [f"{'  ' * step.distance}{line}" for line in _told_of(step)]
        lines += [f"{'  ' * step.distance}{line}" for line in facts(found.nodes[step.edge.source])]
    origins = ", ".join(short(digest) for digest in found.origins)
    lines.append(
        f"above {origins} nothing is known" if origins else "it goes round: each was made of another"
    )
    return "\n".join(lines)


def render_impact(found: Impact) -> str:
    """The answer as plain text."""
    lines = [title(found.nodes[found.root]), *(f"  {line}" for line in facts(found.nodes[found.root]))]
    for step in found.steps:
        lines += [f"{'  ' * (step.distance - 1)}became {title(found.nodes[step.edge.target])}"]
        lines += [
            f"{'  ' * step.distance}{line}"
            for line in (how(step.edge), *facts(found.nodes[step.edge.target]))
        ]
    derived = {step.edge.target for step in found.steps} - {found.root}
    lines.append(
        f"derived checkpoints: {len(derived)}, places: {len(found.places)}, "
        f"model versions concerned: {', '.join(found.versions) or 'none'}"
    )
    return "\n".join(lines)


def _asked(
    about: str | os.PathLike[str],
) -> tuple[LineageTree, Mapping[tuple[str, str, str], Mapping[str, Any]]]:
    """The tree, and what is told of each of its conversions."""
    from wherry.ledger.record import open_ledger
    from wherry.ledger.statements import by_number

    with open_ledger() as ledger:
        root, sidecar = named(ledger, os.fspath(about))
        tree = tree_of(ledger, root, sidecar)
        bodies = by_number(ledger, {edge.statement for edge in tree.edges if edge.statement is not None})
    told = {_mark(edge): bodies[edge.statement].body for edge in tree.edges if edge.statement is not None}
    return tree, {**_from_sidecar(sidecar), **told}


def _from_sidecar(sidecar: Sidecar | None) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    if sidecar is None or sidecar.receipt is None:
        return {}
    receipt = sidecar.receipt
    ends = receipt.source.checkpoint_digest, receipt.target.checkpoint_digest
    return {(*ends, receipt.plan_digest): receipt.to_json()}


def _mark(edge: Edge) -> tuple[str, str, str]:
    return edge.source, edge.target, edge.plan_digest


def _steps(
    tree: LineageTree, told: Mapping[tuple[str, str, str], Mapping[str, Any]], *, up: bool
) -> tuple[LineageStep, ...]:
    """Breadth first, each conversion once, those at one distance by time."""
    found: list[LineageStep] = []
    level, seen, distance = {tree.root}, {tree.root}, 1
    while level:
        here = [edge for edge in tree.edges if (edge.target if up else edge.source) in level]
        for edge in sorted(here, key=lambda edge: (edge.time, _mark(edge))):
            body = told.get(_mark(edge), {})
            found.append(LineageStep(edge, distance, {name: body[name] for name in _HOW if name in body}))
        level = {edge.source if up else edge.target for edge in here} - seen
        seen |= level
        distance += 1
    return tuple(found)


def _nodes_json(nodes: Mapping[str, LineageNode]) -> dict[str, Any]:
    return {digest: node.to_json() for digest, node in nodes.items()}


def _chosen(tree: LineageTree, digests: set[str]) -> dict[str, LineageNode]:
    return {digest: tree.nodes[digest] for digest in sorted(digests)}


def _told_of(step: LineageStep) -> Iterator[str]:
    yield how(step.edge)
    told = step.how
    if options := {name: value for name, value in told.get("options", {}).items() if value is not None}:
        yield "options: " + ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    if software := told.get("software"):
        yield "software: " + ", ".join(f"{name} {version}" for name, version in software.items())
    checked = told.get("verification")
    yield f"read back: {checked['tensors']} tensors" if checked and "tensors" in checked else "not read back"
    yield from (f"warning: {warning}" for warning in told.get("warnings", ()))
