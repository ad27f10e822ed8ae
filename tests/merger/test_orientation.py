"""The tables of orientations say what the classes of the installed transformers are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import wherry

TABLE = tomllib.loads((Path(wherry.__file__).parent / "merger" / "orientations.toml").read_text())
CONV = re.compile(r"self\.(\w+) = Conv1D\(")


@pytest.fixture(scope="module")
def models():
    transformers = pytest.importorskip("transformers")
    return {
        file: file.read_text() for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    }


def test_the_known_model_types_are_those_of_transformers():
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    assert set(TABLE["known"]) == set(auto.CONFIG_MAPPING_NAMES)


def test_every_conv1d_of_transformers_is_in_the_table(models):
    folders = {"openai": {"openai-gpt"}, "clvp": {"clvp", "clvp_decoder"}}
    found = {file.parent.name: set(CONV.findall(text)) for file, text in models.items() if CONV.search(text)}
    for folder, names in found.items():
        for kind in folders.get(folder, {folder}):
            assert set(TABLE["inputs_first"][kind]) == names
    transposed = {
        file.parent.name for file, text in models.items() if re.search(r"is_transposed=True[,)]", text)
    }
    kinds = {kind for folder in (*found, *transposed) for kind in folders.get(folder, {folder})}
    assert set(TABLE["inputs_first"]) - {"aria_text"} == kinds
