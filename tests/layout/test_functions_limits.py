"""A number of a config must not become a list that fills the memory: a hostile config states one in ten digits."""

import pytest

from wherry.errors import HostileError
from wherry.layout.expr import evaluate

MANY = 10**9


@pytest.mark.parametrize(
    "text",
    [
        "windowed(layers, 2)",
        "dense_first(layers, 3)",
        "windowed_from(layers, 3)",
        "rotated_layers(4, layers)",
        "freq_of_experts(layers, 1)",
        "freq_of_experts(1, layers)",
        "expert_step(first, layers)",
    ],
)
def test_a_list_with_a_value_of_each_layer_is_limited(text):
    with pytest.raises(HostileError, match="1,000,000,000 layers exceeds the limit of 250,000"):
        evaluate(text, {"layers": MANY, "first": [0]})


def test_ordinary_numbers_stay():
    assert evaluate("windowed(layers, 2)", {"layers": 3}) == [
        "sliding_attention", "full_attention", "sliding_attention"
    ]  # fmt: skip
    assert evaluate("freq_of_experts(1, layers)", {"layers": 2}) == [0, 1, 1]
    assert evaluate("dense_first(layers, 1)", {"layers": 2}) == ["dense", "sparse"]
    assert evaluate("rotated_layers(2, layers)", {"layers": 3}) == [1, 0, 1]
