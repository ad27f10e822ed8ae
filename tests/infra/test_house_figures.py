"""`infra/house` counts what it says that it counts, and the words that the code avoids are at zero."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.infra import INFRA, ROOT

PRODUCT = [ROOT / folder for folder in ("wherry", "integrations", "flows", "tasks")]


_CODE = '''def _once(told):
    """What is told."""
    return f"{told}"


def _twice():
    return _once(1)

text = f"{_twice()} {_twice()}, asked"  # beside it
print(end=text, wish=1)
print(receipt.asked, "told")
'''


def house(*options: str, root: Path = ROOT) -> Any:
    """What the script prints of a checkout, with a Python that has wherry."""
    command = [sys.executable, root / "infra" / "house", "--json", *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)


def test_rooms_add_up_to_the_product_and_a_conversion_enters_some():
    *rooms, total = house("--trace")
    texts = [path.read_text() for folder in PRODUCT for path in folder.rglob("*.py")]
    assert total["files"] == len(texts)
    assert total["lines"] == sum(text.count("\n") for text in texts)
    statements = (isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text)))
    assert total["statements"] == sum(statements)
    for name in total.keys() - {"name"}:
        assert total[name] == sum(room[name] for room in rooms)
    by_name = {room["name"]: room for room in rooms}
    assert {"wherry/mover", "integrations/formats", "flows", "tasks"} <= by_name.keys()
    assert by_name["wherry/mover"]["entered_files"] > 0
    assert by_name["wherry/lineage"]["entered_files"] == 0
    assert total["entered_functions"] > total["entered_files"]


def test_what_is_drawn_is_drawn_again_by_its_seed():
    first, again = house("--single", "20", "--seed", "7"), house("--single", "20", "--seed", "7")
    assert first == again
    assert first != house("--single", "20", "--seed", "8")
    for row in first:
        file, _, line = row["place"].partition(":")
        assert f"def {row['name']}(" in (ROOT / file).read_text().splitlines()[int(line) - 1]
    assert len(house("--sentences", "40")) == 40


def test_each_use_of_a_word_and_of_a_function_is_seen(tmp_path):
    """Names, also in f-strings and keywords, comments and docstrings; not texts, nor the key of receipts."""
    for folder in ("infra", "wherry"):
        (tmp_path / folder).mkdir()
    shutil.copy2(INFRA / "house", tmp_path / "infra" / "house")
    (tmp_path / "wherry" / "x.py").write_text(_CODE)
    assert [row.split(":")[1] for row in house("--words", root=tmp_path)] == ["10", "1", "2", "3", "9"]
    drawn = house("--single", "9", root=tmp_path)
    assert [(row["name"], row["caller"]) for row in drawn] == [("_once", "_twice")]


def test_words_that_the_code_avoids_are_gone():
    """In names, comments and docstrings; keys of records and texts of other software are strings."""
    assert house("--words") == []
