"""The verbs that run over every hostile file, as command lines.

`{path}` is what is examined, `{folder}` the folder that holds it, `{out}` a new name next to that folder, `{good}` a
sound checkpoint of another place, `{keys}` a folder with a key pair, `{routes}` a wherry.toml with a route from the
folder, `{quoted}` one whose target is a file:// URI, `{policy}` a policy with every gate.
"""

from __future__ import annotations

_LEVELS = ("structure", "present", "digest", "roundtrip", "native", "logits")
_OTHER = {"roundtrip": ("--against", "{good}"), "logits": ("--against", "{good}")}
_PLAIN = ("--no-lineage", "--quiet")

LOOKING: dict[str, tuple[str, ...]] = {
    "detect": ("detect", "{path}"),
    "inspect": ("inspect", "{path}"),
    "discover": ("discover", "{folder}"),
    "verify present": ("verify", "{path}", "--level", "present", "--quiet"),
    "audit": ("audit", "{folder}", "--no-record", "--quiet"),
}
READING: dict[str, tuple[str, ...]] = {
    **{
        f"verify {level}": ("verify", "{path}", "--level", level, "--quiet", *_OTHER.get(level, ()))
        for level in _LEVELS if level != "present"
    },
    "inspect digest": ("inspect", "{path}", "--digest", "--json"),
    "inspect pickles": ("inspect", "{path}", "--pickles"),
    "plan": ("plan", "{path}", "{out}", "--to", "safetensors"),
    "plan orbax": ("plan", "{path}", "{out}", "--to", "orbax", "--json"),
    "plan family": ("plan", "{path}", "{out}", "--to", "maxtext"),
    "convert torch": ("convert", "{path}", "{out}.pt", "--to", "torch-zip", *_PLAIN),
    "convert orbax": ("convert", "{path}", "{out}.orbax", "--to", "orbax", *_PLAIN),
    "convert hf": ("convert", "{path}", "{out}.hf", "--to", "huggingface", "--family", "none", *_PLAIN),
    "rewrite": ("rewrite", "{path}", "{out}.new", "--as", "unbox", *_PLAIN),
    "audit digest": ("audit", "{folder}", "--level", "digest", "--quiet"),
    "lineage show": ("lineage", "show", "{path}"),
    "lineage why": ("lineage", "why", "{path}"),
    "lineage impact": ("lineage", "impact", "{path}"),
    "lineage stale": ("lineage", "stale"),
    "ls": ("ls",),
    "du": ("du",),
    "metrics": ("metrics", "{folder}"),
    "resolve": ("resolve", "wherry://sha256/" + "0" * 64),
    "preflight": ("preflight", "{path}", "--pool-type", "process"),
    "doctor": ("doctor",),
    "diff": ("diff", "{path}", "{good}", "--quiet"),
    "nightly plan": ("nightly", "--config", "{routes}", "--dry-run"),
    "merge": ("merge", "{path}*0.5", "{good}*0.5", "{out}.merged", "--to", "safetensors", *_PLAIN),
    "split": ("split", "{path}", "{out}.split", "--to", "dcp", "--no-lineage", "--unit", "64KiB"),
    "work split": ("work", "{out}.split", "--expiry", "1s", "--commit", "--quiet"),
}  # fmt: skip
# The path is given where something else is expected: a bundle, a table, a family, a key, a ledger.
MISTAKING: dict[str, tuple[str, ...]] = {
    "audit check": ("audit", "--check", "{path}"),
    "verify signature": ("verify-signature", "{path}", "--key", "{keys}/public.pem", "--quiet"),
    "signature": (
        "verify-signature", "{good}", "--key", "{keys}/public.pem", "--signature", "{path}", "--quiet",
    ),
    "key": ("verify-signature", "{good}", "--key", "{path}", "--quiet"),
    "config": ("plan", "{good}", "{out}", "--to", "orbax", "--config", "{path}"),
    "family": ("plan", "{good}", "{out}", "--to", "orbax", "--family-file", "{path}"),
    "prices": ("plan", "{good}", "{out}", "--to", "orbax", "--price", "{path}"),
    "routes": ("routes", "check", "--config", "{path}"),
    "routes explain": ("routes", "explain", "{path}", "--config", "{routes}"),
    "ledger file": ("ledger", "check", "--ledger", "sqlite:///{path}"),
    "config show": ("config", "show", "--config", "{path}"),
    "deploy": ("deploy", "{path}"),
    "anchor": ("ledger", "check", "--anchor", "{path}"),
}  # fmt: skip
WRITING: dict[str, tuple[str, ...]] = {
    "fetch": ("fetch", "{path}", "{out}.copy", "--quiet"),
    "work": ("work", "{path}", "--expiry", "1s", "--quiet"),
    "commit": ("commit", "{path}", "--quiet"),
    "ledger check": ("ledger", "check"),
    "ledger anchor": ("ledger", "anchor"),
    "ledger deliver": ("ledger", "deliver"),
    "emit": ("emit", "{path}"),
    "init": ("init", "--root", "{folder}", "--target", "{out}.night", "--config", "{out}.toml", "--yes"),
    "ledger record": ("ledger", "record", "{folder}"),
    "ledger rebuild": ("ledger", "rebuild", "{folder}", "--no-registry", "--ledger", "sqlite:///{out}.db"),
    "convert here": ("convert", "{good}", "{folder}/target", "--to", "torch-zip", *_PLAIN),
    "sign": ("sign", "{path}", "--key", "{keys}/private.pem", "--quiet"),
    "clean": ("clean", "{folder}"),
    "nightly": ("nightly", "--config", "{routes}", "--go"),
    "prune": ("prune", "--config", "{routes}", "--yes"),
    "register": ("register", "{path}", "--model", "attacked"),
    "nightly quoted": ("nightly", "--config", "{quoted}", "--go"),
    "convert recorded": ("convert", "{path}", "{out}.recorded", "--to", "torch-zip", "--quiet"),
    "promote policy": (
        *("promote", "{path}", "--model", "judged", "--policy", "{policy}", "--level", "digest", "--quiet"),
    ),
    "promote": ("promote", "{path}", "--model", "attacked", "--level", "digest", "--quiet"),
}
# Commands that no hostile file reaches, and why.
LEFT = {
    "formats": "describes formats, and opens no file",
    "layouts": "describes families, and opens no file but one that `plan --family-file` opens too",
    "help": "opens no file",
    "completion": "opens no file",
    "config example": "opens no file",
    "lineage serve": "runs until it is stopped; tests/trace attacks its pages",
    "serve": "runs until it is stopped; reads what `deploy` reads",
}
VERBS = {**LOOKING, **READING, **MISTAKING, **WRITING}
CHANGED = ("detect", "inspect", "verify digest", "plan", "convert torch")  # over mutations


def line(verb: str, places: dict[str, str]) -> list[str]:
    """The command line of a verb over one case."""
    return [word.format(**places) if "{" in word else word for word in VERBS[verb]]
