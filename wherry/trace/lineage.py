"""lineage: where a checkpoint came from and what was derived from it.

Nodes are checkpoints by their checkpoint digest, edges are conversions. Source and converted checkpoint are two
nodes even where their weights digests are equal. The ledger is read first; a conversion that it does not have is taken
from the sidecar, so that the lineage survives the loss of every database.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wherry.core.digest import digest_in
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.request import SourceRequest
from wherry.core.threads import without_collection
from wherry.errors import MismatchError, NotFoundError, WherryError
from wherry.store.local_store import locate
from wherry.store.sidecar import Sidecar, read_sidecar
from wherry.trace.nearest import nearest

if TYPE_CHECKING:
    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Edge, Ledger

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class LineageTree:
    """The ancestors and descendants of one checkpoint.

    Attributes:
        root: its checkpoint digest.
        nodes: checkpoint digest → node, for every end of an edge and the root.
        edges: the conversions, in the order in which they were recorded.
        rest: further conversions, whose ends may not be among the nodes; empty unless only the nearest were requested.
    """

    root: str
    nodes: Mapping[str, LineageNode]
    edges: tuple[Edge, ...]
    rest: tuple[Edge, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `lineage show --json` prints."""
        return {
            "root": self.root,
            "nodes": [node.to_json() for node in self.nodes.values()],
            "edges": [edge.to_json() for edge in self.edges],
        }


def show(uri_or_digest: str | os.PathLike[str], *, brief: bool = False) -> LineageTree:
    """The lineage of a checkpoint, up and down.

    Args:
        uri_or_digest: its present or former URI, at least 8 hex digits of its checkpoint or weights digest, or
            `models:/name@alias`, `models:/name/version`.
        brief: whether a large lineage is shortened to the nearest conversions; see `wherry.trace.nearest`.

    Raises:
        NotFoundError: it is neither in the ledger nor in a sidecar.
        AmbiguousError: several checkpoints have a digest with this prefix.
        StorageError: the ledger cannot be read.
    """
    from wherry.ledger.record import open_ledger

    with open_ledger() as ledger, without_collection():
        digest, sidecar = find_named(ledger, os.fspath(uri_or_digest))
        return tree_of(ledger, digest, sidecar, brief=brief)


def find_named(ledger: Ledger, text: str) -> tuple[str, Sidecar | None]:
    """The checkpoint that a URI, the prefix of a digest or a model URI names, and its sidecar if it was read.

    Raises:
        NotFoundError, AmbiguousError, StorageError: as `show`.
    """
    from wherry.ledger.nodes import digest_at
    from wherry.ledger.resolve import digest_starting, is_model_uri

    if is_model_uri(text):
        return _by_model(text), None
    digest = digest_starting(ledger, text)
    if digest is not None:
        return digest, None
    for uri in _meanings(text):
        location = locate(uri)
        sidecar = read_sidecar(location) if location.exists() else None
        digest = sidecar.checkpoint.checkpoint_digest if sidecar else digest_at(ledger, location.uri)
        if digest is not None:
            return digest, sidecar
    raise NotFoundError(
        "no lineage is recorded",
        uri=text,
        cure="convert it with wherry, or give a digest from the ledger (at least 8 hex digits)",
        stage="lineage",
    )


def _by_model(text: str) -> str:
    """The digest of a model URI, also where the checkpoint is missing or altered."""
    from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri
    from wherry.core.services import service
    from wherry.ledger.resolve import DIGEST_TAG, resolve_model

    digest = digest_in(text)
    if digest is not None:
        return digest
    try:
        return resolve_model(text).checkpoint_digest
    except (NotFoundError, MismatchError):
        for row in service("mlflow").registered_versions(mlflow_tracking_uri(), mlflow_registry_uri()):
            aliases = (f"models:/{row.name}@{one}" for one in row.aliases)
            if text in (f"models:/{row.name}/{row.version}", *aliases):
                return row.tags[DIGEST_TAG]
        raise


def _meanings(text: str) -> Iterator[str]:
    """The URI itself, then the checkpoint that it resolves to, where it is a run folder."""
    from wherry.formats.detect import resolve_source
    from wherry.ledger.resolve import checkpoint_uri

    yield text
    try:
        _location, found = resolve_source(SourceRequest(os.fspath(checkpoint_uri(text))))
    except WherryError as error:
        _log.debug("not a checkpoint or run: %s", error)
        return
    yield found.uri


def tree_of(
    ledger: Ledger,
    root: str,
    sidecar: Sidecar | None,
    *,
    up: bool = True,
    down: bool = True,
    brief: bool = False,
) -> LineageTree:
    """The lineage of a checkpoint; a sidecar adds the conversion that it records.

    Args:
        ledger: the ledger.
        root: its checkpoint digest.
        sidecar: of the checkpoint, if it was read.
        up, down: whether to include the ancestors and the descendants; what is not included is not read.
        brief: as for `show`; only the nodes of the nearest conversions are read.
    """
    from wherry.ledger.nodes import nodes, notable, referenced_nodes
    from wherry.ledger.record import ancestors, descendants

    recorded, ends = _recorded_edges(sidecar)
    edges = [*(ancestors(ledger, root) if up else ()), *(descendants(ledger, root) if down else ())]
    for one in recorded:
        edges += ancestors(ledger, one.source) if up else []
        known = {(edge.source, edge.target, edge.plan_digest) for edge in edges}
        edges += [one] if (one.source, one.target, one.plan_digest) not in known else []
    found, rest = tuple(dict.fromkeys(edges)), ()
    if brief:
        found, rest = nearest(found, root, lambda digests: notable(ledger, digests))
    digests = {*(edge.source for edge in found), *(edge.target for edge in found)}
    about = {**ends, **nodes(ledger, {root, *ends}), **referenced_nodes(ledger, digests - ends.keys())}
    return LineageTree(root, about, found, rest)


def _recorded_edges(sidecar: Sidecar | None) -> tuple[list[Edge], dict[str, LineageNode]]:
    """The edges and the nodes that a sidecar records: one edge, or one for each parent of a merge."""
    from wherry.ledger.nodes import node_of
    from wherry.ledger.record import Edge

    if sidecar is None:
        return [], {}
    receipt = sidecar.receipt
    own = {
        sidecar.checkpoint.checkpoint_digest: node_of(sidecar.checkpoint, receipt.finished if receipt else "")
    }
    if receipt is None:
        return [], own
    target = receipt.target.checkpoint_digest
    parents = {one.checkpoint_digest: one for one in receipt.sources if one.checkpoint_digest != target}
    edges = [
        Edge(digest, target, receipt.plan_digest, None, receipt.finished, receipt.lossless)
        for digest in parents
    ]
    if not edges:
        return [], own
    nodes = {digest: node_of(one, receipt.started) for digest, one in parents.items()}
    return edges, {**nodes, target: node_of(receipt.target, receipt.finished), **own}
