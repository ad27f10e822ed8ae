"""infra/giants.py: checkpoints that are only metadata, and that `wherry plan` takes for whole ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import wherry

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "giants.py"


def loaded():
    spec = importlib.util.spec_from_file_location("giants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["giants"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


giants = loaded()
TINY = {
    **giants.LLAMA_405B, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip


def test_a_giant_takes_no_room_and_is_planned_as_a_whole_one(tmp_path):
    folder = giants.hugging_face(tmp_path / "hf", TINY, giants.llama(TINY))
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in files) > 10_000_000_000
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 2_000_000
    one = giants.plan_giant(giants.Giant("a Llama", folder, ("--to", "dcp")))
    assert one.plan["bytes_out"] == wherry.open(folder).manifest.nbytes > 10_000_000_000
    assert len(one.plan["workers"]["units"]) > 5
    assert one.plan["parameters"]["agrees"]
    assert one.memory < 300_000_000
    assert giants.row(one).startswith("| a Llama | 435 | ")


def test_a_scanned_giant_is_made_from_the_plan_of_its_conversion(tmp_path):
    folder = giants.hugging_face(tmp_path / "hf", TINY, giants.llama(TINY))
    step = giants.maxtext(tmp_path / "maxtext" / "0", folder)
    assert wherry.verify(step, level="present").ok
    with wherry.open(step) as found, wherry.open(folder) as origin:
        assert found.manifest.nbytes == origin.manifest.nbytes + 4  # the step


def test_the_giant_of_paxml_is_a_checkpoint_of_two_terabytes(tmp_path):
    step = giants.paxml_gpt3(tmp_path / "gpt3")
    assert wherry.detect(step).format == "paxml"
    with wherry.open(step) as found:
        assert found.manifest.nbytes > 2_000_000_000_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_giant_with_the_most_chunks_is_planned_in_the_seconds_and_the_memory_of_the_goal(tmp_path):
    step = giants.paxml_gpt3(tmp_path / "gpt3")
    one = giants.plan_giant(giants.Giant("GPT-3 175B", step, ("--to", "maxtext")), tmp_path)
    print(f"{one.seconds:.1f} s of a processor, {one.memory / 1e6:.0f} MB")
    assert len(one.plan["workers"]["units"]) > 2_000_000_000_000 >> 30  # of a gibibyte each
    assert one.seconds <= 20
    assert one.memory <= 300_000_000


def test_the_table_of_the_docs_has_a_row_for_each_giant():
    text = giants.DOCS.read_text()
    for title in ("Llama 405B", "DeepSeek-V3", "1 T parameters", "GPT-3 175B"):
        assert f"| {title}" in text
    assert giants.HEAD in text
