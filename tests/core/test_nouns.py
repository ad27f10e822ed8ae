"""Small nouns of the engine: errors, manifests, key paths, sizes, steps, locations."""

from __future__ import annotations

import errno
import inspect
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import wherry
from wherry import errors
from wherry.core import manifest, units
from wherry.core.detection import Detection
from wherry.core.keypath import joined_names, parse, render
from wherry.core.manifest import Companion, Manifest
from wherry.core.request import TargetRequest, convert_request
from wherry.core.steps import LARGEST_STEP, step_number, steps_among
from wherry.core.tensorspec import Sharding, TensorSpec
from wherry.errors import (
    CorruptError,
    HostileError,
    UnrepresentableError,
    UsageError,
    WherryError,
    storage_error,
)
from wherry.ledger.record import check_chain, open_ledger
from wherry.store.local_store import locate

TREE = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, WherryError)]

# class → exit code, as docs/reference/exit-codes.md lists them.
CODES = {
    "UsageError": 2, "NotFoundError": 3, "NotACheckpointError": 4, "UnsupportedError": 4, "CrowdedFolderError": 4,
    "AmbiguousError": 4,
    "DamagedError": 5, "IncompleteError": 5, "CorruptError": 5, "HostileError": 6, "UnrepresentableError": 7,
    "TargetExistsError": 8, "TargetInUseError": 8, "MismatchError": 9, "StorageError": 10, "MissingExtraError": 11,
    "NotRecordedError": 12, "InternalError": 70,
    "InterruptedRunError": 130, "WherryError": 1,
}  # fmt: skip


def test_the_tree_has_the_documented_exit_codes():
    assert {cls.__name__: cls.exit_code for cls in TREE} == CODES


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_every_error_is_in_the_drawing_and_says_what_where_and_the_cure(cls):
    assert cls.__name__ in errors.__doc__
    text = str(cls("it broke", uri="u://x", path="a/b", cure="mend it"))
    assert text == "it broke (u://x, tensor a/b)\ncure: mend it"
    assert cls("x").to_json()["exit_code"] == cls.exit_code


def test_built_in_parents():
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.NotFoundError, LookupError)
    assert issubclass(errors.StorageError, OSError)
    assert issubclass(errors.MissingExtraError, ImportError)


@pytest.mark.parametrize(
    ("code", "retryable"), [(errno.ENOSPC, False), (errno.EROFS, False), (errno.ETIMEDOUT, True)]
)
def test_storage_errors_say_whether_a_retry_helps(code, retryable):
    error = storage_error(OSError(code, "reason"), "x")
    assert error.retryable is retryable
    assert error.cure


def test_manifest_survives_its_json_form():
    full = Manifest(
        tensors={
            ("a/b", ""): TensorSpec(
                ("a/b", ""), (2, 3), "bfloat16", (1, 3), ("layer", None),
                Sharding((("data", 2),), ("data", ("x", "y"), None), (("embed", None),)), {"prng": "threefry2x32"},
            )
        },
        values={("s",): "text"}, empties={("e",): "list"}, lists=frozenset({("e",)}), step=7, kind="params",
        companions=(Companion("config.json", 2, "ff"),), custom={"k": [1]}, origin={"commit": "c"},
        digests={("a/b", ""): f"blake3:{64 * '0'}"},
    )  # fmt: skip
    assert manifest.from_json(full.to_json()) == full


@pytest.mark.parametrize("schema", [1, 3, 99, "2", None], ids=repr)
def test_a_manifest_of_another_schema_is_refused(schema):
    with pytest.raises(errors.CorruptError, match=f"the manifest has schema {schema!r}, but .* requires 2"):
        manifest.from_json({**Manifest({}).to_json(), "schema": schema})


def test_a_digest_without_its_algorithm_is_refused():
    tensors = [{"path": "w", "shape": [2], "dtype": "int8", "digest": "0" * 64}]
    with pytest.raises(errors.CorruptError, match="expected a digest with its algorithm"):
        manifest.from_json({**Manifest({}).to_json(), "tensors": tensors})


def named(number):
    """A parameter that pytest cannot print."""
    return pytest.param(number, id=f"{number.bit_length()} bits")


@pytest.mark.parametrize(
    ("text", "size"), [("128MiB", 128 << 20), ("5GB", 5 * 10**9), ("7", 7), ("1.5 k", 1536)]
)
def test_sizes(text, size):
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MB", "-1", "0", "1 parsec", "9" * 400, f"{'9' * 5000}.0", *map(named, (10**4000, 16**5000))]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError):
        units.parse_size(text)


@pytest.mark.parametrize(
    "text", ["", "-1", "1 year", "9" * 400, f"{'9' * 5000}d", named(16**5000), 1e300, "999999w"]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UsageError, match="invalid duration"):
        units.duration(text)
    assert units.duration("99999d") == 99999 * 86400


@pytest.mark.parametrize(
    ("name", "step"),
    [("8", 8), ("0000001000", 1000), ("checkpoint_3", 3), ("checkpoint-500", 500), ("step-10", 10),
     ("ckpt_00000200", 200),     ("llama-3", None), ("model_7", None), (".wherry-8.0a", None), ("state", None)],
)  # fmt: skip
def test_step_names(name, step):
    assert step_number(name) == step


def test_a_run_may_have_a_prefix_of_its_own():
    assert [step.number for step in steps_among(["my_run_10", "my_run_9", "logs"])] == [10, 9]


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../b", "", "a\\b", "a//b"])
def test_names_from_data_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(HostileError):
        locate(tmp_path).member(name)


def test_uris():
    assert locate("file:///a/b%20c").path == "/a/b c"
    assert locate("memory://x/y").uri == "memory://x/y"
    with pytest.raises(UsageError, match="credentials"):
        locate("s3://key:secret@bucket/x")
    with pytest.raises(UsageError, match="unknown storage protocol"):
        locate("nonsense://x")


# Key paths print without loss, and names that meet are refused.


paths = st.lists(st.text(alphabet="ab/~.2 é", max_size=4), max_size=4).map(tuple)


@given(paths)
def test_printed_form_is_read_back(path):
    assert parse(render(path)) == path


@given(paths, paths)
def test_different_paths_never_print_alike(one, other):
    assert (render(one) == render(other)) == (one == other)


@pytest.mark.parametrize("text", ["a~", "a~3", "~x/b"])
def test_text_that_is_no_printed_path_is_refused(text):
    with pytest.raises(UsageError, match="invalid key path"):
        parse(text)


def test_colliding_names_are_refused_and_both_are_named():
    with pytest.raises(UnrepresentableError, match=r"a\.b and a/b would both be stored as 'a\.b'"):
        joined_names([("a.b",), ("a", "b")], ".".join, "out")
    assert joined_names([("a", "b"), ("c",)], ".".join, "out") == {"a.b": ("a", "b"), "c": ("c",)}


# Steps beyond 64 bits: no name states one, no manifest holds one, and nothing is written that cannot be
# recorded.


@pytest.mark.parametrize("prefix", ["", "checkpoint-", "global_step", "any_"])
@pytest.mark.parametrize("digits", [19, 200])
def test_a_name_of_too_many_digits_is_no_step(prefix, digits):
    assert step_number(f"{prefix}{'9' * 18}", any_prefix=True) == 10**18 - 1
    assert step_number(f"{prefix}{'9' * digits}", any_prefix=True) is None


@pytest.mark.parametrize(
    "step", [LARGEST_STEP + 1, -LARGEST_STEP - 1, 10**5000], ids=["over", "under", "long"]
)
def test_what_a_file_states_is_refused(step):
    with pytest.raises(CorruptError, match="beyond 64 bits"):
        Manifest({}, step=step)
    with pytest.raises(CorruptError, match="beyond 64 bits"):
        Detection("/a", "dcp", step=step)


@pytest.mark.parametrize("step", [-1, LARGEST_STEP + 1, 10**5000], ids=["under", "over", "long"])
def test_a_step_to_write_is_checked_before_anything_is_read(step):
    with pytest.raises(UsageError, match="invalid step number"):
        convert_request("s", [TargetRequest("t", "dcp")], as_step=step)


@pytest.fixture
def folder(tmp_path):
    def make(name):
        path = tmp_path / name
        path.mkdir()
        save_file({"w": np.ones((2, 2), np.float32)}, path / "model.safetensors")
        return path

    return make


@pytest.mark.parametrize("name", [f"checkpoint-{'9' * 200}", "9" * 200, f"iter_{'9' * 19}"])
def test_a_conversion_from_such_a_folder_is_recorded(folder, tmp_path, name):
    receipt = wherry.convert(folder(name), tmp_path / "out", to="orbax")
    assert (receipt.source.step, receipt.lineage) == (None, "recorded")
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None


def test_a_step_in_a_file_that_no_ledger_records_leaves_nothing(folder, tmp_path):
    source = folder("model")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 10**30}))
    with pytest.raises(CorruptError, match="beyond 64 bits"):
        wherry.convert(source, tmp_path / "out", to="orbax")
    assert not (tmp_path / "out").exists()
