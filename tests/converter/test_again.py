"""again: what was stated is kept with the receipt, and the command line that is printed makes the same again."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.families import llama
from wherry.cli import cli
from wherry.converter.command import command, stated_options
from wherry.converter.convert import convert_all
from wherry.core import receipt as receipts
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.errors import CorruptError, UsageError
from wherry.ledger.nodes import current_conversions
from wherry.ledger.record import open_ledger, record_conversion, statements
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar
from wherry.trace.stale import stale

FAMILY = 'extends = "llama"\nname = "custom"\nabout = "ours"\n'


@pytest.fixture
def model(tmp_path):
    """A Hugging Face Llama."""
    begun, _family, config = llama()
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors = {path[0]: array for path, array in begun.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def flat(tmp_path):
    path = tmp_path / "a source.safetensors"
    save_file({"layers.0.w": np.arange(12, dtype=np.float32), "step": np.ones(1, np.int32)}, path)
    return path


def run(line):
    words = shlex.split(line)
    assert words[0] == "wherry"
    done = CliRunner().invoke(cli, words[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def made_again(first, **other):
    """Remove what was made, run the printed command, and give the new receipt."""
    place = Path(first.requested.get("into", first.target.uri))
    if place.is_dir():
        shutil.rmtree(place)
    elif place.exists():
        place.unlink()
    run(command(first, **other))
    return read_sidecar(locate(other.get("target", first.target.uri))).receipt


def same(first, second):
    names = ("checkpoint_digest", "format_version", "uri")
    assert second.plan_digest == first.plan_digest
    assert [getattr(second.target, name) for name in names] == [getattr(first.target, name) for name in names]
    assert second.requested == {name: value for name, value in first.requested.items() if name != "step"}


def test_only_what_was_stated_is_kept(flat, tmp_path):
    plain = wherry.convert(flat, tmp_path / "plain", to="orbax", lineage=False)
    assert plain.requested == {"to": "orbax"}
    same(plain, made_again(plain))


def test_every_option_of_a_family_comes_back(model, tmp_path):
    (tmp_path / "my family.toml").write_text(FAMILY)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text('{"another": 1}')
    shutil.copy(model / "config.json", tmp_path / "config.json")
    layout = LayoutRequest(
        family_file=str(tmp_path / "my family.toml"),
        config=str(tmp_path / "config.json"),
        dtype="bfloat16",
        assets=str(tmp_path / "tokens"),
    )
    first = wherry.convert(
        model, tmp_path / "it's there", to="maxtext", layout=layout, only="params", ignore=("others",),
        options={"scan_layers": False}, format="huggingface", meta={"who": "me; and you"}, lineage=False,
    )  # fmt: skip
    assert first.requested["family_file"].keys() == {"name", "sha256"}
    assert first.requested["dtype"] == "bfloat16"
    same(first, made_again(first))


def test_renames_and_targets_of_their_own_layout(flat, tmp_path):
    rules = "layers.{n}.w -> blocks/{n}/kernel; step -> count"
    group = convert_all(
        convert_request(
            flat,
            [
                TargetRequest(str(tmp_path / "a"), "orbax", {"rename": rules, "compression": "zstd"}),
                TargetRequest(str(tmp_path / "b.npz"), "npz", layout=LayoutRequest(family="none")),
            ],
            verify="none",
            lineage=False,
        )
    )
    first, second = group.receipts
    assert first.requested == {
        "to": "orbax",
        "options": {"rename": rules, "compression": "zstd"},
        "verify": "none",
    }
    assert second.requested == {"to": "npz", "family": "none", "verify": "none"}
    for one in group.receipts:
        same(one, made_again(one))


def test_the_step_of_a_run_and_the_run_it_is_made_in(flat, tmp_path):
    for step in (3, 5):
        wherry.convert(flat, tmp_path / "run", to="orbax", into=True, as_step=step, lineage=False)
    first = wherry.convert(
        tmp_path / "run", tmp_path / "other", to="orbax", step=3, into=True, as_step=0, lineage=False
    )
    assert (first.requested["step"], first.requested["as_step"]) == (3, 0)
    assert first.requested["into"] == str(tmp_path / "other")
    assert "/run/3" in command(first), "not the newest"
    same(first, made_again(first))


def test_another_source_and_another_target(flat, tmp_path):
    first = wherry.convert(
        flat, tmp_path / "run", to="orbax", into=True, as_step=3, format="safetensors", lineage=False
    )
    copy = wherry.convert(flat, tmp_path / "copy.npz", to="npz", lineage=False).target.uri
    again = made_again(first, source=copy, target=str(tmp_path / "second"))
    assert again.target.weights_digest == first.target.weights_digest
    assert again.requested == {"to": "orbax", "as_step": 3}


def test_rewrites(tmp_path):
    pytest.importorskip("torch.distributed.checkpoint")
    from tests.support.torch import save, torch

    source = save({"a": torch.arange(30.0)}, tmp_path / "a")
    first = wherry.rewrite(source, tmp_path / "b", as_="for-torch=2.3", meta={"k": "v"}).receipt
    assert first.requested == {"as": "for-torch=2.3", "meta": {"k": "v"}}
    assert stale() == [], "a rewrite is planned as one"
    same(first, made_again(first))
    unstated = replace(first, requested={})
    assert shlex.split(command(unstated))[:6] == [*shlex.split(command(first))[:6]]
    inside = wherry.rewrite(source, as_="for-torch=2.3", in_place=True).receipt
    assert inside.requested == {"as": "for-torch=2.3", "in_place": True}
    assert shlex.split(command(inside)) == [
        "wherry", "rewrite", str(source), "--as", "for-torch=2.3", "--in-place"
    ]  # fmt: skip
    assert str(source) not in {row.uri for row in stale()}, "it was made of itself"


def test_a_receipt_without_it_tells_what_its_options_do(flat, tmp_path):
    first = wherry.convert(
        flat, tmp_path / "old", to="orbax", options={"compression": "zstd", "split": "."}, lineage=False
    )
    place = tmp_path / "old" / "wherry.json"
    data = json.loads(place.read_text())
    del data["receipt"]["requested"]
    place.write_text(json.dumps(data))
    old = read_sidecar(locate(str(tmp_path / "old"))).receipt
    assert old == replace(first, requested={}, lineage="not recorded")
    assert "requested" not in old.to_json(), "so that it says what it said"
    assert made_again(old).plan_digest == first.plan_digest


def test_a_training_state_has_no_command_but_from_another_source(flat, tmp_path):
    first = wherry.convert(flat, tmp_path / "a", to="orbax", lineage=False)
    live = replace(first, source=replace(first.source, uri="live://run"))
    with pytest.raises(UsageError, match="training state"):
        command(live)
    assert str(flat) in shlex.split(command(live, source=str(flat)))


def test_secrets_and_what_may_pass(tmp_path):
    target = TargetRequest("t", "dcp", {"x": None, "y": ("p", 1), "z": False})
    assets = "s3://user:secret@bucket/tokens?key=1"
    request = convert_request("s", [target], assets=assets, allow_opaque=("b.B", "a.A"))
    stated = stated_options(request, request.targets[0])
    assert stated == {
        "to": "dcp", "assets": "s3://bucket/tokens", "allow_opaque": ["a.A", "b.B"],
        "options": {"y": "p; 1", "z": "false"},
    }  # fmt: skip
    receipt = receipts.from_json(
        {"schema": receipts.SCHEMA, "source": NODE, "target": NODE, "plan_digest": "", "requested": stated}
    )
    assert json.loads(json.dumps(receipt.to_json()))["requested"] == stated
    assert command(receipt).endswith("--allow-opaque a.A --allow-opaque b.B")


NODE = {
    "uri": "/a", "format": "dcp", "format_version": None, "checkpoint_digest": "c", "weights_digest": "w",
    "fingerprint": "",
}  # fmt: skip


@pytest.mark.parametrize("field", ["requested", "options"])
def test_what_is_no_table_is_no_receipt(field):
    with pytest.raises(CorruptError, match="invalid receipt"):
        receipts.from_json(
            {"schema": receipts.SCHEMA, "source": NODE, "target": NODE, "plan_digest": "", field: "words"}
        )


@pytest.mark.parametrize("name", ["started", "finished"])
@pytest.mark.parametrize(
    "time", ["zzz", "2026", "2026-11-26T12:00:00", "99999-01-01T00:00:00+00:00", "9" * 5000]
)
def test_what_is_no_time_is_no_receipt(name, time):
    """Policies and retention compare it with others; one of another form would end them as a bug."""
    with pytest.raises(CorruptError, match=f"invalid receipt: .*expected a time with an offset as '{name}'"):
        receipts.from_json(
            {"schema": receipts.SCHEMA, "source": NODE, "target": NODE, "plan_digest": "", name: time}
        )


def test_the_ledger_keeps_it(flat, tmp_path):
    first = wherry.convert(flat, tmp_path / "a", to="orbax", only="params")
    with open_ledger() as ledger:
        [statement] = statements(ledger, kinds={"conversion"})
        [done] = current_conversions(ledger)
        assert done.request == {"to": "orbax", "only": "params"}
        assert record_conversion(ledger, first) == statement.seq, "it is the same conversion"
        record_conversion(ledger, replace(first, requested={}))
        [done] = current_conversions(ledger)
        assert done.request == {}


def test_stale_plans_the_stated_options(model, tmp_path):
    family = tmp_path / "custom.toml"
    family.write_text(FAMILY)
    layout = LayoutRequest(family_file=str(family), dtype="bfloat16")
    first = wherry.convert(
        model, tmp_path / "made", to="maxtext", layout=layout, options={"scan_layers": False}
    )
    assert stale() == []
    family.write_text(FAMILY + "# looked at again\n")
    [row] = stale()
    assert [reason.kind for reason in row.reasons] == ["plan-changed"]
    assert "family_file was" in row.reasons[0].detail
    assert row.cure == command(first)
    family.unlink()
    [row] = stale()
    assert "the same request fails now" in row.reasons[0].detail
    family.write_text(FAMILY)
    assert stale() == []


ROUTE = """
[routes.run]
root = "{root}"
{more}
[[routes.run.targets]]
format = "orbax"
uri = "{out}/other"
[[routes.run.targets]]
format = "orbax"
uri = "{out}/{{name}}"
rename = ["layers.{{n}}.w -> blocks/{{n}}/{leaf}"]
"""


def test_stale_asks_the_rule_that_made_it_and_says_what_differs(flat, tmp_path):
    (tmp_path / "run").mkdir()
    source = tmp_path / "run" / "model.safetensors"
    save_file(load_file(flat), source)
    target = tmp_path / "out" / "model.safetensors"
    file = tmp_path / "wherry.toml"
    text = {"root": source.parent, "out": target.parent, "more": "", "leaf": "kernel"}

    def found(**more):
        file.write_text(ROUTE.format(**{**text, **more}))
        return stale(config=str(file))

    wherry.convert(source, target, to="orbax", options={"rename": "layers.{n}.w -> blocks/{n}/kernel"})
    assert found() == [], "the second rule made it, and it is the same"
    [row] = found(leaf="weight")
    assert [reason.kind for reason in row.reasons] == ["route-changed"]
    assert "options was rename=" in row.reasons[0].detail
    assert "blocks/{n}/weight" in (row.cure or "")
    assert found(leaf="weight", more='runs = ["another"]') == [], (
        "a route that does not take the source has no say"
    )
