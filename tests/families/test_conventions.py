"""Conventions, which no tensor shows: what is stated agrees with software, record and config, or is refused (9)."""

from __future__ import annotations

import shutil

import pytest

import wherry
from tests.support.command import command
from tests.support.oracles import judge
from wherry.core.request import LayoutRequest
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.families import families, load_family

pytest.importorskip("transformers")

# A model of each family whose MaxText has conventions, and of both layouts of rotary positions.
LABELS = {
    "llama": "llama", "llama-3.1": "llama", "llama-yarn": "llama", "phi3": "phi3", "granite": "granite",
    "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen", "qwen3-yarn": "qwen", "gemma": "gemma",
    "gemma2": "gemma2", "gemma4": "gemma4", "gemma4-experts": "gemma4", "llama4-maverick": "llama4",
}  # fmt: skip


def conventions(family):
    return [
        (system.name, name, one)
        for system in load_family(family).systems.values()
        for name, one in system.conventions.items()
    ]


def cases():
    for label, family in LABELS.items():
        for system, name, _one in conventions(family):
            yield pytest.param(label, family, system, name, id=f"{label}-{system}-{name}")


def plan(source, target, *, options=None, **layout):
    return wherry.plan(
        source, target, to="huggingface", options=options or {}, layout=LayoutRequest(**layout)
    )


def stated_otherwise(error, name, value, recorded, where):
    """The refusal names both values and the file, and its cure leaves the statement out."""
    assert error.exit_code == 9
    assert f"{name} = {value} is stated" in error.what
    assert f"{name} = {recorded}" in error.what
    assert where in error.what
    assert error.cure == f"leave --set {name}={value} out"


def test_each_family_with_conventions_has_a_model_here():
    assert {name for name in families() if conventions(name)} == set(LABELS.values())


@pytest.mark.parametrize(("label", "family", "system", "name"), list(cases()))
def test_a_choice_is_that_of_the_record_and_of_the_config(label, family, system, name, tmp_path):
    """Each choice that the system can hold is written; each other one that is stated later is refused."""
    one = load_family(family).system(system).conventions[name]
    written = []
    for choice in one.choices:
        target = tmp_path / choice
        try:
            wherry.convert(judge.source(label), target, to=system, options={name: choice}, lineage=False)
        except MismatchError as error:
            stated_otherwise(error, name, choice, one.always, f"{system} always")
            continue
        except UnrepresentableError:  # of this model MaxText computes only the other
            continue
        written.append(choice)
        for stated in one.choices:
            if stated == choice:
                plan(target, tmp_path / "again", options={name: stated})
                continue
            with pytest.raises(MismatchError) as caught:
                plan(target, tmp_path / "again", options={name: stated})
            where = "always" if one.always else "wherry.json"
            stated_otherwise(caught.value, name, stated, choice, where)
        plan(target, tmp_path / "again")  # which the cure says
        (target / "wherry.json").unlink()
        if not one.config and not one.always:
            continue
        plan(target, tmp_path / "again", options={name: choice})
        for stated in set(one.choices) - {choice}:
            with pytest.raises(MismatchError) as caught:
                plan(target, tmp_path / "again", options={name: stated})
            where = "always" if one.always else "maxtext_config.yml"
            stated_otherwise(caught.value, name, stated, choice, where)
    assert written


def test_a_config_that_contradicts_the_record_is_refused(tmp_path):
    wherry.convert(judge.source("llama"), tmp_path / "there", to="maxtext", lineage=False)
    file = tmp_path / "there/items/assets/maxtext_config.yml"
    other = tmp_path / "run.yml"
    other.write_text(
        file.read_text().replace('rope_type: "default"', "rope_type: llama3.1\nrope_use_scale: false")
    )
    with pytest.raises(MismatchError, match=r"run\.yml: rope is 'interleaved', but 'half' in the record"):
        plan(tmp_path / "there", tmp_path / "out", config=str(other))


def test_no_choice_is_taken_that_nobody_states(tmp_path):
    """Without a record and a config the user must state the choices; the cure names the models that have each."""
    wherry.convert(judge.source("mistral"), tmp_path / "there", to="maxtext", lineage=False)
    (tmp_path / "there/wherry.json").unlink()
    shutil.rmtree(tmp_path / "there/items/assets")
    with pytest.raises(UsageError, match="rotary positions") as caught:
        plan(tmp_path / "there", tmp_path / "out", family="mistral")
    assert "--set rope=half (Llama 2, 3 and 3.3, Mistral" in str(caught.value.cure)
    assert "--set rope=interleaved (Llama 3.1" in str(caught.value.cure)


@pytest.mark.parametrize(
    ("name", "rope"),
    [("llama2-7b", "half"), ("llama3-8b", "half"), ("llama3.1-8b", "interleaved"), ("llama3.3-70b", "half")],
)
def test_the_name_of_a_model_decides(name, rope, tmp_path):
    """MaxText 0.2.5, attentions.py: llama3.1 and what begins so turns neighbours; of the others, halves."""
    scaled = "llama-3.1" if rope == "interleaved" else "llama"
    wherry.convert(judge.source(scaled), tmp_path / "there", to="maxtext", lineage=False)
    (tmp_path / "there/wherry.json").unlink()
    file = tmp_path / "there/items/assets/maxtext_config.yml"
    lines = [
        line for line in file.read_text().splitlines() if not line.startswith(("rope_type", "rope_use_scale"))
    ]
    config = tmp_path / "run.yml"
    config.write_text("\n".join([*lines, f"model_name: {name}", "override_model_config: true"]))
    shutil.rmtree(tmp_path / "there/items/assets")
    found = plan(tmp_path / "there", tmp_path / "out", config=str(config))
    assert found.to_json()["layout"]["from"]["rope"] == rope
    assert any(f"rope = {rope}" in note and f"model_name = {name}" in note for note in found.notes)
    renamed = tmp_path / "renamed.yml"  # a file of configs/models under another name states no model
    renamed.write_text("\n".join(line for line in lines if not line.startswith("base_config")))
    with pytest.raises(UsageError, match="does not state model_name"):
        plan(tmp_path / "there", tmp_path / "out", config=str(renamed))
    found = plan(tmp_path / "there", tmp_path / "out", config=str(renamed.rename(tmp_path / f"{name}.yml")))
    assert found.to_json()["layout"]["from"]["rope"] == rope


def test_a_choice_that_models_of_such_facts_do_not_have_is_named(tmp_path):
    """MaxText can turn neighbours without scaling, if rope_type is llama3.1 and rope_use_scale is false."""
    wherry.convert(judge.source("llama"), tmp_path / "there", to="maxtext", lineage=False)
    (tmp_path / "there/wherry.json").unlink()
    shutil.rmtree(tmp_path / "there/items/assets")
    facts = {"rope_scaling": "default", "rope_theta": 10000, "norm_eps": 1e-6, "activation": "silu"}
    for rope in ("half", "interleaved"):
        found = plan(tmp_path / "there", tmp_path / "out", options={**facts, "rope": rope}, family="llama")
        named = any(note.startswith("rope = interleaved as stated, instead of half") for note in found.notes)
        assert named is (rope == "interleaved")


def test_the_command_line_refuses_with_9(tmp_path):
    wherry.convert(judge.source("llama"), tmp_path / "there", to="maxtext", lineage=False)
    done = command(
        "convert", tmp_path / "there", tmp_path / "out", "--to", "huggingface", "--set", "rope=interleaved"
    )
    assert done.returncode == 9, done.stderr
    assert "wherry.json" in done.stderr
    assert "cure: leave --set rope=interleaved out" in done.stderr
    assert not (tmp_path / "out").exists()
