"""`wherry register`, `wherry promote`, `wherry resolve` and `wherry fetch`: the commands, and what they print."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from wherry.cli import results
from wherry.cli.options import as_json, memory, quiet, settings
from wherry.cli.say import bar, print_json, print_rows, say, show_before_error
from wherry.errors import UsageError

if TYPE_CHECKING:
    from wherry.models.fetch import FetchReport
    from wherry.models.promote import Promotion

_tracking = click.option("--tracking-uri", help="MLflow tracking store; embedded SQLite by default.")
_registry = click.option("--registry-uri", help="MLflow registry; the tracking store by default.")


@click.command()
@click.argument("uri")
@click.option("--model", required=True, help="Registered model.")
@click.option("--alias", help="Alias to set on the version.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag of the version.")
@_tracking
@_registry
@as_json
def register(uri: str, tags: Sequence[str], json_: bool, **arguments: Any) -> None:
    """Register the checkpoint at URI in MLflow, without copying it."""
    from wherry.models.register import register as enter

    results.show_registration(enter(uri, tags=settings(tags), **arguments), json_=json_)


@click.command()
@click.argument("subject")
@click.option(
    "--rollback",
    is_flag=True,
    help="SUBJECT is a registered model; give the alias back to its previous version.",
)
@click.option("--model", help="Registered model, if SUBJECT is the URI of a checkpoint.")
@click.option("--alias", default="champion", show_default=True, help="Alias to set.")
@click.option("--policy", metavar="NAME|FILE",
              help="Policy that it must pass: a name in wherry.toml, or a TOML or JSON file.")  # fmt: skip
@click.option("--level", type=click.Choice(["structure", "present", "digest"]),
              help="Verification level; by default digest to promote, present to roll back.")  # fmt: skip
@_tracking
@_registry
@click.option("--to-registry-uri", help="Promote into this other MLflow registry.")
@memory
@quiet
@as_json
def promote(
    subject: str,
    rollback: bool,
    model: str | None,
    alias: str,
    policy: str | None,
    level: str | None,
    to_registry_uri: str | None,
    json_: bool,
    quiet: bool,
    **arguments: Any,
) -> None:
    """Verify SUBJECT again, check its policy and set an alias on it.

    The version that had the alias becomes `previous`. SUBJECT is models:/NAME@ALIAS, models:/NAME/VERSION
    or, with --model, the URI of a checkpoint.
    """
    from wherry.config.roots import typed_by_a_person
    from wherry.ledger.resolve import is_model_uri
    from wherry.models.promote import promote as carry_out
    from wherry.models.promote import rollback as go_back

    if rollback and (model or policy or to_registry_uri):
        raise UsageError(
            "--rollback cannot be combined with --model, --policy or --to-registry-uri",
            cure="leave these out",
        )
    arguments |= {"level": level} if level else {}
    with bar(quiet=quiet or json_) as progress:
        if rollback:
            done = go_back(subject, alias=alias, progress=progress, **arguments)
        else:
            further: dict[str, Any] = {"model": model, "policy": policy, "to_registry_uri": to_registry_uri}
            with nullcontext() if is_model_uri(subject) else typed_by_a_person(subject):
                done = carry_out(subject, alias=alias, progress=progress, **further, **arguments)
    _show(done, "the alias is already set; nothing was changed", [
        ("model", f"{done.name} version {done.version}"),
        ("alias", done.alias),
        ("replaced", f"version {done.replaced}" if done.replaced else "nothing"),
        ("checkpoint", done.uri),
        ("digest", done.checkpoint_digest),
        ("verified", f"at level {done.level}"),
        ("by", done.by),
        ("registry", done.registry),
        ("page", done.page),
    ], json_=json_)  # fmt: skip
    for gate in [] if json_ else done.gates:
        say(f"  {gate.gate}: required {gate.requested}, found {gate.found}")


@click.command()
@click.argument("model")
@_tracking
@_registry
@as_json
def resolve(model: str, json_: bool, **arguments: Any) -> None:
    """Print the URI of the checkpoint that MODEL refers to.

    MODEL is models:/NAME (its newest version), models:/NAME@ALIAS, models:/NAME/VERSION or
    wherry://ALGORITHM/DIGEST.
    """
    from dataclasses import asdict

    from wherry.ledger.resolve import resolve_model as look_up

    found = look_up(model, **arguments)
    if json_:
        print_json({"schema": 1, **asdict(found)})
    else:
        say(found.uri)


@click.command()
@click.argument("uri")
@click.argument("target")
@memory
@quiet
@as_json
def fetch(uri: str, target: str, json_: bool, quiet: bool, **arguments: Any) -> None:
    """Copy the checkpoint at URI to TARGET and verify its digests.

    URI may be models:/NAME@ALIAS. An interrupted copy is resumed.
    """
    from wherry.models.fetch import fetch as copy

    with show_before_error(_show_fetched, json_=json_), bar(quiet=quiet or json_) as progress:
        done = copy(uri, target, progress=progress, **arguments)
    _show_fetched(done, json_=json_)


def _show_fetched(done: FetchReport, *, json_: bool) -> None:
    from wherry.core.units import show_seconds, show_size

    _show(done, "the copy already exists; verified, nothing was copied", [
        ("source", done.source),
        ("copy", done.uri),
        ("checkpoint", done.checkpoint_digest),
        ("files", f"{done.files:,}, {show_size(done.nbytes)} in {show_seconds(done.seconds)}"),
        ("resumed", show_size(done.resumed_bytes) if done.resumed_bytes else ""),
        ("lineage", done.lineage),
    ], json_=json_)  # fmt: skip


def _show(
    done: FetchReport | Promotion, already: str, rows: Sequence[tuple[str, str | None]], *, json_: bool
) -> None:
    """Print a report as JSON or as rows, after a sentence if nothing had to be done."""
    if json_:
        print_json(done.to_json())
        return
    if done.already:
        say(already)
    print_rows(rows)
