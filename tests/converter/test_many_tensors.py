"""A checkpoint of very many tensors is detected and planned in time and memory that grow with their number only."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.large import measured
from tests.support.many import calls, calls_of_threads, deepseek, peak_of, seconds
from wherry.core.request import LayoutRequest

FEW, MANY = (
    2400,
    4800,
)  # more than a batch has, and than a record is indented for: only the tensors make the difference
LAYERS, EXPERTS = 5, 24  # few of each; five times the layers, files and, nearly, tensors are many


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small model and one of five times as many tensors in five times as many files, both as published."""
    folder = tmp_path_factory.mktemp("models")
    few = deepseek(folder / "few", LAYERS, EXPERTS, 4)
    many = deepseek(folder / "many", 5 * LAYERS, EXPERTS, 20)
    assert 5 * few < many < 6.5 * few
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same in a floating-point type, which layouts take."""
    folder = tmp_path_factory.mktemp("plain")
    deepseek(folder / "few", LAYERS, EXPERTS, 4, quantised=False)
    deepseek(folder / "many", 5 * LAYERS, EXPERTS, 20, quantised=False)
    return folder


def planned(source, **options):
    """The number of calls of a plan and of its JSON; the caches are filled before."""
    target = source.parent / "new"

    def act():
        wherry.plan(source, target, **options).to_json()

    act()
    return calls(act)


def test_detection_grows_with_the_tensors(models):
    few, many = (seconds(lambda name=name: wherry.detect(models / name)) for name in ("few", "many"))
    assert many < 10 * few


@pytest.mark.parametrize("to", ["huggingface", "dcp", "orbax", "torch-zip"])
def test_a_plan_grows_with_the_tensors(models, to):
    few, many = (planned(models / name, to=to) for name in ("few", "many"))
    assert many < 7.5 * few


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("maxtext", {}),
        ("maxtext", {"options": {"scan_layers": "false"}}),
        ("huggingface", {"layout": LayoutRequest(dtype="float32")}),
    ],
    ids=["stacked", "unrolled", "cast"],
)
def test_a_plan_through_a_layout_grows_with_the_tensors(plain, to, options):
    """Also where thousands of tensors of one parameter become thousands again."""
    few, many = (planned(plain / name, to=to, **options) for name in ("few", "many"))
    assert many < 7.5 * few


@pytest.fixture
def converted(tmp_path):
    """Converts a number of tensors of a few bytes to DCP; each number once before it counts, for what is cached."""

    def act(number, verify):
        source, target = tmp_path / f"{number}.safetensors", tmp_path / f"{number}-{next(tries)}"
        if not source.exists():
            save_file({f"layers.{at}.weight": np.full((4, 4), at, "f4") for at in range(number)}, source)
        wherry.convert(source, target, to="dcp", verify=verify, lineage=False)

    tries = count()
    for number in FEW, MANY:
        act(number, "digest")
    return act


@pytest.mark.full
@pytest.mark.parametrize(("verify", "most"), [("digest", 170), ("none", 140)])
def test_a_small_tensor_takes_few_calls(converted, verify, most):
    """Of functions in Python, on any machine. It is 164 and 138; it was 240 and 205."""
    few, many = (calls_of_threads(lambda number=number: converted(number, verify)) for number in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < most


@pytest.mark.full
def test_a_small_tensor_takes_little_memory(converted):
    """In bytes, at the worst moment. It is 850."""
    few, many = (peak_of(lambda number=number: converted(number, "digest")) for number in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < 1200


@pytest.mark.slow
@pytest.mark.parametrize("to", ["orbax", "dcp", "huggingface"])
def test_ninety_thousand_tensors(tmp_path, to):
    """The size of DeepSeek-V3: detected within 3 s of processor time, planned within 8 s and 200 MB; twice as slack."""
    tensors = deepseek(tmp_path / "model", 61, 252, 126)
    assert tensors > 90_000
    code = """
import time, wherry
began = time.process_time()
wherry.detect(sys.argv[1])
detected = time.process_time() - began
wherry.plan(sys.argv[1], sys.argv[2], to=sys.argv[3]).to_json()
result = [detected, time.process_time() - began - detected]
"""
    (detected, made), peak = measured(code, tmp_path / "model", tmp_path / "new", to)
    assert detected < 6
    assert made < 16
    assert peak < 250 << 20
