"""The inert pickle machine: plain values as pickle meant them, and pickles made to run code or to hang."""

from __future__ import annotations

import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.errors import WherryError
from wherry.integrations.containers.inert_pickle import load
from wherry.integrations.containers.inert_values import Record, Rules, dict_of


def load_all(data, rules) -> None:
    """Every pickle of a stream: the payload of a legacy torch file is in its third."""
    end = 0
    while end < len(data):
        _, end = load(data, rules, "x", end)


def test_corpus_pickles_end_quickly_and_make_nothing(corpus, tmp_path, monkeypatch):
    """No pickle of the hostile corpus gives anything but a refusal, and none takes long."""
    monkeypatch.chdir(tmp_path)
    found = [p for p in corpus.glob("hostile-*/checkpoint/*") if p.suffix in (".pkl", ".bin", ".pt")]
    assert len(found) > 30
    rules = Rules(allowed={("collections", "OrderedDict"): dict_of})
    began = time.monotonic()
    for path in found:
        with pytest.raises(WherryError):
            load_all(path.read_bytes(), rules)
    assert time.monotonic() - began < 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02)q\x00" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(100)) + b"K\x01\x86}h\x00K\x01s.",
        b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"N.",
        b"\x80\x02\x8b\xff\xff\xff\x7fN.",
        b"\x80\x02" + b"(" * 100_000 + b"N.",
        b"\x80\x02}" + b"\x8a\x10" + b"\xff" * 15 + b"\x01" + b"Ns.",
        b"\x80\x02c__builtin__\neval\n.",
        b"\x80\x04)q\x00)\x86\x8c\x04evalq\x01\x93.",
        b"(c__main__\nX\no.",
        b"\x80\x02N",
        b"\x80\x02NN.",
        b"\x80\x09N.",
        b"",
        b"e.",
        b"\x80\x02]K\x01a}b.",
    ],
)
def test_bombs_and_broken_pickles(data):
    began = time.monotonic()
    with pytest.raises(WherryError):
        load(data, Rules(allowed={}), "x")
    assert time.monotonic() - began < 2


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(0, 9), inner)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=100, deadline=None)
def test_plain_values_are_what_pickle_meant(value, protocol):
    data = pickle.dumps(value, protocol)
    rules = Rules(
        allowed={
            ("_codecs", "encode"): lambda args: args[0].encode("latin1"),
            ("__builtin__", "bytes"): lambda _: b"",
        }
    )
    assert load(data, rules, "x") == (value, len(data))


def test_calls_become_records():
    data = pickle.dumps(pickle.PickleBuffer, 4)
    found, _ = load(
        data, Rules(allowed={("_pickle", "PickleBuffer"): None, ("pickle", "PickleBuffer"): None}), "x"
    )
    assert found.name == "PickleBuffer"
    made, _ = load(
        b"\x80\x02cm\nf\nK\x01\x85R}X\x01\x00\x00\x00xK\x02sb.", Rules(allowed={("m", "f"): None}), "x"
    )
    assert isinstance(made, Record)
    assert (str(made.kind), made.args, made.state) == ("m.f", (1,), {"x": 2})
