"""Child process of a native check: loads with the system's own library and computes digests of the device arrays.

    python -m wherry.integrations.native.child < REQUEST > ANSWER          (JSON; a `schema` number in both)

`wherry.core.child` starts it in a new empty folder, which is also the cache of Hugging Face's libraries, so that
nothing that was downloaded earlier is executed, and in the sandbox the folder for temporary files.

The request has the function, the paths, and the manifest with a digest for each tensor. The process enters the sandbox
of `wherry.core.sandbox` before it touches the checkpoint: files are limited before numpy and the libraries start
threads, calls after the imports and after the devices are ready. Each array is fetched from its devices shard by shard,
replicas once, and its digest is compared. Output of the library goes to the standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core import sandbox
from wherry.core.digest import LEAF, algorithm_of, new_hash, tensor_digest
from wherry.core.json_document import json_value
from wherry.core.keypath import render
from wherry.core.manifest import Manifest, from_json
from wherry.cures import in_python
from wherry.errors import UnsupportedError, WherryError
from wherry.integrations.live.nodes import is_torch
from wherry.integrations.live.trees import survey
from wherry.integrations.native import NoModelError, UnsafeLibraryError
from wherry.live.match import Leaf, Pair, match
from wherry.mover.output import as_bytes

if TYPE_CHECKING:
    import numpy as np


SCHEMA = 1


def main() -> None:
    """Answer one request."""
    request = json_value(sys.stdin.read())
    os.environ["HF_HOME"] = str(Path.cwd())
    with os.fdopen(os.dup(1), "w") as out, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)  # redirects output of compiled code too, which must not get into the answer
        json.dump({"schema": SCHEMA, **answer_request(request)}, out)


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request.

    Returns:
        `failed` (path and reason of each tensor that differs from the manifest), `checked`, `sharded` and `devices`; or
        `refused`, the library's error message; or `unsafe` or `unsupported`, why loading was not tried, with `cure` and
        `cure_in_python`.
        `sandbox` says what was limited: `files`, `calls`, `network`.
    """
    try:
        if request["task"] == "logits":
            module, limits = _import_confined(
                request["sandbox"], "transformers", "wherry.integrations.native.logits"
            )
            answer = module.compare_logits(Path(request["source"]), Path(request["target"]))
            return {**answer, "sandbox": limits}
        if request["task"] == "serve":
            module, limits = _import_confined(
                request["sandbox"], "transformers", "wherry.integrations.native.serve"
            )
            answer = module.compare_tokens(
                Path(request["source"]),
                Path(request["target"]),
                request["tokens"],
                confined=module.CONFINED.issubset(limits),
            )
            return {**answer, "sandbox": limits}
        name, function = request["function"].split(":")
        module, limits = _import_confined(request["sandbox"], request["package"], name)
        return {**_load(request, getattr(module, function)), "devices": devices(), "sandbox": limits}
    except UnsafeLibraryError as error:
        return {"unsafe": error.what, **_words(error)}
    except UnsupportedError as error:  # of the library or of the sandbox, not of the checkpoint
        return {"unsupported": error.what, **_words(error)}


def _words(error: WherryError) -> dict[str, str]:
    """The cure in the words of a shell and in those of Python; the caller knows which it needs."""
    cure = error.cure or ""
    return {"cure": str(cure), "cure_in_python": in_python(cure)}


def _import_confined(wanted: dict[str, Any] | None, package: str, name: str) -> tuple[Any, list[str]]:
    """Enter the sandbox, and import a package and the module of loaders on the way.

    Args:
        wanted: `reads`, the files of the checkpoint, and whether the library itself uses the `network`; None for no
            sandbox.
        package: the package that loads; a missing one is not a finding about the checkpoint.
        name: the module; its function `prepare` makes the devices ready.

    Returns:
        The module, and what is limited.
    """
    limits: list[str] = []
    if wanted and sandbox.confine_files(wanted["reads"], [str(Path.cwd())], network=wanted["network"]):
        limits.append("files")
        os.environ["TMPDIR"] = str(Path.cwd())
    import_module(package)
    module = import_module(name)
    getattr(module, "prepare", lambda: None)()
    if wanted and sandbox.confine_calls(network=wanted["network"]):
        limits += ["calls"] if wanted["network"] else ["calls", "network"]
    return module, limits


def _load(request: dict[str, Any], load: Callable[..., Any]) -> dict[str, Any]:
    manifest = from_json(request["manifest"])
    try:
        path: str = request["path"]
        place = path if "://" in path else Path(path)  # from the URI of a store the library itself reads
        state = load(place, {spec.name: spec for spec in manifest.tensors.values()})
        leaves = survey(state).leaves
    except (UnsafeLibraryError, NoModelError):
        raise
    except Exception as error:  # noqa: BLE001  any error of the library is the finding
        return {"refused": f"{type(error).__name__}: {error}"[:2000]}
    names = {path: path for path in manifest.tensors}
    arrays = [leaf for leaf in leaves if leaf.dtype is not None]
    matched = match(arrays, manifest, names, cast=True, named=False)
    failed = [[render(path), "missing: the library did not load it"] for path in matched.unexpected]
    for pair in matched.pairs:
        reason = _difference(pair, manifest)
        if reason:
            failed.append([render(pair.source.path) if pair.source else pair.leaf.name, reason])
    sharded = sum(_parts(pair.leaf.value) > 1 for pair in matched.pairs)
    return {"failed": failed, "checked": len(matched.pairs), "sharded": sharded}


def devices() -> str:
    """Description of the devices that the arrays were loaded onto."""
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        return f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        from wherry.integrations.native.with_torch import device

        return f"torch {torch.__version__}, {device()}"
    return "host"


def _difference(pair: Pair, manifest: Manifest) -> str | None:
    leaf, spec = pair.leaf, pair.source
    if spec is None:
        return None
    if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
        return f"expected {spec.dtype} {spec.shape}, but the library loaded {leaf.dtype} {leaf.shape}"
    if spec.path not in manifest.digests:
        return "no digest recorded"
    recorded = manifest.digests[spec.path]
    algorithm, view = algorithm_of(recorded), memoryview(as_bytes(fetch_elements(leaf)))
    found = [new_hash(algorithm, view[at : at + LEAF]).digest() for at in range(0, len(view), LEAF)]
    same = tensor_digest(replace(spec, path=()), found, algorithm) == recorded
    return None if same else "digest mismatch: the array on the devices differs from the recorded digest"


def fetch_elements(leaf: Leaf) -> np.ndarray:
    """The elements of an array, fetched from its devices shard by shard."""
    import numpy as np

    value: Any = leaf.value
    if is_torch(value):
        from wherry.integrations.live.torch_arrays import host

        return host(value)
    if leaf.prng is not None:
        import jax

        value = jax.random.key_data(value)
    shards = getattr(value, "addressable_shards", None)
    if shards is None:
        return np.ascontiguousarray(value)
    if len(shards) == 1:
        return np.ascontiguousarray(shards[0].data)
    whole = np.empty(value.shape, value.dtype)
    for shard in shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(shard.data)
    return whole


def _parts(value: Any) -> int:
    """The number of distinct shards of an array."""
    shards = getattr(value, "addressable_shards", None)
    return sum(shard.replica_id == 0 for shard in shards) if shards is not None else 1


if __name__ == "__main__":
    main()
