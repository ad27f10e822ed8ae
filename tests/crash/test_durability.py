"""What a loss of power leaves of a conversion, for every written format: nothing visible, or all of it.

`wherry.testing.durability` has the rules. The last tests forget one kind of sync each and expect that the rules see it.
"""

from __future__ import annotations

import pytest

import wherry
from tests.support.crash import spread, written
from tests.support.durability import at_journal_or_commit, forgetting, is_journal, make_source, watched
from tests.support.variants import WRITTEN, each_variant
from wherry.converter.convert import convert_all
from wherry.core.request import TargetRequest, convert_request
from wherry.formats.registry import find_format
from wherry.integrations.containers.zarr.layout import DATA
from wherry.testing import faults
from wherry.testing.durability import Disk

pytest_plugins = ("tests.support.crash_fixtures",)

IN_RUNS = [name for name in WRITTEN if find_format(name).step_folder is not None]
KINDS = ["safetensors", "orbax"]  # a file and a folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small source by format, each made once."""
    folder, made = tmp_path_factory.mktemp("small"), {}

    def get(name):
        return made[name] if name in made else made.setdefault(name, make_source(name, folder / name))

    return get


@each_variant
def test_a_target_is_durable_before_it_is_visible_and_its_name_before_it_is_recorded(
    small, tmp_path, name, options
):
    target = tmp_path / "disk" / "new" / "folders" / name
    with watched(tmp_path / "disk", target) as disk:
        receipt = wherry.convert(small(name), target, to=name, options=options)
    assert receipt.lineage == "recorded"
    assert disk.broken == []


@pytest.mark.parametrize("name", IN_RUNS)
def test_a_step_of_a_run(small, tmp_path, name):
    run = tmp_path / "disk" / "run"
    committed = run / find_format(name).step_folder(7).split("/")[0]
    with watched(tmp_path / "disk", committed) as disk:
        wherry.convert(small(name), run, to=name, into=True, as_step=7)
        wherry.convert(small(name), run, to=name, into=True, as_step=8)
    assert committed.exists()
    assert disk.broken == []


def test_several_targets(small, tmp_path):
    places = {name: tmp_path / "disk" / name / "out" for name in ("npz", "safetensors", "huggingface", "dcp")}
    targets = [
        TargetRequest(str(place), name, {"join": "."} if name == "npz" else {})
        for name, place in places.items()
    ]
    with watched(tmp_path / "disk", *places.values()) as disk:
        convert_all(convert_request(small("safetensors"), targets, family="none"))
    assert disk.broken == []


def losses(source, root, target, **options):
    """What a loss of power could leave of a conversion, after each line of its journal and at its commit."""
    with Disk(root, [target], at_journal_or_commit) as disk, faults.small_steps():
        receipt = wherry.convert(source, target, to=target.name, lineage=False, **options)
    return disk.losses, receipt.target.checkpoint_digest


def convert_after(loss, source, root, target, **options):
    """Go on after a loss of power. A lease names a process that is gone then, and is the lease tests' affair."""
    loss.restore(root)
    for lease in root.rglob(".wherry-*.lease"):
        lease.unlink()
    with faults.small_steps():
        return wherry.convert(source, target, to=target.name, lineage=False, **options)


@written(12, 1000)
def test_a_run_goes_on_after_any_loss_of_power(small, tmp_path, to, most):
    source, root = small(to), tmp_path / "disk"
    target = root / "new" / to
    root.mkdir()
    found, digest = losses(source, root, target)
    after_lines = [loss for loss in found if not loss.call.startswith("commit")]
    at_commit = [loss for loss in found if loss.call.startswith("commit")]
    assert len(after_lines) > 5
    assert at_commit
    resumed = already = 0
    for loss in [*(after_lines[number - 1] for number in spread(len(after_lines), most)), *at_commit]:
        receipt = convert_after(loss, source, root, target)
        assert receipt.target.checkpoint_digest == digest, loss.call
        assert wherry.verify(target, level="digest").ok, loss.call
        resumed += bool(receipt.resumed_bytes)
        already += receipt.already
    assert resumed, "no run was taken up, so no line of a journal was put to the test"
    assert already, "no commit was found done"


@pytest.mark.parametrize("name", KINDS)
def test_without_reading_back_the_journal_alone_is_believed(small, tmp_path, name):
    source, root = small(name), tmp_path / "disk"
    root.mkdir()
    for loss in losses(source, root, root / name, verify="none")[0]:
        convert_after(loss, source, root, root / name, verify="none")
        assert wherry.verify(root / name, level="digest", against=source).ok, loss.call


class Cancelled(BaseException):
    """As Prefect's TerminationSignal."""


def interrupt(source, target, share, **options):
    """Convert until a share is recorded."""

    def report(progress):
        if progress.stage == "convert" and progress.done >= progress.total * share:
            raise Cancelled

    with (
        pytest.raises(Cancelled),
        faults.small_steps(),
        faults.replace_value("wherry.core.progress:_INTERVAL", 0),
    ):
        wherry.convert(source, target, to=target.name, lineage=False, progress=report, **options)


@pytest.mark.parametrize("name", KINDS)
def test_a_takeover_by_copy_loses_no_progress_to_a_loss_of_power(small, tmp_path, name):
    """The former owner may still write, for all that is known: its area bears its token."""
    source, root = small(name), tmp_path / "disk"
    root.mkdir()
    interrupt(source, root / name, 0.5, verify="none")
    (left,) = root.glob(".wherry-*")
    left.rename(f"{left}-89abcdef")
    with Disk(root, [root / name], lambda _call, _path: True) as disk:
        interrupt(source, root / name, 0.6, verify="none")
    assert len(disk.losses) > 5
    for loss in disk.losses:
        receipt = convert_after(loss, source, root, root / name, verify="none")
        assert receipt.resumed_bytes * 2 >= receipt.source.nbytes, loss.call
        assert wherry.verify(root / name, level="digest", against=source).ok, loss.call


def test_a_later_data_file_of_a_database_has_its_name_before_the_journal_speaks_of_it(small, tmp_path):
    source, root = small("orbax"), tmp_path / "disk"
    root.mkdir()
    grown = {"verify": "none", "options": {"compression": "zstd", "data_file_size": "1000"}}
    found, _digest = losses(source, root, root / "orbax", **grown)
    assert len(list((root / "orbax" / DATA).iterdir())) > 2, "the tree and more than one file of data"
    for loss in found:
        convert_after(loss, source, root, root / "orbax", **grown)
        assert wherry.verify(root / "orbax", level="digest", against=source).ok, loss.call


def test_an_area_whose_journal_is_gone_is_made_anew(small, tmp_path):
    """What else lies in it may be of any run, and must not be committed."""
    source, root = small("orbax"), tmp_path / "disk"
    root.mkdir()
    found, digest = losses(source, root, root / "orbax")
    next(loss for loss in found if any(isinstance(kept.held, dict) for kept in loss.tree.values())).restore(
        root
    )
    for path in root.rglob(".wherry-*"):
        if path.is_file():
            path.unlink()
        elif path.parent == root:
            (path / "left-behind").write_text("of another run")
    assert [path.name for path in root.rglob("left-behind")]
    with faults.small_steps():
        receipt = wherry.convert(source, root / "orbax", to="orbax", lineage=False)
    assert (receipt.resumed_bytes, receipt.target.checkpoint_digest) == (0, digest)
    assert not list(root.rglob("left-behind"))


# What the rules see: each sync that is left out breaks one of them.


def broken_by(chosen, source, root, name, to=None):
    target = root / "new" / "folders" / name
    with watched(root, target) as disk, forgetting(chosen) as forgotten:
        wherry.convert(source, target, to=to or name)
    assert forgotten, "no such sync was ever made"
    return {row.rule for row in disk.broken}


def is_area(path):
    return path.name.startswith(".wherry-")


SYNCS = {
    "the target's folder": (lambda path: path.name == "folders", {"safetensors": "names", "orbax": "names"}),
    "the folders above": (lambda path: path.name in ("disk", "new"), {"safetensors": "names", "orbax": "names"}),
    "small files": (
        lambda path: path.is_file() and path.stat().st_size < 65536 and not is_journal(path),
        {"safetensors": "contents", "orbax": "commit"},
    ),
    "large files": (
        lambda path: path.is_file() and path.stat().st_size >= 65536,
        {"safetensors": "commit", "orbax": "commit"},
    ),
    "folders of the area": (
        lambda path: path.is_dir() and any(is_area(one) for one in (path, *path.parents)), {"orbax": "commit"}
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "name"), [(what, name) for what, (_, names) in SYNCS.items() for name in names]
)
def test_a_sync_that_is_left_out_is_seen(small, tmp_path, what, name):
    chosen, rules = SYNCS[what]
    assert rules[name] in broken_by(chosen, small(name), tmp_path / "disk", name)


def test_a_sidecar_that_is_named_later_than_its_file_is_seen(small, tmp_path):
    """The folder is synced only once both are there."""
    target = tmp_path / "disk" / "new" / "folders" / "x"
    found = broken_by(
        lambda path: path.name == "folders" and not target.exists(),
        small("safetensors"), tmp_path / "disk", "x", to="safetensors",
    )  # fmt: skip
    assert found == {"sidecar"}


@pytest.mark.parametrize("name", KINDS)
def test_a_line_of_the_journal_before_its_data_is_seen(small, tmp_path, name):
    """As if the line was written first: when it is synced, its data are not."""
    source, root = small(name), tmp_path / "disk"
    root.mkdir()
    data = forgetting(lambda path: path.is_file() and not is_journal(path))
    with Disk(root, [root / name], at_journal_or_commit) as disk, faults.small_steps(), data:
        digest = wherry.convert(source, root / name, to=name, lineage=False).target.checkpoint_digest
    outcomes = []
    for loss in disk.losses:
        try:
            outcomes.append(convert_after(loss, source, root, root / name).target.checkpoint_digest == digest)
        except wherry.WherryError:
            outcomes.append(False)
    assert not all(outcomes)


def test_a_change_after_the_commit_is_seen(small, tmp_path):
    target = tmp_path / "disk" / "out"
    with watched(tmp_path / "disk", target) as disk:
        wherry.convert(small("orbax"), target, to="orbax")
        (target / "late").write_text("x")
        (target / "commit_success.txt").write_text("y")
    assert {row.rule for row in disk.broken} == {"contents", "change", "names"}
