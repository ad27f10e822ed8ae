"""`wherry ledger`: check, anchor and rebuild the ledger; `deliver`, `sign` and `verify-signature`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from wherry.cli.options import as_json, quiet
from wherry.cli.say import bar, print_json, print_rows, say
from wherry.core.units import plural, short
from wherry.cures import Command, Cure
from wherry.errors import NotFoundError, StorageError, UsageError

if TYPE_CHECKING:
    from wherry.ledger.record import Anchor


SCHEMA = 1
_ALTERED, _CUT = 5, 9  # exit codes of an altered chain, and of one without the anchor
_LEAST = 16  # minimum hex digits of a hash that identify a statement
_named = click.option(
    "--ledger",
    "url",
    metavar="URL",
    help="URL of the ledger; WHERRY_LEDGER or the one in WHERRY_HOME by default.",
)


@click.group()
def ledger() -> None:
    """Check, rebuild and deliver the ledger."""


@ledger.command()
@click.option(
    "--anchor",
    metavar="FILE|HASH",
    help="Earlier output of `wherry ledger anchor`; the chain must still contain it.",
)
@_named
@as_json
def check(anchor: str | None, url: str | None, json_: bool) -> None:
    """Recompute the hash chain and every row, and report the first altered row.

    Times that contradict each other or the present by more than a day are a warning: `clock`.

    Exits with 5 if a row was altered, with 9 if the anchor is not in the chain.
    """
    from wherry.ledger.record import check_chain, open_ledger

    kept = None if anchor is None else _anchor(anchor)
    with open_ledger(url) as opened:
        chain = check_chain(opened, kept)
        uri = opened.uri
    cut = kept is not None and chain.anchored is None
    if json_:
        print_json({"schema": SCHEMA, "ledger": uri, **asdict(chain), "ok": not (chain.altered or cut)})
    else:
        print_rows([
            ("ledger", uri),
            ("statements", chain.statements),
            ("head", chain.head),
            ("chain", f"ALTERED: {chain.altered}" if chain.altered else "intact; every row matches its statement"),
            ("clock", f"warning: {chain.clock}" if chain.clock else ""),
            ("anchor", _describe_anchor(chain.anchored, chain.statements) if kept else ""),
        ])  # fmt: skip
    sys.exit(_ALTERED if chain.altered else _CUT if cut else 0)


@ledger.command()
@_named
def anchor(url: str | None) -> None:
    """Print the number, hash and time of the last statement as JSON.

    Store the output where nobody can alter it.
    """
    from wherry.ledger.record import head, open_ledger

    with open_ledger(url) as opened:
        print_json({"schema": SCHEMA, "ledger": opened.uri, **asdict(head(opened))})


@ledger.command()
@click.argument("roots", nargs=-1, required=True, metavar="ROOT...")
@click.option("--no-registry", is_flag=True, help="Do not read registrations from MLflow.")
@click.option("--tracking-uri", help="MLflow tracking store, as for `wherry register`.")
@click.option("--registry-uri", help="MLflow registry, as for `wherry register`.")
@_named
@as_json
def rebuild(roots: Sequence[str], no_registry: bool, url: str | None, json_: bool, **stores: Any) -> None:
    """Create a new ledger from the sidecars below each ROOT and from the tags in MLflow.

    The new chain begins with a statement of what was recovered and what was not. A ledger that has statements is
    never overwritten: move it away first.
    """
    from wherry.ledger.rebuild import rebuild

    found = rebuild(roots, ledger=url, registry=not no_registry, **stores)
    if json_:
        print_json(found.to_json())
        return
    print_rows([
        ("ledger", found.ledger),
        ("checkpoints", found.checkpoints),
        ("conversions", f"{found.conversions}, {plural(found.edges, 'edge')}"),
        ("places", found.places),
        ("registrations", found.registrations),
        ("lost", "; ".join(found.lost)),
        ("head", found.head),
    ])  # fmt: skip
    for digest in found.partial:
        say(f"  {short(digest)}: recovered from the registry's tags only")
    for row in found.unreadable:
        say(f"  not read: {row['uri']}: {row['reason']}")


@ledger.command("record")
@click.argument("uris", nargs=-1, required=True, metavar="URI...")
@_named
@as_json
def record_(uris: Sequence[str], url: str | None, json_: bool) -> None:
    """Record committed checkpoints in the ledger from their sidecars.

    Use it after a conversion or copy that could not record its result. Existing entries of the ledger do not change.
    """
    from wherry.ledger.record import record_sidecar

    rows = [record_sidecar(uri, ledger=url) for uri in uris]
    if json_:
        print_json({"schema": SCHEMA, "recorded": [{"uri": uri, "lineage": word} for uri, word in rows]})
        return
    for uri, word in rows:
        say(f"{uri}: {word}")


def _anchor(text: str) -> Anchor:
    """A hash, or a file that `ledger anchor` wrote."""
    from wherry.core.config_text import read_config
    from wherry.core.json_document import parse_json
    from wherry.core.limits import SMALL
    from wherry.ledger.record import Anchor

    if len(text) >= _LEAST and set(text) <= set("0123456789abcdef"):
        return Anchor(text)
    try:
        data: Any = parse_json(read_config(text), "the anchor", limits=SMALL)
        return Anchor(str(data["hash"]), int(data["seq"]))
    except StorageError:
        raise
    except (NotFoundError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise UsageError(
            f"invalid anchor {text!r}: expected a hash of at least {_LEAST} hex digits, or a file",
            cure=Cure("give the file or the hash that {} printed", Command("ledger anchor")),
        ) from error


def _describe_anchor(anchored: int | None, statements: int) -> str:
    if anchored is None:
        return "NOT in this chain: statements were removed, or it belongs to another chain"
    return f"matches statement {anchored}; {plural(statements - anchored, 'statement')} follow it"


@click.command()
@click.argument("projection", required=False, metavar="[NAME]")
@click.option("--again", is_flag=True, help="Start again from the first statement.")
@as_json
def deliver(projection: str | None, *, again: bool, json_: bool) -> None:
    """Send the statements of the ledger to NAME, by default to all configured destinations."""
    from wherry.ledger import deliver as outbox

    outcomes = outbox.deliver(projection, again=again)
    if json_:
        print_json(outbox.to_json(outcomes))
    for one in [] if json_ else outcomes:
        say(
            f"{one.projection} to {one.destination}: {plural(one.statements, 'statement')}, up to {one.cursor}"
        )
        if one.failed:
            say(f"delivery of the next statement failed: {one.failed}", err=True)
    if not outcomes and not json_:
        say(f"no destination is configured; set {', '.join(outbox.DESTINATIONS.values())}")
    sys.exit(10 if any(one.failed for one in outcomes) else 0)


@click.command()
@click.argument("uri")
@click.option("--key", required=True, metavar="FILE", help="Private key (PEM; P-256, P-384 or P-521).")
@click.option(
    "--out", metavar="FILE", help="File to write the signature to; in or next to the checkpoint by default."
)
@click.option(
    "--hash",
    "algorithm",
    type=click.Choice(["sha256", "blake3"]),
    default="sha256",
    show_default=True,
    help="Hash of the files; blake3 is faster, but only model_signing's library verifies it.",
)
@quiet
@as_json
def sign(uri: str, key: str, out: str | None, algorithm: str, *, quiet: bool, json_: bool) -> None:
    """Sign every file of the checkpoint at URI.

    `model_signing verify key` accepts the signature.
    """
    from wherry.core.services import service

    with bar(quiet=quiet or json_) as progress:
        place = service("signing").sign(uri, key, out=out, algorithm=algorithm, progress=progress)
    if json_:
        print_json({"schema": 1, "uri": uri, "signature": place})
    else:
        say(place)


@click.command("verify-signature")
@click.argument("uri")
@click.option("--key", required=True, metavar="FILE", help="Public key (PEM).")
@click.option(
    "--signature", metavar="FILE", help="Signature file, if it is not in or next to the checkpoint."
)
@quiet
@as_json
def verify_signature(uri: str, key: str, signature: str | None, *, quiet: bool, json_: bool) -> None:
    """Verify the checkpoint at URI against its signature."""
    from wherry.core.services import service

    with bar(quiet=quiet or json_) as progress:
        found = service("signing").verify(uri, key, signature=signature, progress=progress)
    if json_:
        print_json({"schema": 1, **found.to_json()})
    else:
        for name, reason in found.failed:
            say(f"{name}: {reason}")
        for name in found.unsigned:
            say(f"{name}: not covered by the signature")
        print_rows(
            [
                ("signature", "ok" if found.ok else "MISMATCH"),
                ("files", found.files),
                ("signer", found.signer),
            ]
        )
    sys.exit(0 if found.ok else 9)


ledger.add_command(deliver)
