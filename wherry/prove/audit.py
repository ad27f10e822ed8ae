"""audit: check that the checkpoints in the ledger and the registry exist, are complete and match the records.

The ledger, not the storage, determines which checkpoints are checked, so that missing ones are found. The ledger is
replayed once (as of a date, if given), the registry is queried once in pages, and metadata is read in parallel. Bytes
are read one checkpoint after the other at the speed of `verify`, which uses the whole machine for each. A sample takes
the checkpoints with the oldest verification first, so that successive audits reach every checkpoint. The statements
that were appended meanwhile are read last: a registration that was in flight is no finding.

Findings name the tensor and the damaged leaf, the cure, and what was derived from the damaged checkpoint. The result is
recorded in the ledger and, with everything that a third party needs to check it offline, in one evidence bundle.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wherry.config.settings import audits_are_recorded
from wherry.core import threads
from wherry.core.progress import OnProgress
from wherry.core.receipt import utc_now
from wherry.core.units import DEFAULT_MEMORY, DEFAULT_UNIT, parse_budget, parse_size
from wherry.cures import Argument, Cure
from wherry.errors import UsageError, WherryError
from wherry.ledger.record import Ledger
from wherry.ledger.replay import LedgerState, PlaceRecord, replay
from wherry.prove.bundle import anchor_hash, place_for, prepare_folder, record_of, write_bundle
from wherry.prove.bytes import check_signatures, load_some, read_all, required_key
from wherry.prove.check import record_name
from wherry.prove.cure import add_cures
from wherry.prove.evidence import ReadOptions
from wherry.prove.markdown import markdown
from wherry.prove.places import look_at
from wherry.prove.registrations import RegistryContents, ask, compare_registry, mark_versions
from wherry.prove.report import AuditReport, ChainProof, Finding, gravity
from wherry.prove.roots import findings_of, normalise_roots, survey_roots
from wherry.store.sidecar import Sidecar
from wherry.version import __version__
from wherry.workers import THREADS

Scope: TypeAlias = Literal["registered", "all"] | Sequence[str]
LEVELS = ("present", "digest")
_WORKERS = 16  # reading metadata mostly waits for storage


# What the ledger keeps of the gravest findings; the report and the bundle have all of them.
_RECORDED = ("kind", "severity", "what", "uri", "checkpoint_digest", "path")
_MOST_RECORDED = 100


def audit(
    scope: Scope = "all",
    *,
    level: str = "present",
    sample: str | None = None,
    deep: bool = False,
    as_of: str | None = None,
    native_sample: int = 0,
    bundle: str | os.PathLike[str] | None = None,
    anchor: str | None = None,
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    key: str | None = None,
    record: bool | None = None,
    progress: OnProgress | None = None,
    on: str = THREADS,
    unit: str | int = DEFAULT_UNIT,
) -> AuditReport:
    """Audit checkpoints, registrations and the ledger itself.

    Args:
        scope: `registered` (checkpoints of model versions), `all` in the ledger, or roots; below roots also
            checkpoints that were never converted and files that belong to no checkpoint.
        level: `present` reads metadata, `digest` every byte, except of objects of a store whose bytes were verified in
            the state (generation or ETag) that the store states now.
        sample: at level `digest`: how many are read, as a number or a share such as `10%`; all by default.
        deep: at level `digest`: whether those objects are read too.
        as_of: date or time; only statements up to then count. Storage is read as it is now.
        native_sample: how many checkpoints the target's own library restores.
        bundle: where to write the evidence: a new file, or a folder.
        anchor: an earlier anchor (hash, or file of `wherry ledger anchor`) that the ledger must contain.
        tracking_uri, registry_uri: MLflow's stores; as for `register` by default.
        memory: budget for reading bytes.
        key: public key (PEM file) for the verification of signatures; `audit.key` of the configuration by default.
            Without a key, signatures are not checked.
        record: whether to write the outcome to the ledger, and on model versions; `audit.record` by default.
        progress: called a few times a second while bytes are read.
        on, unit: what reads the bytes at level `digest`, and how many at a time; as for `verify`.

    Raises:
        UsageError: an unknown level, or an invalid sample or date.
        NotFoundError: a root or the key does not exist.
        TargetExistsError: the file of the evidence exists already.
        StorageError: the ledger cannot be read, or the evidence cannot be written.
    """
    from wherry.ledger.record import open_ledger
    from wherry.ledger.statements import moment

    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}", cure=f"choose {' or '.join(LEVELS)}")
    for name, is_given in {"--sample": sample is not None, "--deep": deep, "--on": on != THREADS}.items():
        if is_given and level != "digest":
            raise UsageError(
                f"{name} requires level digest", cure=Cure("add {}", Argument("level", "digest"))
            )
    if on != THREADS:
        from wherry.workers.engines import engine_of

        engine_of(on)
    options = ReadOptions(parse_budget(memory), progress, on, parse_size(unit))
    expected_anchor, public_key = anchor_hash(anchor), required_key(key)
    is_recorded = audits_are_recorded() if record is None else record
    started = utc_now()
    target = None if bundle is None else place_for(bundle, started)
    with open_ledger() as ledger, _evidence(target) as records:
        clock, until = time.monotonic(), None if as_of is None else moment(as_of)
        known = replay(ledger, until=until)
        registry = ask(known, tracking_uri, registry_uri)
        roots = [] if isinstance(scope, str) else normalise_roots(scope)
        places, stated = _choose_places(scope, roots, known, registry), isinstance(scope, str)
        keep = None if records is None else partial(_keep, records)
        with threads.executor(_WORKERS, "wherry-audit") as executor:
            rows = executor.map(partial(look_at, known=known, keep=keep, stated=stated), places)
            looked = {place.uri: row for place, row in zip(places, rows, strict=True)}
        recording = ledger if is_recorded else None
        chosen = ""
        if level == "digest":
            chosen = read_all(
                looked, known, sample=sample, deep=deep, options=options, ledger=recording, progress=progress
            )
        load_some(looked, known, native_sample, recording)
        if public_key is not None:
            check_signatures(looked, public_key)
        chain, faults = _chain(ledger, known, expected_anchor)
        later = replay(ledger, after=known.statements)
        findings = [
            *faults,
            *(finding for one in looked.values() for finding in one.findings),
            *compare_registry(registry, known, later, looked, as_of=until is not None),
            *_deletions(scope, roots, known),
            *(findings_of(survey_roots(roots, known), as_of=until) if roots else ()),
        ]
        sorted_ = _gravest_first(add_cures(findings, known, looked))
        finished = utc_now()
        if is_recorded and until is None:
            sorted_ = _gravest_first([*sorted_, *mark_versions(registry, sorted_, known, looked, finished)])
        report = AuditReport(
            scope=(scope,) if isinstance(scope, str) else tuple(roots),
            level=level,
            as_of=until,
            sample=chosen,
            started=started,
            finished=finished,
            seconds=round(time.monotonic() - clock, 3),
            wherry=__version__,
            chain=chain,
            checkpoints=tuple(one.row for one in looked.values()),
            findings=tuple(sorted_),
            registry=registry.uri,
            versions=sum(1 for version in registry.versions if version.digest),
            history=known.history,
        )
        sha256 = None
        if target is not None and records is not None:
            sha256 = write_bundle(target, report, markdown(report), records, ledger)
        return _record(report, ledger, sha256) if is_recorded else report


def _choose_places(
    scope: Scope, roots: Sequence[str], found: LedgerState, registry: RegistryContents
) -> list[PlaceRecord]:
    """The places of the scope, in the order of their URIs."""
    places: list[PlaceRecord] = sorted(found.places.values(), key=lambda place: place.uri)
    if scope == "all":
        return places
    if scope == "registered":
        meant = {version.digest for version in registry.versions}
        meant |= {digest for digest in found.registrations if found.models(digest)}
        return [place for place in places if place.checkpoint_digest in meant]
    if isinstance(scope, str):
        raise UsageError(f"unknown scope {scope!r}", cure="choose registered or all, or give roots as a list")
    heads = tuple(f"{root.rstrip('/')}/" for root in roots)
    return [place for place in places if f"{place.uri}/".startswith(heads)]


def _keep(records: Path, sidecar: Sidecar) -> None:
    (records / record_name(sidecar.checkpoint.checkpoint_digest)).write_bytes(record_of(sidecar))


def _chain(ledger: Ledger, found: LedgerState, anchor: str | None) -> tuple[ChainProof, list[Finding]]:
    from wherry.ledger.record import Anchor, check_chain

    chain = check_chain(ledger, None if anchor is None else Anchor(anchor))
    faults: list[Finding] = []
    if chain.altered is not None:
        faults.append(Finding("chain-altered", chain.altered, ledger.uri))
    if anchor is not None and chain.anchored is None:
        what = f"the ledger has no statement with the hash {anchor[:16]}"
        faults.append(Finding("anchor-lost", what, ledger.uri))
    return ChainProof(ledger.uri, found.statements, found.head, found.time, chain.altered), faults


def _deletions(scope: Scope, roots: Sequence[str], found: LedgerState) -> Iterator[Finding]:
    """Findings for deliberate removals; none for the scope `registered`."""
    if scope == "registered":
        return
    for row in found.history:
        uri = row.get("uri")
        if row["kind"] != "deletion" or uri in found.places:
            continue
        if scope == "all" or any(f"{uri}/".startswith(f"{root}/") for root in roots):
            what = f"{row.get('reason') or 'no reason is recorded'} ({row['time']})"
            yield Finding("deleted", what, uri, row.get("checkpoint_digest"))


def _gravest_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: (gravity(one.kind), one.uri or "", one.path or "", one.what))


def _record(report: AuditReport, ledger: Ledger, bundle: str | None) -> AuditReport:
    """Record the audit in the ledger, with the bundle's digest, so that its findings cannot be removed later."""
    from wherry.ledger.record import record_event

    chain = report.chain
    body: dict[str, Any] = {
        "scope": list(report.scope),
        "level": report.level,
        "as_of": report.as_of,
        "ok": report.ok,
        "counts": report.counts,
        "findings": [
            {name: getattr(one, name) for name in _RECORDED} for one in report.findings[:_MOST_RECORDED]
        ],
        "head": {"seq": chain.statements, "hash": chain.head},
        "bundle_sha256": bundle,
        "started": report.started,
        "wherry": report.wherry,
    }
    try:
        record_event(ledger, "audit", None, body)
    except WherryError as error:
        finding = Finding("not-recorded", error.what, ledger.uri, cure=error.cure)
        return replace(report, findings=tuple(_gravest_first([*report.findings, finding])))
    return report


@contextmanager
def _evidence(target: Path | None) -> Generator[Path | None]:
    """A temporary folder next to the bundle for the manifests of the checked checkpoints."""
    if target is None:
        yield None
        return
    prepare_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".wherry-audit-", dir=target.parent) as folder:
        yield Path(folder)
