"""Every system of a family to every other, without the corpus: what the target's own library finds is the model in the
target's layout, bit by bit, as our own index arithmetic lays it out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.libraries import held, loaded
from tests.support.model_files import MAKERS
from tests.support.model_systems import CONTENTS
from tests.support.stated import FACTS
from tests.support.systems import carry
from wherry.core.request import LayoutRequest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# What differs from another source by its files alone goes to one system.
ALIKE = {
    "huggingface-bin": "maxtext-scan",
    "meta-legacy": "huggingface",
    "paxml-1.0": "maxtext-scan",
    "paxml-0.0": "maxtext-unscan",
}
PAIRS = [
    (family, source, target)
    for family in MAKERS
    for source, target in itertools.product(MAKERS[family], CONTENTS[family])
    if ALIKE.get(source, target) == target
]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model as a system saves it, made once."""
    made = {}

    def saved(family, source):
        if (family, source) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{source}")
            made[family, source] = MAKERS[family][source](folder / "made")
        return made[family, source]

    return saved


def layout(family, source):
    """A bare file of torch does not say how its heads are divided: its params.json is named."""
    return LayoutRequest(
        family=family,
        config=str(source.parent / "params.json") if source.name == "consolidated.pth" else None,
    )


@pytest.mark.parametrize(("family", "source", "target"), PAIRS)
def test_every_system_to_every_other(family, source, target, model, tmp_path):
    name, form, contents = CONTENTS[family][target]
    system = source.partition("-")[0]
    stated = {"rope": "half"} if family == "llama" and "maxtext" in (name, system) else {}
    stated |= FACTS.get((family, system), {}) if name != system else {}
    begun = model(family, source)
    receipt = carry(begun, tmp_path / "out", name, options={**form, **stated}, layout=layout(family, begun))
    assert receipt.lossless
    found, wanted = loaded(name, tmp_path / "out"), held(contents())
    if source.startswith("t5x") and name.startswith("t5x"):
        wanted |= held({("state", "step"): np.asarray(7, np.int32)})
    assert found.keys() == wanted.keys()
    assert [path for path in wanted if found[path] != wanted[path]] == []
