"""The patterns of PEFT: those that are supported match what PEFT's own expression matches, in little time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wherry.errors import UnrepresentableError
from wherry.view import peft_patterns
from wherry.view.peft_patterns import ModulePatterns, is_simple

MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.mlp.up_proj",
    "q_proj",
    "model.q_proj_extra",
    "xq_proj",
)
SUPPORTED = (
    "q_proj", "self_attn.q_proj", r"layers\.0\.self_attn\.q_proj", "^q_proj", "^model.layers.0.self_attn.q_proj$",
    r"layers\.\d+\.mlp\.up_proj", ".*up_proj", "(q_proj|up_proj)", "(?:q|k)_proj", "[qk]_proj", "layers.[0-9]{2}.*",
    "q_proj|up_proj", "mlp.*",
)  # fmt: skip


@pytest.mark.parametrize("pattern", SUPPORTED)
def test_a_pattern_matches_as_in_peft(pattern):
    assert is_simple(pattern) is (pattern != "layers.[0-9]{2}.*")
    found = ModulePatterns({pattern: 7})
    for module in MODULES:
        wanted = re.match(rf"(.*\.)?({pattern})$", module)
        assert found.value(module, None) == (7 if wanted else None)


def test_the_first_pattern_counts():
    found = ModulePatterns({"k": 1, "q_proj": 2, "proj": 3, ".*proj": 4})
    assert [found.value(one, 0) for one in ("a.q_proj", "a.o_proj", "a.b")] == [2, 4, 0]
    assert ModulePatterns(None).value("a", 5) == 5


@given(
    st.lists(
        st.sampled_from(
            ["a", ".", "*", "+", "?", "(", "(?:", ")", "|", "[a-z]", r"\d", r"\.", "{3}", "^", "$"]
        )
    )
)
def test_what_is_simple_ends_soon(parts):
    pattern = "".join(parts)
    if is_simple(pattern):
        began = time.process_time()
        ModulePatterns({pattern: 1}).value("a" * 1000, None)
        assert time.process_time() - began < 5


def test_names_and_comparisons_are_limited(monkeypatch):
    with pytest.raises(UnrepresentableError, match="too long"):
        ModulePatterns({"a": 1}).value("a" * 1001, None)
    monkeypatch.setattr(peft_patterns, "_MOST_COMPARISONS", 5)
    found = ModulePatterns({"a": 1, "b": 2})
    assert [found.value("x.b", None) for _ in range(2)] == [2, 2]
    with pytest.raises(UnrepresentableError, match="too many"):
        found.value("x.b", None)
