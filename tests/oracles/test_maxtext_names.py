"""MaxText's own list of models, as the installed 0.2.5 has it, against the tables by which wherry names them."""

from __future__ import annotations

import json
import subprocess
import tomllib

import pytest

from tests.support.generations import ROOT, old_python
from wherry.transform.overview import models_without_layouts

pytestmark = pytest.mark.slow

_TABLE = ROOT / "wherry" / "families" / "tables" / "maxtext_models.toml"
# Words of the list that are no models of their own: an instruct model has the file of the model without the word.
DEFAULT, INSTRUCT = "default", "-Instruct"
SCRIPT = """
import importlib.util, json, pathlib, typing, yaml
from maxtext.configs.types import ModelName
folder = pathlib.Path(importlib.util.find_spec("maxtext").origin).parent / "configs" / "models"
files = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
print(json.dumps({"names": typing.get_args(ModelName), "files": files}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The list of names, and the attributes of each file, as the library itself has them."""
    run = subprocess.run(
        [str(old_python("maxtext")), "-c", SCRIPT], capture_output=True, text=True, check=False,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}, cwd=tmp_path_factory.mktemp("run"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def rows():
    """Decoder block → model → attributes, as wherry's table has them."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def test_every_name_of_the_list_stands_in_a_table(library, rows):
    known = {name for models in rows.values() for name in models} | set(models_without_layouts())
    names = {name.removesuffix(INSTRUCT) for name in library["names"]} - {DEFAULT}
    assert names | set(library["files"]) == known


def test_the_table_states_what_the_files_state(library, rows):
    models = [(name, block, values) for block, row in rows.items() for name, values in row.items()]
    assert {name for name, _block, _values in models} == set(library["files"])
    for name, block, values in models:
        file = library["files"][name]
        assert file.get("decoder_block", "llama2") == block, name
        assert {key: plain(file.get(key)) for key in values} == values, name


def plain(value):
    """YAML 1.1 reads 1e-6 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
