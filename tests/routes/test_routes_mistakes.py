"""`wherry routes check`: every mistake of a configuration in one pass, each with its place and its cure."""

from __future__ import annotations

import json

from tests.support.command import typed

TEN = """\
ledgr = "x"
memory = "128 megs"
[mlflow]
tracking_url = "http://127.0.0.1:5061"
[routes.t5x]
root = "~/runs"
selct = "latest"
select = "newest"
[[routes.t5x.target]]
format = "hugingface"
[[routes.t5x.targets]]
format = "hugingface"
uri = "models/{run}/{stp}"
famly = "t5"
family = "t6"
only = "weights"
[routes.t5x.retention]
keep_lst = 3
"""
# line → what is wrong, and the cure.
EXPECTED = {
    1: ("ledgr: unknown field", "did you mean ledger?"),
    2: ("memory: invalid size", "write for example 128MiB"),
    4: ("mlflow.tracking_url: unknown field", "did you mean tracking_uri?"),
    7: ("routes.t5x.selct: unknown field", "did you mean select?"),
    8: ("routes.t5x.select: invalid selection 'newest'", "latest"),
    9: ("routes.t5x.target: unknown field", "did you mean targets"),
    12: ("routes.t5x.targets[0].format: unknown format 'hugingface'", "did you mean huggingface"),
    13: ("routes.t5x.targets[0].uri: unknown field {stp}", "{step}"),
    14: ("routes.t5x.targets[0].famly: unknown field", "did you mean family"),
    15: ("routes.t5x.targets[0].family: unknown family 't6'", "t5"),
    16: ("routes.t5x.targets[0].only: Input should be 'params'", "write 'params'"),
    18: ("routes.t5x.retention.keep_lst: unknown field", "did you mean keep_last"),
}
ROUTE = """
[routes.a]
root = "runs"
model = "m"
alias = "candidate"

[[routes.a.targets]]
format = "npz"
uri = "out/{run}-{step}.npz"

[[routes.a.targets]]
format = "orbax"
uri = "out/{run}-{step}"
"""


def test_ten_mistakes_are_ten_lines_in_the_order_of_the_file(tmp_path, capfd):
    (tmp_path / "bad.toml").write_text(TEN)
    code, printed = typed("routes check --config HOME/bad.toml", tmp_path, capfd)
    assert code == 2
    lines = printed.splitlines()
    assert [int(line.split(":")[1]) for line in lines] == sorted(EXPECTED)
    for line, (what, cure) in zip(lines, EXPECTED.values(), strict=True):
        assert line.startswith("HOME/bad.toml:")
        assert what in line
        assert cure in line.partition("; ")[2]
    code, printed = typed("routes check --json --config HOME/bad.toml", tmp_path, capfd)
    assert (code, len(json.loads(printed)["problems"])) == (2, len(EXPECTED))


def test_two_targets_of_one_model_are_named_with_a_cure(tmp_path, capfd):
    file = tmp_path / "wherry.toml"
    file.write_text(ROUTE)
    (tmp_path / "runs").mkdir()
    code, printed = typed("routes check --config HOME/wherry.toml", tmp_path, capfd)
    assert code == 0
    assert "warning: routes.a.targets[1].model" in printed
    assert "the alias candidate ends on the version that is registered last" in printed
    cure = printed.rpartition("for example ")[2].splitlines()[0]
    assert cure == 'model = "m-orbax"'
    file.write_text(f"{ROUTE}{cure}\n")
    assert "warning" not in typed("routes check --config HOME/wherry.toml", tmp_path, capfd)[1]
