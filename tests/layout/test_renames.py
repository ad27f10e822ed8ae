"""Rules, forms, scans and axis names: there and back is the identity; whatever cannot be undone is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import wherry
from tests.support.orbax import manifest_of, write
from wherry.core.keypath import parse
from wherry.core.manifest import Manifest, from_json
from wherry.core.tensorspec import Sharding, TensorSpec
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.formats.registry import find_format
from wherry.integrations.containers.orbax import partitioning
from wherry.layout.axes import mesh_axes, name_axes, rules_of, settle_options
from wherry.layout.forms import Leaves, respell
from wherry.layout.mapping import map_tree
from wherry.layout.renames import inverse_rules, parse_rules, rename_paths
from wherry.layout.spelling import NAMES, kept_lists, renaming_of

PART = st.text(st.sampled_from("ab01._~/{}* ->é"), max_size=6)
PATH = st.lists(PART, min_size=1, max_size=4).map(tuple)
NAME = st.text(st.sampled_from("abxyz"), min_size=1, max_size=4)
DEEP = st.lists(NAME, min_size=1, max_size=4).map(tuple)


def leaves(paths, others=(), named=()):
    return Leaves(frozenset(map(parse, paths)), frozenset(map(parse, others)), frozenset(map(parse, named)))


def one(rule, path):
    found = rename_paths([parse(path)], parse_rules([rule]))
    return "/".join(found[parse(path)])


@pytest.mark.parametrize(
    ("rule", "path", "wanted"),
    [
        ("layers.{n}.w -> blocks/{n}/kernel", "layers.12.w", "blocks/12/kernel"),
        ("blocks/{n}/kernel -> layers.{n}.w", "blocks/12/kernel", "layers.12.w"),
        ("model/{rest*} -> params/{rest*}", "model/a/b.c", "params/a/b.c"),
        ("{a}/{b} -> {b}/{a}", "x/y", "y/x"),
        ("a{{b}} -> c", "a{b}", "c"),
        ("a~1b -> c~0d", "a~1b", "c~d"),
        ("{n}_{m} -> {m}/{n}", "x_y", "y/x"),
        ("a.{rest*}.w -> a/{rest*}/w", "a.b.c.w", "a/b.c/w"),
    ],
)
def test_a_rule(rule, path, wanted):
    assert one(rule, path) == wanted
    (parsed,) = parse_rules([rule])
    assert parsed.inverse.apply(parsed.apply(parse(path))) == parse(path)


@pytest.mark.parametrize(
    "rule",
    ["a", "a ->", "-> b", "a -> b -> c", "{n} -> b", "a -> {n}", "{n}{m} -> {m}/{n}", "{n -> {n", "a} -> b",
     "{n}/{n} -> {n}/{n}", "{n} -> {n*}", "{1} -> {1}", "{} -> {}"],
)  # fmt: skip
def test_what_is_no_rule(rule):
    with pytest.raises(UsageError):
        parse_rules([rule])


def test_pieces_end_at_dots_and_slashes():
    with pytest.raises(UsageError, match="matches no remaining key path"):
        one("layers.{n}.w -> blocks/{n}", "layers.0.sub.w")
    with pytest.raises(UsageError, match="matches no remaining key path"):
        one("{n} -> x/{n}", "a/b")
    with pytest.raises(UsageError, match="matches no remaining key path"):
        one("a{n} -> x{n}", "a")


def test_two_readings_are_refused():
    with pytest.raises(UsageError, match="two ways"):
        one("{a}_{b} -> {b}/{a}", "x_y_z")
    with pytest.raises(UsageError, match="two ways"):
        one("{a*}/{b*} -> {b*}/{a*}", "x/y/z")
    with pytest.raises(UsageError, match="exceeds the limit"):
        one("{a*}x{b*} -> {b*}x{a*}", "x" * 5000)


def test_the_first_rule_counts_and_every_rule_must():
    paths = [("a", "w"), ("a", "b"), ("c",)]
    rules = parse_rules(["a/w -> x", "a/{n} -> y/{n}"])
    assert rename_paths(paths, rules) == {("a", "w"): ("x",), ("a", "b"): ("y", "b"), ("c",): ("c",)}
    with pytest.raises(UsageError, match="a/w -> x"):
        rename_paths(paths, tuple(reversed(rules)))


def test_the_inverse_is_given_only_where_it_is_one():
    rules = parse_rules(["layers.{n}.w -> blocks/{n}/w"])
    names = rename_paths([("layers.0.w",), ("other",)], rules)
    assert inverse_rules(names, rules) == ("blocks/{n}/w -> layers.{n}.w",)
    names = rename_paths([("layers.0.w",), ("blocks", "x", "w")], rules)
    assert inverse_rules(names, rules) is None


@settings(max_examples=300, deadline=None)
@given(st.sets(PATH, min_size=1, max_size=6), st.data())
def test_rules_and_their_record_are_undone(paths, data):
    first = data.draw(st.sampled_from(sorted(paths)))
    literal = "/".join(
        (part.replace("~", "~0").replace("/", "~1").replace("{", "{{").replace("}", "}}") or "~2")
        for part in first
    )
    rules = [f"{literal} -> new/{literal}"] if "->" not in literal else []
    rules += ["{a*}é{b*} -> {b*}/{a*}"] if data.draw(st.booleans()) else []
    try:
        parsed = parse_rules(rules)
        names = rename_paths(paths, parsed)
    except UsageError:
        return
    for old, new in names.items():
        rule = next((rule for rule in parsed if rule.apply(old) is not None), None)
        assert new == (rule.apply(old) if rule else old)
        if rule:
            assert unambiguous(rule.inverse, new) in (old, None)


def unambiguous(rule, path):
    """What a rule makes of a path; None where it can be read in two ways, which is refused."""
    try:
        return rule.apply(path)
    except UsageError:
        return None


FORMS = [
    ({"boxed": "false"}, {"boxed": "true"}),
    ({"nnx": "none"}, {"nnx": "value"}),
    ({"nnx": "raw_value"}, {"nnx": "value"}),
    ({"unnest": "params,stats"}, {"nest": "stats:*mean*;params:*"}),
    ({"unnest": "params,stats", "nnx": "none"}, {"nest": "stats:*mean*;params:*", "nnx": "value"}),
    ({"rename": ["params/{rest*} -> model/{rest*}"]}, {"rename": ["model/{rest*} -> params/{rest*}"]}),
]


@settings(max_examples=200, deadline=None)
@given(st.sets(DEEP, min_size=1, max_size=8), st.sampled_from(FORMS))
def test_a_form_and_its_opposite(nodes, pair):
    """A tree of wrapped arrays in collections, respelled and spelled back."""
    roots = {
        path for path in nodes if not any(other != path and path[: len(other)] == other for other in nodes)
    }
    tree = {("params", *path, "value") for path in roots} | {("stats", "mean", "value")}
    named = frozenset(tree if "boxed" in pair[0] else ())
    there = respell(Leaves(frozenset(tree), named=named), pair[0])
    assert len(set(there.values())) == len(tree)
    after = Leaves(frozenset(there.values()), named=frozenset(there[path] for path in named))
    back = respell(after, pair[1])
    assert {old: back[new] for old, new in there.items()} == {path: path for path in tree}


def test_mixed_boxes():
    tree = leaves(
        ["params/wi/kernel/value", "params/norm/scale", "params/mixed/value", "params/mixed/other",
         "params/attention/value/kernel/value"],
        named=["params/wi/kernel/value", "params/attention/value/kernel/value"],
    )  # fmt: skip
    there = respell(tree, {"boxed": "false"})
    assert {"/".join(new) for new in there.values()} == {
        "params/wi/kernel", "params/norm/scale", "params/mixed/value", "params/mixed/other",
        "params/attention/value/kernel",
    }  # fmt: skip
    by_pattern = respell(leaves(["params/wi/kernel", "params/norm/scale"]), {"boxed": "params/*/kernel"})
    assert by_pattern[parse("params/wi/kernel")] == parse("params/wi/kernel/value")


@pytest.mark.parametrize(
    ("paths", "options", "error", "words"),
    [
        (["params/w"], {"boxed": "false"}, UsageError, "changes nothing"),
        (["params/w"], {"boxed": "true"}, UsageError, "axis names"),
        (["params/w"], {"boxed": "params/q"}, UsageError, "matches no array"),
        (["params/w"], {"nnx": "none"}, UsageError, "changes nothing"),
        (["w/value"], {"nnx": "value"}, UsageError, "changes nothing"),
        (["w"], {"nnx": "what"}, UsageError, "invalid value for option nnx"),
        (["params/w", "step"], {"unnest": "params"}, UnrepresentableError, "step"),
        (["params/w"], {"unnest": "stats"}, UsageError, "collection not found: stats"),
        (["params/w", "stats/w"], {"unnest": "params,stats"}, UnrepresentableError, "key collision"),
        (["a", "b"], {"nest": "params:a"}, UnrepresentableError, "b"),
        (["a"], {"nest": "params:*;stats:*"}, UsageError, "stats"),
        (["a", "b"], {"rename": ["a -> b"]}, UnrepresentableError, "key collision"),
        (["a"], {"rename": ["b -> c"]}, UsageError, "matches no remaining key path"),
    ],
)
def test_what_a_form_refuses(paths, options, error, words):
    with pytest.raises(error, match=words):
        respell(leaves(paths), options)


def test_lists_follow_their_items():
    names = {
        ("opt", "0", "mu", "w"): ("state", "0", "mu", "w", "value"),
        ("opt", "1", "count"): ("state", "1", "count"),
        ("blocks", "0"): ("block_0",),
        ("blocks", "1"): ("block_1",),
    }
    assert kept_lists([("opt",), ("blocks",)], names) == (frozenset({("state",)}), (("blocks",),))


def source():
    arrays = {("model", f"layers.{n}.w"): np.full((2, 3), n, np.float32) for n in range(3)}
    return {**arrays, ("model", "norm"): np.ones(3, np.float32), ("step",): np.int32(4).reshape(())}


RULES = ["model/layers.{n}.w -> params/blocks/{n}/kernel", "model/norm -> params/norm"]


def test_the_mapping_records_what_it_renamed():
    row = find_format("npz")
    manifest = manifest_of(source())
    mapped = map_tree(manifest, row, {}, only=None, ignore=(), uri="x", renames=RULES)
    record = mapped.manifest.origin[NAMES]
    assert record["inverse"] == [
        "params/blocks/{n}/kernel -> model/layers.{n}.w",
        "params/norm -> model/norm",
    ]
    assert record["requested"] == {"rename": RULES}
    rename = renaming_of(mapped.manifest, {})
    assert {rename(path): path for path in manifest.tensors} == dict(mapped.pairs)
    again = map_tree(mapped.manifest, row, {}, only=None, ignore=(), uri="x", renames=record["inverse"])
    assert set(again.pairs) == set(manifest.tensors)
    as_option = map_tree(manifest, row, {"rename": ";".join(RULES)}, only=None, ignore=(), uri="x")
    assert as_option.pairs == mapped.pairs
    joined = map_tree(manifest, row, {"rename": RULES, "join": "."}, only=None, ignore=(), uri="x")
    assert ("params.blocks.2.kernel",) in joined.pairs
    split = map_tree(
        joined.manifest, row, {"rename": ["step -> s"], "split": "."}, only=None, ignore=(), uri="x"
    )
    assert ("params", "blocks", "2", "kernel") in split.pairs
    with pytest.raises(UnrepresentableError, match="step would be both a tensor and the parent of step/x"):
        map_tree(manifest, row, {"rename": "model/norm -> step/x"}, only=None, ignore=(), uri="x")


def test_a_renamed_conversion_is_proved_and_undone(tmp_path):
    write(tmp_path / "a", source(), manifest_of(source()))
    there = {"rename": ";".join(RULES)}
    wherry.convert(tmp_path / "a", tmp_path / "b", to="orbax", options=there, lineage=False)
    assert wherry.verify(tmp_path / "b", against=tmp_path / "a").ok
    with wherry.open(tmp_path / "b") as checkpoint:
        assert ("params", "blocks", "1", "kernel") in checkpoint.manifest.tensors
    back = {"rename": "params/blocks/{n}/kernel -> model/layers.{n}.w; params/norm -> model/norm"}
    wherry.convert(tmp_path / "b", tmp_path / "c", to="orbax", options=back, lineage=False)
    with wherry.open(tmp_path / "c") as checkpoint:
        for path, array in source().items():
            np.testing.assert_array_equal(checkpoint.read(path), array)
    assert wherry.verify(tmp_path / "c", against=tmp_path / "b").ok


def test_what_is_left_behind_needs_no_place():
    row = find_format("npz")
    arrays = {("params", "lin", "kernel"): np.ones(2, "f4"), ("opt_state", "mu"): np.ones(2, "f4")}
    manifest = manifest_of(arrays, values={("step",): 3})
    options = {"unnest": "params", "nnx": "value"}
    mapped = map_tree(manifest, row, options, only="params", ignore=(), uri="x")
    assert dict(mapped.pairs) == {("lin", "kernel", "value"): ("params", "lin", "kernel")}
    assert {one.path for one in mapped.ignored} == {("opt_state", "mu"), ("step",)}
    with pytest.raises(UnrepresentableError, match="opt_state"):
        map_tree(manifest, row, options, only=None, ignore=("values",), uri="x")


# Names and rules that a user states mean what they mean in Flax, are kept, and contradict nothing.


RULES_OF_NAMES = (("embed", "data"), ("mlp", "model"), ("layers", None))


NAME_OF_NAMES = st.sampled_from(["embed", "mlp", "layers", "heads", None])
MESH = st.sampled_from(["data", "model", "fsdp", None, ("data", "model"), ("fsdp", "x")])


@settings(max_examples=300, deadline=None)
@given(st.lists(NAME_OF_NAMES, max_size=5), st.lists(st.tuples(NAME_OF_NAMES.filter(bool), MESH), max_size=6))
def test_rules_mean_what_they_mean_in_flax(axes, rules):
    names = [name for name in axes if name]
    if len(set(names)) < len(names):
        with pytest.raises(UsageError, match="duplicate axis name"):
            mesh_axes(axes, tuple(rules))
        return
    assert PartitionSpec(*mesh_axes(axes, tuple(rules))) == nn.logical_to_mesh_axes(tuple(axes), tuple(rules))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b/c", "b/d", "e/value/f"]),
                       st.lists(NAME_OF_NAMES, max_size=3), min_size=1),
       st.sampled_from(["Partitioned", "LogicallyPartitioned"]), st.booleans())  # fmt: skip
def test_kept_names_are_read_back(rows, box, ruled):
    sharding = Sharding(spec=("data",), rules=RULES_OF_NAMES) if ruled else None
    specs = [
        TensorSpec(
            (*key.split("/"), "value"),
            (2,) * len(axes),
            "float32",
            axes=tuple(axes),
            sharding=sharding,
            tags={"box": box},
        )
        for key, axes in rows.items()
    ]
    manifest = Manifest({spec.path: spec for spec in specs})
    assert from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    bare = {
        path: replace(spec, axes=None, sharding=None, tags=None) for path, spec in manifest.tensors.items()
    }
    item = json.loads(json.dumps(partitioning.item_metadata(manifest)))
    found, _seen = partitioning.with_names(replace(manifest, tensors=bare, custom={"item": item}))
    assert found.tensors == manifest.tensors
    assert partitioning.item_metadata(found) == item


def test_what_a_file_of_names_refuses(tmp_path):
    spec = TensorSpec(("params", "w"), (2, 3), "float32")
    manifest = Manifest({spec.path: spec})
    file = tmp_path / "axes.toml"

    def given_(text, spec=spec, **options):
        file.write_text(text)
        return name_axes(
            replace(manifest, tensors={spec.path: spec}), {"axes": str(file), **options}
        ).tensors[spec.path]

    assert given_('[axes]\n"*/w" = ["embed", ""]').axes == ("embed", None)
    found = given_('rules = [["embed", ["data", "fsdp"]]]\n[axes]\n"*/w" = ["embed", "mlp"]')
    assert found.sharding == Sharding(spec=(("data", "fsdp"), None), rules=(("embed", ("data", "fsdp")),))
    for text, error, words in (
        ('[axes]\n"*/q" = ["embed"]', UsageError, "matches no remaining tensor"),
        ('[axes]\n"*/w" = ["embed"]', MismatchError, "expected 2 axis names, got 1"),
        ('[axes]\n"*/w" = "embed"', UsageError, "table of lists"),
        ('[axes]\n"*/w" = [1, 2]', UsageError, "invalid axis name 1"),
        ('[boxes]\n"*/w" = "Box"', UsageError, "table of classes"),
        ("[other]", UsageError, "other"),
        ("[", UsageError, "cannot read"),
        ('rules = [["embed", "data"]]', UsageError, "no tensor has any"),
        ('rules = "x"', UsageError, "rules"),
    ):
        with pytest.raises(error, match=words):
            given_(text)
    with pytest.raises(MismatchError, match="axis names differ"):
        given_('[axes]\n"*/w" = ["embed", "mlp"]', replace(spec, axes=("mlp", "embed")))
    with pytest.raises(UsageError, match="duplicate axis name"):
        given_('[axes]\n"*/w" = ["embed", "embed"]', rules="embed:data")
    with pytest.raises(UsageError):
        rules_of("embed=data")
    assert rules_of("a:b+c,d:-") == (("a", ("b", "c")), ("d", None)) == rules_of({"a": ["b", "c"], "d": None})
    file.write_text('[axes]\n"*/w" = ["embed", "mlp"]')
    assert settle_options({"axes": str(file), "rules": "a:b", "boxed": "true"}) == {
        "axes": {"axes": {"*/w": ["embed", "mlp"]}}, "rules": [["a", "b"]], "boxed": "true",
    }  # fmt: skip
