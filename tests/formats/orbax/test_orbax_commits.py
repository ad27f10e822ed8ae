"""Half-finished saves of every generation: no step counts as committed unless every sign of its writer says so.

A table of what can be left of a save, for each way of saving: the run's newest step is damaged in one way, so `detect`,
`discover` and `convert` must take the step before it, and the step itself must be called incomplete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.command import typed
from tests.support.corpus import CORPUS, expected, needs_corpus
from wherry.errors import IncompleteError

TREE = {"params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}}


def _manager(run: Path, prefix: str | None = None, **more: object) -> None:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(step_prefix=prefix)
    with ocp.CheckpointManager(run, item_names=("state", "metrics"), options=options) as manager:
        for step in (5, 60):
            args = ocp.args.Composite(
                state=ocp.args.PyTreeSave(TREE), metrics=ocp.args.JsonSave({"loss": 1.0})
            )
            manager.save(step, args=args)


def _v1(run: Path) -> None:
    from orbax.checkpoint.experimental.v1 import training

    with training.Checkpointer(run) as checkpointer:
        for step in (5, 60):
            checkpointer.save(step, TREE)


def _checkpointer(run: Path) -> None:
    import orbax.checkpoint as ocp

    run.mkdir()
    for step in (5, 60):
        ocp.PyTreeCheckpointer().save(run / str(step), TREE)


def _of_corpus(case: str, name: str, item: str) -> Callable[[Path], None]:
    """A run of an older generation: a real item, twice."""

    def make(run: Path) -> None:
        source = CORPUS / case / "checkpoint"
        for step in (5, 60):
            shutil.copytree(source / name, run / str(step) / item, copy_function=shutil.copyfile)
            around = (source / name).parent / "_CHECKPOINT_METADATA"
            if around.exists():
                shutil.copyfile(around, run / str(step) / around.name)
        for path in [run, *run.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)

    return make


# Name → how the run is made, and where the item of a step is.
GENERATIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "0.12 manager": (_manager, "state"),
    "0.12 manager with a prefix": (lambda run: _manager(run, "nnx"), "state"),
    "0.12 v1": (_v1, "state"),
    "0.12 checkpointer": (_checkpointer, ""),
    "0.11.0 manager": (_of_corpus("orbax-0110-manager", "run/10/state", "state"), "state"),
    "0.5.23 manager": (_of_corpus("orbax-0523-manager", "run/10/state", "state"), "state"),
    "0.4.4 item": (_of_corpus("orbax-044-ocdbt", "ckpt", "default"), "default"),
    "0.1.7 item": (_of_corpus("orbax-017-numpy", "ckpt", "default"), "default"),
}
LEGACY = {"0.4.4 item", "0.1.7 item"}  # no `_CHECKPOINT_METADATA`
MARKED = {name for name in GENERATIONS if name.startswith("0.12")}  # commit_success.txt on a file system


def _renamed(suffix: str) -> Callable[[Path, str], None]:
    return lambda step, _item: step.rename(step.with_name(step.name + suffix)) and None


def _no_time(step: Path, _item: str) -> None:
    file = step / "_CHECKPOINT_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"commit_timestamp_nsecs": None}))


def _no_marker(step: Path, _item: str) -> None:
    (step / "commit_success.txt").unlink()


def _no_item_marker(step: Path, item: str) -> None:
    (step / item / "commit_success.txt").unlink()


def _in_a_bucket(step: Path, item: str) -> None:
    for file in step.rglob("commit_success.txt"):
        file.unlink()
    _no_time(step, item)


def _item_in_progress(step: Path, item: str) -> None:
    (step / item).rename(step / f"{item}.orbax-checkpoint-tmp")


def _other_item_in_progress(step: Path, _item: str) -> None:
    (step / "metrics").rename(step / "metrics.orbax-checkpoint-tmp-7")


def _emptied(step: Path, _item: str) -> None:
    shutil.rmtree(step)
    step.mkdir()


def _without(*names: str) -> Callable[[Path, str], None]:
    def damage(step: Path, item: str) -> None:
        for name in names:
            place = step / item / name
            shutil.rmtree(place) if place.is_dir() else place.unlink()

    return damage


def _truncated(name: str) -> Callable[[Path, str], None]:
    return lambda step, item: (step / item / name).write_text("") and None


def _no_metadata(step: Path, _item: str) -> None:
    (step / "_CHECKPOINT_METADATA").write_text("")


def _being_deleted(step: Path, item: str) -> None:
    (step / "_CHECKPOINT_DELETION").write_text(json.dumps({"checkpointable_name": item}))


def _first_copied(step: Path, item: str) -> None:
    """What a copy in the order of time has: arrays, and no small file of the step yet."""
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (step / name).unlink()
    (step / item / "commit_success.txt").unlink(missing_ok=True)


ONLY_SEEN_NEXT_TO_OTHERS = (
    "no marker, which the step before has",
    "a copy that has not finished",
    "an empty folder",
)
ALL = frozenset(GENERATIONS)
WITH_ITEMS = MARKED - {"0.12 checkpointer"}
WITH_TREE = ALL - {"0.1.7 item"}
WITH_OCDBT = ALL - {"0.1.7 item"}
# What is left of the save → the damage, and the generations that can leave it.
HALVES: dict[str, tuple[Callable[[Path, str], None], frozenset[str] | set[str]]] = {
    "the suffix of 0.11.28": (_renamed(".orbax-checkpoint-tmp"), ALL),
    "the suffix with a time": (_renamed(".orbax-checkpoint-tmp-1703334121930256"), ALL),
    "a partial save": (_renamed(".partial_save"), ALL),
    "in a bucket, then copied": (_in_a_bucket, ALL - LEGACY),
    "no time of the commit": (_no_time, ALL - LEGACY),
    ONLY_SEEN_NEXT_TO_OTHERS[0]: (_no_marker, MARKED),
    "no marker of the item": (_no_item_marker, {"0.12 manager", "0.12 manager with a prefix"}),
    "an item in progress": (_item_in_progress, WITH_ITEMS | LEGACY),
    "another item in progress": (_other_item_in_progress, {"0.12 manager", "0.12 manager with a prefix"}),
    ONLY_SEEN_NEXT_TO_OTHERS[2]: (_emptied, ALL),
    "an empty tree": (_truncated("_METADATA"), WITH_TREE),
    "an empty msgpack tree": (_truncated("checkpoint"), {"0.1.7 item"}),
    "an empty step metadata": (_no_metadata, ALL - LEGACY),
    "unmerged databases": (_without("manifest.ocdbt", "d"), WITH_OCDBT),
    "no data files": (_without("d", "ocdbt.process_0"), WITH_OCDBT),
    "no tree": (_without("_METADATA"), WITH_TREE - {"0.4.4 item"}),
    "an item that is being deleted": (_being_deleted, {"0.12 v1"}),
    ONLY_SEEN_NEXT_TO_OTHERS[1]: (_first_copied, MARKED),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each generation, made once."""
    home, made = tmp_path_factory.mktemp("runs"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = home / name.replace(" ", "-")
            GENERATIONS[name][0](made[name])
        return made[name]

    return get


def _steps(run: Path) -> list[Path]:
    return sorted(
        (path for path in run.iterdir() if path.is_dir()), key=lambda path: int(path.name.split("_")[-1])
    )


def _half(runs, tmp_path, generation, half):
    """A copy of the run whose newest step is half-finished; the run, its good step, and what is left of the other."""
    run = tmp_path / "run"
    shutil.copytree(runs(generation), run)
    old, new = _steps(run)
    HALVES[half][0](new, GENERATIONS[generation][1])
    (left,) = (path for path in run.iterdir() if path != old)
    return run, old, left


ROWS = [
    (generation, half)
    for half, (_, names) in HALVES.items()
    for generation in GENERATIONS
    if generation in names
]


def test_the_table_has_twelve_rows_for_each_way_of_saving():
    assert all(sum(row[0] == name for row in ROWS) >= 12 for name in MARKED)


@needs_corpus
@pytest.mark.parametrize(("generation", "half"), ROWS)
def test_a_half_finished_save_is_incomplete_and_the_step_before_it_is_taken(runs, tmp_path, generation, half):
    run, old, left = _half(runs, tmp_path, generation, half)
    found = wherry.detect(run)
    assert (found.verdict, found.step) == ("ok", 5), found
    assert Path(found.uri).is_relative_to(old)
    assert [one.step for one in wherry.discover(run, newest=True)] == [5]
    itself = wherry.detect(left)
    assert itself.verdict == "incomplete", itself
    with pytest.raises(IncompleteError):
        wherry.convert(left, tmp_path / "never", to="orbax")
    assert wherry.convert(run, tmp_path / "out", to="orbax").source.step == 5


@needs_corpus
@pytest.mark.parametrize(
    ("generation", "half"), [row for row in ROWS if row[1] not in ONLY_SEEN_NEXT_TO_OTHERS]
)
def test_a_run_with_only_a_half_finished_save_is_incomplete(runs, tmp_path, capfd, generation, half):
    run, old, _ = _half(runs, tmp_path, generation, half)
    shutil.rmtree(old)
    found = wherry.detect(run)
    assert found.verdict == "incomplete", found
    assert not found.cure or "pass the checkpoint" not in found.cure
    assert [typed(f"{verb} {run}", tmp_path, capfd)[0] for verb in ("detect", "verify")] == [5, 5]
    assert [one.uri for one in wherry.discover(run, newest=True)] == []


@needs_corpus
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_same_run_without_damage_counts(runs, generation):
    found = wherry.detect(runs(generation))
    assert (found.verdict, found.step) == ("ok", 60), found
    assert len(list(wherry.discover(runs(generation)))) == 2


@pytest.mark.parametrize(
    "half", ["in a bucket, then copied", "no time of the commit", "no marker of the item"]
)
def test_the_cure_of_a_complete_item_works_when_it_is_pasted(runs, tmp_path, capfd, half):
    run, _, left = _half(runs, tmp_path, "0.12 manager", half)
    target = tmp_path / "committed"
    code, text = typed(f"convert {left} {tmp_path / 'never'} --to orbax", tmp_path, capfd)
    assert code == 5
    cure = text.rpartition("`wherry ")[2].partition("`")[0].replace("TARGET", str(target))
    assert typed(cure, tmp_path, capfd)[0] == 0
    assert wherry.detect(target).verdict == "ok"
    del run


def test_steps_that_an_earlier_release_wrote_count(runs, tmp_path):
    """Before 0.12.3 no file system got the marker: what later steps have says nothing about earlier ones."""
    run = tmp_path / "run"
    shutil.copytree(runs("0.12 manager"), run)
    old, new = _steps(run)
    for file in old.rglob("commit_success.txt"):
        file.unlink()
    assert wherry.detect(old).verdict == "ok"
    shutil.rmtree(new)
    wherry.convert(runs("0.12 v1"), run / "1" / "state", to="orbax")  # wherry's own step has the marker
    (run / "1" / "commit_success.txt").write_text("")
    assert wherry.detect(old).verdict == "ok"


@needs_corpus
def test_a_step_of_an_older_release_after_one_of_a_newer_counts(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs("0.11.0 manager"), run)
    old, new = _steps(run)
    shutil.rmtree(old)
    shutil.copytree(_steps(runs("0.12 manager"))[0], old)
    assert wherry.detect(new).verdict == "ok"


def test_the_deletion_of_another_item_says_nothing(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs("0.12 v1"), run)
    _being_deleted(_steps(run)[1], "optimizer")
    assert wherry.detect(run).step == 60


@pytest.mark.parametrize("half", ["no marker, which the step before has", "no time of the commit"])
def test_a_step_in_a_bucket(runs, tmp_path, half):
    import fsspec

    run, _, _ = _half(runs, tmp_path, "0.12 manager", half)
    place = f"memory://commits-{half[:9].replace(' ', '-')}"
    for file in run.rglob("*"):
        if file.is_file():
            fsspec.filesystem("memory").pipe(f"{place}/{file.relative_to(run)}", file.read_bytes())
    assert wherry.detect(place).step == 5
    assert [one.step for one in wherry.discover(place)] == [5]
    with pytest.raises(IncompleteError):
        wherry.convert(f"{place}/60", tmp_path / "never", to="orbax")


def _in_bucket_of(step: Path) -> None:
    file = step / "_CHECKPOINT_METADATA"
    file.write_text(json.dumps({"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": None}))


@needs_corpus
@pytest.mark.parametrize(
    ("case", "item"),
    [
        ("maxtext-llama31-l3-scan", "items"), ("t5x-orbax-ocdbt-head", "state"), ("t5x-orbax-zarr-2023", "state"),
        ("paxml-gpt3-l3-v11-gda-zarr", "state"), ("paxml-gpt3-l3-v12-gda-ocdbt", "state"),
        ("paxml-gpt3-l3-flax", "state"),
        ("penzai-llama-unroll-plain", ""), ("orbax-0110-flax-orbax", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["time", "item"])
def test_systems_that_save_through_orbax(tmp_path, case, item, damage):
    source = CORPUS / case / "checkpoint" / expected(case)["uri"]
    source = source.parent if source.name == item else source
    step = tmp_path / "run" / (source.name if any(part.isdigit() for part in source.name) else "7")
    shutil.copytree(source, step, copy_function=shutil.copyfile)
    for path in [step, *step.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert wherry.detect(step).verdict == "ok"
    if damage == "time":
        _in_bucket_of(step)
    elif item:
        (step / "other.orbax-checkpoint-tmp-3").mkdir()
    else:
        step = step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp-12"))
    assert wherry.detect(step).verdict == "incomplete"
    with pytest.raises(IncompleteError):
        wherry.convert(step, tmp_path / "never", to="safetensors")
