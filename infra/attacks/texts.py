"""Configs in TOML, YAML, gin and JSON that are small to write and large, deep or strange for who parses them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from infra.attacks import heads
from infra.attacks.case import MARKER, TOUCH, Case, write_file, write_files

_PARTS = 120_000  # of a dotted key: tomllib makes a table of each, and copies the key for each
_DEEP = 20_000


def _laughs(levels: int, width: int) -> str:
    """Anchors that each repeat the one before: width ** levels values."""
    rows = [f"a0: &a0 [{'x, ' * width}]"]
    rows += [f"a{level}: &a{level} [{f'*a{level - 1}, ' * width}]" for level in range(1, levels)]
    return "\n".join(rows)


def _macros(levels: int) -> str:
    """Macros of gin that each name the one before twice."""
    rows = ["M0 = 'xxxxxxxx'", *(f"M{level} = (%M{level - 1}, %M{level - 1})" for level in range(1, levels))]
    return "\n".join([*rows, f"network.T5Config.emb_dim = %M{levels - 1}"])


TOML = {
    "key-parts": ".".join(["a"] * _PARTS) + " = 1",
    "table-parts": f"[{'.'.join(['a'] * _PARTS)}]",
    "inline-parts": f"x = {{{'.'.join(['a'] * _PARTS)} = 1}}",
    "quoted-parts": ".".join(['"a.b"'] * _PARTS) + " = 1",
    "spaced-parts": " . ".join(["a"] * _PARTS) + " = 1",
    "string-hides-parts": f"x = \"\"\"{'a' * 9}\"\"\"\n{'.'.join(['a'] * _PARTS)} = '''x'''",
    "keys": "\n".join(f"{'a.' * 150}k{number} = 1" for number in range(6000)),
    "arrays": f"a = {'[' * _DEEP}{']' * _DEEP}",
    "tables": f"a = {'{a = ' * _DEEP}1{'}' * _DEEP}",
    "array-tables": "[[a]]\n" * 100_000,
    "long-name": f'"{"k" * 4_000_000}" = 1',
    "date": "a = 9999-12-31T23:59:59-23:59\nb = 0001-01-01T00:00:00+23:59\nc = 24:61:61",
    "controls": 'root = "\\u001b]0;title\\u0007"\n"\\u009b31m" = 1\n"a\\nb: forged" = 1\n"[red]MARKUP[/red]" = 1',
    "bom": "\ufeffa = 1",
    "nan": "[routes.a]\nmin_age = nan\nmax_bytes = inf",
}
YAML = {
    "laughs": _laughs(12, 9),
    "alias": "a: &a [1]\nbase_emb_dim: *a",
    "itself": "&a [*a]",
    "merge-itself": "a: &a {<<: *a}",
    "merge": "base_emb_dim: 8\n<<: {<<: {<<: {a: 1}}}",
    "tag-object": f"!!python/object/apply:os.system ['{TOUCH}']",
    "tag-name": "a: !!python/name:os.system ''",
    "tag-module": "a: !!python/module:evil_module ''",
    "tag-new": f"a: !!python/object/new:type {{args: [x, [], {{}}], state: '{TOUCH}'}}",
    "tag-tuple": "a: !!python/tuple [1, 2]",
    "tag-own": "a: !evil {x: 1}",
    "tag-values": "a: !!int x\nb: !!float []\nc: !!bool {}\nd: !!timestamp 2026-99-99",
    "tag-map": "a: !!omap {x: 1}\nb: !!pairs x\nc: !!set [1]",
    "tag-binary": "a: !!binary '%%%'",
    "date": "a: 2026-99-99\nb: 2026-11-01 25:61:61\nc: 0001-01-01T00:00:00+23:59",
    "base-60": "base_emb_dim: 1" + ":59" * 100_000,
    "base-60-float": "base_emb_dim: 1" + ":59" * 9000 + ".5",
    "key-list": "? [a, b]\n: 1\n? {a: 1}\n: 2",
    "flow": "a: " + "[" * _DEEP + "]" * _DEEP,
    "blocks": "\n".join(" " * level + "-" for level in range(1500)),
    "maps": "\n".join(" " * level + "a:" for level in range(1500)),
    "documents": "--- 1\n" * 100_000,
    "directive": "%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system ''",
    "long-name": f"{'k' * 4_000_000}: 1",
    "controls": 'base_emb_dim: "\\e]0;title\\a"\n"\\x9b31m": 1\n"a\\nb: forged": 1\nmodel_name: "[red]MARKUP[/red]"',
    "equals": "a: =\n=: 1",
    "utf-16": "\ufeffa: 1",
}
GIN = {
    "macros": _macros(40),
    "macro-itself": "M = %M\nnetwork.T5Config.emb_dim = %M",
    "macro-long": f"M = '{'x' * 1_000_000}'\n"
    + "\n".join(f"network.T5Config.a{n} = %M" for n in range(5000)),
    "include": "include '/etc/passwd'\ninclude 'model.gin'\ninclude '../x.gin'\nnetwork.T5Config.emb_dim = 8",
    "import": f"import evil_module\nfrom os import system\nnetwork.T5Config.emb_dim = @system('{TOUCH}')",
    "call": f"network.T5Config.emb_dim = __import__('os').system('{TOUCH}')",
    "parentheses": f"network.T5Config.emb_dim = {'(' * 9000}1{')' * 9000}",
    "signs": f"network.T5Config.emb_dim = {'-' * 90_000}1",
    "sum": f"network.T5Config.emb_dim = {'1+' * 90_000}1j",
    "power": "network.T5Config.emb_dim = 9**9**9**9",
    "product": "network.T5Config.emb_dim = 'x' * 9999999999",
    "kinds": "network.T5Config.emb_dim = 1+2j\nnetwork.T5Config.num_layers = b'x'\nnetwork.T5Config.heads = {1}",
    "more-kinds": "network.T5Config.emb_dim = ...\nnetwork.T5Config.vocab_size = {(1,): [2]}",
    "names": "\n".join(f"{'a/' * 400}T5Config.a{number} = 1" for number in range(4000)),
    "dots": f"{'a.' * 100_000}T5Config.b",
    "controls": "network.T5Config.emb_dim = '\x1b]0;title\x07'\nnetwork.T5Config.heads = '[red]MARKUP[/red]'",
    "continued": "network.T5Config.emb_dim = \\\n" * 100_000 + "1",
}
JSON = {
    "deep": f'{{"a": {"[" * _DEEP}{"]" * _DEEP}}}',
    "twice": '{"model_type": "llama", "model_type": "gemma", "num_hidden_layers": 1, "num_hidden_layers": 2}',
    "long-name": json.dumps({"model_type": "llama", "k" * 4_000_000: 1}),
    "long-type": json.dumps({"model_type": "k" * 1_000_000}),
    "controls": json.dumps(
        {"model_type": "\x1b]0;title\x07", "architectures": ["a\nb: forged", "[red]MARKUP[/red]"]}
    ),
    "code": json.dumps(
        {"model_type": "x", "auto_map": {"AutoConfig": "evil_module.Evil"}, "trust_remote_code": True}
    ),
    "expression": json.dumps(
        {"model_type": "llama", "num_hidden_layers": f"__import__('os').system('{TOUCH}')"}
    ),
}
# Names of the files, which say how they are parsed.
_FILES: dict[tuple[str, ...], dict[str, str]] = {
    ("wherry.toml", "family.toml", "price.toml"): TOML,
    ("base.yml",): YAML,
    ("model.gin",): GIN,
    ("config.json", "params.json"): JSON,
}


def cases() -> Iterator[Case]:
    """Each text as a file that a person passes, and as a file in and next to the folder of a model."""
    for files, texts in _FILES.items():
        for file in files:
            for name, text in texts.items():
                data = text.encode()
                both = {f"model/{file}": data, file: data, "model/model.safetensors": heads.SOUND}
                yield Case(f"text-alone/{file}-{name}", write_file(file, data), MARKER in text)
                yield Case(f"text-next-to/{file}-{name}", write_files(both, "model"), MARKER in text)
