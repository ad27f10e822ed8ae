"""A user states the numbers of special tokens, which no checkpoint of T5X has, for a config of transformers."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.command import typed
from tests.support.corpus import place

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def source():
    return place("t5x-orbax-ocdbt-head")


def convert(source, tmp_path, capfd, *settings):
    line = f"convert {source} HOME/hf --to huggingface --family t5 --only params"
    return typed(" ".join([line, *(f"--set '{one}'" for one in settings)]), tmp_path, capfd)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), (0, 0, 1)),
        (("decoder_start_token_id=5", "pad_token_id=4", "eos_token_id=3"), (5, 4, 3)),
        (("eos_token_id=[3, 7]",), (0, 0, [3, 7])),
    ],
)
def test_stated_token_ids_are_in_the_config(source, tmp_path, capfd, settings, expected):
    code, text = convert(source, tmp_path, capfd, *settings)
    assert code == 0, text
    config = json.loads((tmp_path / "hf/config.json").read_text())
    names = ("decoder_start_token_id", "pad_token_id", "eos_token_id")
    assert tuple(config[name] for name in names) == expected
    unstated = [name for name in names if not any(one.startswith(name) for one in settings)]
    assert all(f"{name} = {config[name]!r}" in text for name in unstated), (
        "the defaults are named, and not masked"
    )
    assert "***" not in text


def test_transformers_reads_them(source, tmp_path, capfd):
    transformers = pytest.importorskip("transformers")
    convert(source, tmp_path, capfd, "eos_token_id=3", "bos_token_id=6")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.eos_token_id, config.bos_token_id) == (3, 6)


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "[1,x]", "99999999"])
def test_what_is_no_token_is_refused(source, tmp_path, capfd, value):
    code, text = convert(source, tmp_path, capfd, f"eos_token_id={value}")
    assert code == 2, text
    assert "eos_token_id" in text
    assert not (tmp_path / "hf").exists()


def test_a_target_without_token_ids_does_not_take_them(source, tmp_path, capfd):
    code, text = typed(
        f"convert {source} HOME/x --to orbax --only params --set eos_token_id=1", tmp_path, capfd
    )
    assert code == 2, text
    assert "unknown option 'eos_token_id'" in text
