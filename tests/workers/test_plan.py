"""`wherry plan --workers`: the units of every format that can be cut, and what they ask of workers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import command
from tests.support.object_stores import small_parts
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.errors import UsageError
from wherry.workers.estimate import longest, parse_rate, plan_for_workers
from wherry.workers.unit import UNIT_BYTES, most_of_file

MB = 1_000_000

BARE = LayoutRequest("none")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model.safetensors"
    rows = np.random.default_rng(0).random((12, 100_000), "f4")
    save_file({f"layer.{n}.w": row for n, row in enumerate(rows)}, path)
    return path


def planned(source, to, options, unit=MB, workers=4, **more):
    request = convert_request(
        source, [TargetRequest(str(source.parent / "out"), to, options, layout=BARE)], **more
    )
    return plan_for_workers(request, workers, unit, MB)


@pytest.mark.parametrize(
    ("to", "options"), [("hf", {"max_shard_size": "1MB"}), ("dcp", {"shard_size": "1MB"})]
)
def test_units_are_the_files_that_a_conversion_makes(source, tmp_path, to, options):
    plan, shared = planned(source, to, options)
    wherry.convert(source, tmp_path / "out", to=to, family="none", options=options, lineage=False)
    written = {
        path.name: path.stat().st_size
        for path in (tmp_path / "out").iterdir()
        if path.suffix in (".safetensors", ".distcp")
    }
    assert {file.name: file.nbytes for unit in shared.units for file in unit.files} == written
    assert len(shared.units) == len(written) > 3
    assert shared.whole == ""
    assert {unit.plan for unit in shared.units} == {plan.digest}


@pytest.mark.parametrize("to", ["safetensors", "npz", "torch-zip", "flax-msgpack"])
def test_a_format_of_one_file_has_regions_or_is_one_unit(source, tmp_path, to):
    _plan, shared = planned(source, to, {})
    size = wherry.convert(source, tmp_path / "out", to=to, lineage=False).target.nbytes
    assert len(shared.units) == 5
    assert {file.name for unit in shared.units for file in unit.files} == {"."}
    assert [unit.region.start for unit in shared.units] == [n * 15 * (64 << 10) for n in range(5)]
    assert shared.units[-1].region.stop == (tmp_path / "out").stat().st_size >= size
    assert (shared.workers, shared.whole, shared.large) == (4, "", "regions of one preallocated file")
    _plan, shared = planned(source, to, {}, unit=5 * MB)
    [unit] = shared.units
    assert unit.region is None
    assert (shared.workers, shared.whole, shared.large) == (1, f"{to} is one file", "")


@pytest.mark.parametrize(("options", "count"), [({"data_file_size": "1MB"}, 6), ({"ocdbt": False}, 12)])
def test_units_of_orbax_are_data_files_or_groups_of_chunk_files(source, tmp_path, options, count):
    _plan, shared = planned(source, "orbax", options)
    wherry.convert(source, tmp_path / "out", to="orbax", options=options, lineage=False)
    for file in (file for unit in shared.units for file in unit.files):
        assert (tmp_path / "out" / file.name).stat().st_size == file.nbytes
    assert sum(len(unit.files) for unit in shared.units) == count
    assert len(shared.units) == 6


def test_a_format_whose_bytes_have_no_known_places_has_no_units(source):
    _plan, shared = planned(source, "orbax", {"compression": "zstd"})
    assert shared.units == ()
    assert shared.whole == "the sizes of compressed chunks are not known before they are written"
    assert shared.seconds > 0


def test_time_is_that_of_the_busiest_worker(source):
    options = {"max_shard_size": "1MB"}
    alone, four = (planned(source, "hf", options, workers=count)[1] for count in (1, 4))
    assert alone.seconds == pytest.approx(2 * 4.8, rel=0.01)  # read or written at 1 MB/s, then read back
    assert four.seconds == pytest.approx(alone.seconds / len(four.units) * 2, rel=0.01)
    unproved = planned(source, "hf", options, workers=1, verify="none")[1]
    assert unproved.seconds == pytest.approx(alone.seconds / 2, rel=0.01)
    assert longest([3, 1, 1, 1], 2) == 3
    assert longest([1, 1, 1, 3], 2) == 4


def test_the_command_prints_units_and_workers(source):
    words = [
        "plan",
        str(source),
        str(source.parent / "out"),
        "--to",
        "hf",
        "--family",
        "none",
        "--set",
        "max_shard_size=1MB",
    ]
    text = command(*words, "--workers", "3", "--unit", "1MB", "--rate", "2MB/s").stdout
    assert "units:          6 units of 800.2 kB to 800.2 kB" in text
    assert "workers:        3, 2.0 MB/s each: 2 s" in text
    data = json.loads(command(*words, "--workers", "3", "--json").stdout)
    assert data["workers"]["workers"] == 1  # all files fit one unit of 1 GiB
    [unit] = data["workers"]["units"]
    assert unit["bytes_in"] == 4_800_000
    assert "workers" not in json.loads(command(*words, "--json").stdout)


def test_the_commands_say_how_a_large_file_is_made(source):
    words = [str(source), str(source.parent / "one.safetensors"), "--to", "safetensors", "--unit"]
    said = "large files:    regions of one preallocated file"
    assert said in command("plan", *words, "1MB", "--workers", "3").stdout
    assert (
        "one worker:     safetensors is one file" in command("plan", *words, "9MB", "--workers", "3").stdout
    )
    made = command("split", *words, "1MB")
    assert made.returncode == 0, made.stderr
    assert said in made.stdout
    data = json.loads(command("split", *words, "1MB", "--json").stdout)
    assert (data["one_worker"], data["large_files"]) == ("", "regions of one preallocated file")
    assert data["units"][1]["region"] == [983_040, 2 * 983_040]


def test_workers_read_back_regions_of_a_file_but_not_parts_of_an_upload(source):
    _plan, shared = planned(source, "safetensors", {})
    assert (len(shared.units), shared.commit_bytes) == (5, 0)
    request = convert_request(source, [TargetRequest("memory://bucket/out", "safetensors")])
    with small_parts(256 << 10):
        plan, objects = plan_for_workers(request, 4, MB, MB)
        _plan, whole = plan_for_workers(request, 4, 9 * MB, MB)
    assert plan.nbytes_out <= objects.commit_bytes < plan.nbytes_out + 10_000  # of the header too
    assert objects.seconds > 4.8 > shared.seconds  # the commit alone reads 4.8 MB at 1 MB/s
    assert (len(whole.units), whole.commit_bytes) == (1, 0)


def test_by_default_an_object_of_up_to_4_gib_is_whole():
    assert most_of_file(UNIT_BYTES, local=False) == 4 << 30
    assert most_of_file(512 << 20, local=False) == 512 << 20
    assert most_of_file(UNIT_BYTES, local=True) == UNIT_BYTES


def test_a_rate_is_a_size_a_second():
    assert parse_rate("400MB/s") == parse_rate("400MB") == 400 * MB
    with pytest.raises(UsageError, match="invalid rate 'fast'"):
        parse_rate("fast")
