"""`wherry plan --workers`: units, what they require of workers, and their traffic."""

from __future__ import annotations

import json

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import command
from tests.support.families import LLAMA, SIZES, made
from tests.support.object_stores import small_parts
from tests.support.worker_pools import SeparatePool
from wherry import kernels
from wherry.converter.convert import convert_all
from wherry.converter.plan import plan_targets
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.errors import UsageError
from wherry.families import load_family
from wherry.store.remote_store import FsspecStore
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.unit import UNIT_BYTES, longest, most_of_file, parse_rate, plan_for_workers
from wherry.workers.work import carry_with_pool

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


# `wherry plan --workers`: egress and requests are those of the workers, which `cost` is computed from.


UNIT = 1_000_000
# Target format → its options. The second is made of a view, whose source is also read for its own digests.
CASES = {"hf": {"max_shard_size": "1MB"}, "maxtext": {"data_file_size": "1MB"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama of 8 MB."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    folder.mkdir()
    sizes = {**SIZES, "embed": 256, "ffn": 512, "layer": 4, "pair": 8, "vocab": 1000}  # heads of 16
    tensors = made(load_family("llama"), "huggingface", {}, sizes=sizes).tensors
    save_file({path[0]: array for path, array in tensors.items()}, folder / "model.safetensors")
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000,
              "head_dim": 16}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def place(model, tmp_path):
    """A folder of a store in memory, with the model."""
    fsspec.filesystem("memory").put(str(model), f"/bucket{tmp_path}/model", recursive=True)
    return f"memory://bucket{tmp_path}"


@pytest.fixture
def read(monkeypatch):
    """Bytes that were read, by the folder in which their files lie: `model` or `out`."""
    found = {"model": 0, "out": 0}
    real = FsspecStore.read

    def counted(self, path, start, stop):
        data = real(self, path, start, stop)
        found["model" if "/model/" in path else "out"] += len(data)
        return data

    monkeypatch.setattr(FsspecStore, "read", counted)
    return found


def requested(place, to, **more):
    targets = [TargetRequest(f"{place}/out", to, CASES[to])]
    return convert_request(f"{place}/model", targets, lineage=False, ignore=("companions",), **more)


def joined(plan):
    """Both lie in one bucket."""
    [one] = plan.traffic.stores
    return one


@pytest.mark.parametrize("to", CASES)
def test_the_egress_of_workers_is_what_they_read(place, read, to):
    plan, shared = plan_for_workers(requested(place, to), 4, UNIT)
    assert len(shared.units) > 3
    read.update(model=0, out=0)
    job = split(requested(place, to), UNIT)
    list(carry_with_pool(job, SeparatePool("abcd")))
    commit(job.uri)
    assert joined(plan).egress == pytest.approx(read["model"] + read["out"], rel=0.15)


def test_units_that_read_more_than_their_own_bytes_cost_more(place):
    """A leaf that ends in another unit is read by both, which a plan for one process does not say."""
    shared, _units = plan_for_workers(requested(place, "hf"), 4, UNIT)
    alone = plan_targets(requested(place, "hf"))[0]
    assert joined(shared).egress > joined(alone).egress
    assert joined(shared).reads > joined(alone).reads


@pytest.mark.parametrize("compiled", [True, False])
def test_the_source_of_a_view_is_read_for_its_own_digests_too_where_there_are_no_kernels(
    place, read, compiled, monkeypatch
):
    if not compiled:
        monkeypatch.setattr("wherry.kernels.load", lambda: None)
    elif kernels.load() is None:
        pytest.skip("no C compiler")
    plan = plan_targets(requested(place, "maxtext"))[0]
    read.update(model=0, out=0)
    convert_all(requested(place, "maxtext"))
    assert joined(plan).egress == pytest.approx((2 if compiled else 3) * plan.nbytes_in, rel=0.01)
    assert joined(plan).egress == pytest.approx(read["model"] + read["out"], rel=0.15)


def test_requests_count_the_records_of_workers(place):
    request = requested(place, "hf", verify="none")
    plan, shared = plan_for_workers(request, 4, UNIT)
    alone = plan_targets(request)[0]
    assert joined(plan).writes == joined(alone).writes + 2 * len(shared.units)
    assert shared.requests == sum((joined(plan).reads, joined(plan).writes, joined(plan).lists))
