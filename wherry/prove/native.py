"""native, logits and serve: the levels of verification that use the systems' own software.

`native` loads a checkpoint with the target system's own library onto the available devices (TPU, GPU, CPU), sharded if
possible, and compares the digests of the loaded arrays with the recorded ones; transformers also builds the model.
`logits` converts source and target to Hugging Face folders, unless they are, and compares the outputs of transformers'
own model. `serve` loads a Hugging Face folder as a server does, and compares the tokens that it generates with those of
the source. Each check is a child process, so that the heavy libraries are never imported by the caller and their memory
is released. What they do not prove is in `wherry.prove.verify`.

Few libraries read from stores of objects: torch.distributed.checkpoint through fsspec, and Orbax from gs://. They read
there themselves, in the child process, which gets the variables with the login and endpoint of that one store. For any
other library the files are copied to a temporary folder, within a size limit, and the report says so.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from wherry.config.roots import locate_stated, root_of
from wherry.config.settings import digest_choice
from wherry.core import child, sandbox
from wherry.core.child import NoAnswerError
from wherry.core.interpreter import available_memory
from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import ConvertRequest, LayoutRequest, SourceRequest, TargetRequest
from wherry.core.services import service
from wherry.core.units import parse_size, show_size
from wherry.cures import Argument, Blank, Command, Cure, Phrase
from wherry.errors import MissingExtraError, StorageError, UnsupportedError, UsageError, missing_extra
from wherry.formats.checkpoint import Checkpoint, open_source, take_pin
from wherry.formats.end_tokens import DIFFER, OUTSIDE, EndTokens, read_end_tokens
from wherry.mover.hashing import Failure, hash_checkpoint
from wherry.store.copy import copy_files
from wherry.store.local_store import local_location, locate
from wherry.store.location import Location
from wherry.store.sidecar import read_sidecar
from wherry.target.janitor import temporary_folder

_SCHEMA = 1
NO_VARIABLES: Mapping[str, str] = {}
_HUB = "huggingface"
# JAX keeps 64-bit types; nothing is downloaded.
_VARIABLES = {"JAX_ENABLE_X64": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Default limits of a child: a slow disk still reads 20 MB/s; libraries hold an array up to six times (loaded, cast to
# float32, mapped, sharded), besides their own code and compiler. At least 2 GiB, at most the memory that is available.
_SECONDS, _BYTES_PER_SECOND = 900, 20_000_000
_MEMORY, _COPIES, _LEAST_MEMORY = 4 << 30, 6, 2 << 30


@dataclass(frozen=True, slots=True)
class NativeReport:
    """The result of a check with the system's own software.

    Attributes:
        failed: the differences from the record.
        refused: whether the library could not load the checkpoint.
        devices: software and devices, as text.
        checked: number of tensors that were compared (logits: numbers; serve: generated tokens).
        sharded: number of tensors that were on several devices.
        error: largest relative difference of logits.
        evidence: the libraries and what they read.
        sandbox: what the library could not do: touch other `files`, make `calls` that loading does not need, use the
            `network`.
        warnings: what was not judged, and what changes no verdict.
    """

    failed: tuple[Failure, ...]
    refused: bool
    devices: str
    checked: int = 0
    sharded: int = 0
    error: float | None = None
    evidence: str = ""
    sandbox: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict of the verification."""
        return "ok" if not self.failed else "refused" if self.refused else "altered"

    def to_json(self) -> dict[str, Any]:
        """The output of `verify --json`."""
        more = {"error": self.error} if self.error is not None else {"sharded": self.sharded}
        return {
            "devices": self.devices,
            "checked": self.checked,
            "evidence": self.evidence,
            "sandbox": list(self.sandbox),
            **more,
        }


def native(checkpoint: Checkpoint, *, memory: int) -> NativeReport:
    """Load a checkpoint with its system's own library and compare the arrays on the devices.

    Args:
        checkpoint: the checkpoint; compared with its recorded digests, or without a record with those of its bytes.
        memory: budget of the pass over the bytes, if there is no record.

    Raises:
        UnsupportedError: no library is known for its format, none that is installed has the model class of its config,
            or it is too large for a temporary local copy.
        StorageError, MismatchError: the copy failed.
        MissingExtraError: the library is not installed, or its version is not safe.
        NoAnswerError: the child exceeded a limit, was killed, or failed to start.
    """
    name = checkpoint.detection.format
    loader = service("native").LOADERS.get(name)
    if loader is None:
        known = ", ".join(sorted(service("native").LOADERS))
        raise UnsupportedError(
            f"no native library is known for format {name}", uri=checkpoint.uri,
            cure=Cure("pass {}; native supports {}", Argument("level", "digest"), known),
        )  # fmt: skip
    _require(loader.package, loader.extra, f"loading {name} natively")
    sidecar = read_sidecar(checkpoint.location)
    if sidecar:
        digests = sidecar.manifest.digests
    else:
        digests = hash_checkpoint(checkpoint, digest_choice().algorithm, memory=memory).digests
    manifest = checkpoint.manifest.with_digests(digests).to_json()
    with native_source(checkpoint, loader.stores) as source:
        request = {
            "task": "native",
            "function": loader.function,
            "package": loader.package,
            "path": source.path,
            "manifest": manifest,
            "sandbox": _sandbox(source.reads, network="://" in source.path),
        }
        answer = _ask(request, checkpoint.manifest.nbytes, source.variables)
    evidence = f"{loader.evidence}; {source.note}" if source.note else loader.evidence
    return replace(_report(answer), evidence=evidence)


def logits(
    checkpoint: Checkpoint, against: SourceRequest | None, *, family_file: str | None = None
) -> NativeReport:
    """Compare the outputs of a model before and after a conversion.

    Args:
        checkpoint: the target.
        against: the source; by default the source in the target's receipt.
        family_file: the file that declares the family, if wherry itself does not.

    Raises:
        UsageError: the source is unknown.
        HostileError: the receipt names a place that no route reads or writes.
        MissingExtraError: transformers or torch is not installed, or its version is not safe.
        NoAnswerError: as for `native`.
        WherryError: any error of the conversion to a Hugging Face folder.
    """
    _require("transformers", "native", "computing logits")
    _require("torch", "native", "computing logits")
    with _source_of(checkpoint, against, "logits") as source:
        answer = _compare_models("logits", source, checkpoint, family_file)
    return replace(_report(answer), evidence=service("native").LOGITS_EVIDENCE)


def serve(
    checkpoint: Checkpoint,
    against: SourceRequest | None,
    *,
    tokens: int,
    family_file: str | None = None,
) -> NativeReport:
    """Compare what a server generates from a model before and after a conversion, and its end tokens.

    Args:
        checkpoint: the target, a Hugging Face folder.
        against: the source; by default the source in the target's receipt. It is converted to a Hugging Face folder,
            unless it is one.
        tokens: number of tokens to generate after each prompt.
        family_file: the file that declares the family, if wherry itself does not.

    Returns:
        The report. Near ties, what was not judged, and faults of the end tokens that the source has too are warnings.

    Raises:
        UnsupportedError: the target is no Hugging Face folder with a config, or a model does not generate.
        WherryError: as for `logits`.
    """
    _require("transformers", "native", "generating tokens")
    _require("torch", "native", "generating tokens")
    if not (checkpoint.detection.format == _HUB and checkpoint.detection.family):
        raise UnsupportedError(
            "transformers serves Hugging Face folders with a config, and this checkpoint is none",
            uri=checkpoint.uri,
            cure=Cure(
                "pass {}, or convert it with {} and verify what was made",
                Argument("level", "logits"),
                Argument("to", _HUB),
            ),
        )
    with _source_of(checkpoint, against, "serve") as source:
        found = _report(_compare_models("serve", source, checkpoint, family_file, tokens=tokens))
        ends, former = _end_tokens(checkpoint), _end_tokens(source)
    carried = {one.text for one in former.faults} if former else set[str]()
    new = [one for one in ends.faults if one.kind in (OUTSIDE, DIFFER) and one.text not in carried]
    rest = [one.text for one in ends.faults if one not in new]
    if not ends.ends:
        rest.append("not judged: the end tokens, because no file states one")
    return replace(
        found,
        failed=(*found.failed, *(Failure(one.file, one.text) for one in new)),
        warnings=(*found.warnings, *rest),
        evidence=service("native").SERVE_EVIDENCE,
    )


def _end_tokens(checkpoint: Checkpoint) -> EndTokens:
    names = {one.name for one in checkpoint.manifest.companions}
    return read_end_tokens(names, checkpoint.reader.companion)


@contextmanager
def _source_of(checkpoint: Checkpoint, against: SourceRequest | None, level: str) -> Generator[Checkpoint]:
    """The opened source of a checkpoint, while the block runs."""
    from wherry.ledger.resolve import resolve_named

    with open_source(resolve_named(against) if against else _stated_source(checkpoint, level)) as source:
        yield source


def _compare_models(
    task: str, source: Checkpoint, target: Checkpoint, family_file: str | None, **more: Any
) -> dict[str, Any]:
    """The answer of a child that runs both models, each from a Hugging Face folder."""
    with tempfile.TemporaryDirectory(prefix=".wherry-logits.") as folder:
        request: dict[str, Any] = {
            "task": task,
            "source": _as_hub(source, Path(folder) / "source", family_file),
            "target": _as_hub(target, Path(folder) / "target", family_file),
            **more,
        }
        reads = (folder, *_local_files(source), *_local_files(target))
        request["sandbox"] = _sandbox(reads, network=False)
        return _ask(request, target.manifest.nbytes + source.manifest.nbytes)


def _stated_source(checkpoint: Checkpoint, level: str) -> SourceRequest:
    """The source that the receipt in a sidecar names, which whoever may write the checkpoint can write too."""
    sidecar = read_sidecar(checkpoint.location)
    if sidecar is None or sidecar.receipt is None:
        raise UsageError(
            f"level {level} needs a source to compare with",
            cure=Cure("pass {}", Argument("against", Blank("SOURCE"))),
        )
    place = locate_stated(sidecar.receipt.source.uri)
    return SourceRequest(place.uri, below=root_of(place.uri))


def _as_hub(checkpoint: Checkpoint, folder: Path, family_file: str | None) -> str:
    """A local Hugging Face folder of a checkpoint: the checkpoint itself if it is one with a config."""
    place = checkpoint.location
    is_hub = checkpoint.detection.format == _HUB and checkpoint.detection.family
    if is_hub and place.store.capabilities.local:
        return place.path
    from wherry.converter.convert import convert_all

    target = TargetRequest(str(folder), _HUB, only="params", layout=LayoutRequest(family_file=family_file))
    request = ConvertRequest(source=SourceRequest(checkpoint.uri), targets=(target,), lineage=False)
    convert_all(request, opened=lambda: nullcontext(checkpoint))
    return str(folder)


def _local_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    return files_of(checkpoint) if locate(checkpoint.uri).store.capabilities.local else ()


def _sandbox(reads: tuple[str, ...], *, network: bool) -> dict[str, Any] | None:
    """The settings of the child's sandbox; None if the user has switched it off."""
    return {"reads": reads, "network": network} if sandbox.is_wanted() else None


def _require(package: str, extra: str, purpose: str) -> None:
    if not _is_installed(package):
        raise missing_extra(package, extra, purpose)


def _is_installed(package: str) -> bool:
    """Whether a package is installed; neither the package nor its parents are imported."""
    top, *inner = accumulate(package.split("."), lambda outer, name: f"{outer}.{name}")
    spec = find_spec(top)
    for name in inner:
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) if spec else None
    return spec is not None


def _ask(request: dict[str, Any], nbytes: int, variables: Mapping[str, str] = NO_VARIABLES) -> dict[str, Any]:
    done = child.run(
        service("native").CHILD,
        purpose=f"the {request['task']} check",
        limits=child.limits(seconds=_SECONDS + nbytes / _BYTES_PER_SECOND, memory=_memory(nbytes)),
        text=json.dumps({"schema": _SCHEMA, **request}),
        variables={**_VARIABLES, **variables},
    )
    if done.code:
        last = done.errors.strip().splitlines()[-1:] or ["it printed no error"]
        raise NoAnswerError(
            f"the {request['task']} check exited with code {done.code}: {last[0]}",
            cure="a negative code is a signal; -9 usually means out of memory", retryable=done.code < 0,
        )  # fmt: skip
    try:
        answer = json_value(done.output)
    except ValueError as error:
        raise NoAnswerError(
            f"the {request['task']} check printed no result", cure="check what the library prints"
        ) from error
    if "unsafe" in answer:
        raise MissingExtraError(answer["unsafe"], cure=_stated_cure(answer))
    if "unsupported" in answer:
        raise UnsupportedError(answer["unsupported"], cure=_stated_cure(answer))
    return answer


def _stated_cure(answer: Mapping[str, Any]) -> Cure | None:
    """The cure that the child has stated; None if it has none."""
    return Cure("{}", Phrase(answer["cure"], answer["cure_in_python"])) if answer["cure"] else None


def _memory(nbytes: int) -> int:
    """Default memory limit for checking a checkpoint of a given size."""
    wanted = _MEMORY + _COPIES * nbytes
    free = available_memory()
    return wanted if free is None else max(_LEAST_MEMORY, min(wanted, free))


def _report(answer: dict[str, Any]) -> NativeReport:
    if "refused" in answer:
        return NativeReport(
            (Failure("", f"the library cannot load the checkpoint: {answer['refused']}"),),
            True,
            answer["devices"],
            sandbox=tuple(answer["sandbox"]),
        )
    return NativeReport(
        tuple(Failure(path, reason) for path, reason in answer["failed"]),
        False,
        answer["devices"],
        answer["checked"],
        answer.get("sharded", 0),
        answer.get("error"),
        sandbox=tuple(answer["sandbox"]),
        warnings=tuple(answer.get("warnings", ())),
    )


# ---- where a library finds the checkpoint: in its place, or in a temporary local copy --------------------------------

_VARIABLE, _MOST_BYTES = "WHERRY_CHILD_DISK", 32 << 30
# What the libraries of a store take from the environment; a name that ends with _ is the beginning of names.
_STORE_VARIABLES = {
    "gs": ("GOOGLE_", "CLOUDSDK_", "TENSORSTORE_GCS_", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK", "GCE_METADATA_HOST"),
    "s3": ("AWS_",),
}  # fmt: skip
# Where they find a login that no variable states.
_LOGINS = {"gs": ("~/.config/gcloud",), "s3": ("~/.aws",)}


@dataclass(frozen=True, slots=True)
class NativeSource:
    """A checkpoint as a library gets it.

    Attributes:
        path: a path, or a URI.
        reads: the files and folders that the library may read.
        variables: environment variables of the store.
        note: how the library got it; empty for local files.
    """

    path: str
    reads: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    note: str = ""


@contextmanager
def native_source(checkpoint: Checkpoint, stores: Sequence[str] = ()) -> Generator[NativeSource]:
    """A checkpoint where a library can read it, while the block runs.

    Args:
        checkpoint: the opened checkpoint.
        stores: protocols of the stores from which the library itself reads.

    Raises:
        StorageError: the copy does not fit the disk, or the storage failed.
        UnsupportedError: the checkpoint exceeds the size limit of a copy.
        MismatchError: the checkpoint was changed while it was copied.
    """
    location = locate(checkpoint.uri)
    protocol = location.store.protocol
    if location.store.capabilities.local:
        yield NativeSource(location.path, files_of(checkpoint))
    elif protocol in stores:
        names = tuple(_STORE_VARIABLES[protocol])
        begin = tuple(name for name in names if name.endswith("_"))
        variables = {
            name: value for name, value in os.environ.items() if name in names or name.startswith(begin)
        }
        # The files from which the libraries of a store take the login, by default or by their variables.
        usual = (str(Path(name).expanduser()) for name in _LOGINS[protocol])
        logins = (*usual, *(value for value in variables.values() if value.startswith("/")))
        yield NativeSource(checkpoint.uri, logins, variables, f"it reads {protocol}:// itself")
    else:
        with temporary_folder("wherry-native-") as folder:
            nbytes, path = _copy(checkpoint, local_location(folder))
            note = f"it reads no {protocol}://: {show_size(nbytes)} were copied to a temporary folder"
            yield NativeSource(path, (path,), note=note)


def files_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The paths of a local checkpoint, and of those of its files that links lead out of its folder.

    Args:
        checkpoint: the opened checkpoint.
    """
    pin = take_pin(checkpoint)
    place = locate(checkpoint.uri).path
    folder = os.path.realpath(place)  # unlike `resolve`, it takes a link that leads to itself for a path
    real = {Path(os.path.realpath(pin.base.join(name).path)) for name in pin.members}
    return (place, *sorted(str(path) for path in real if not path.is_relative_to(folder)))


def _copy(checkpoint: Checkpoint, folder: Location) -> tuple[int, str]:
    """Copy the files of a checkpoint; returns their bytes, and the path of the copy."""
    pin = take_pin(checkpoint)
    nbytes = sum(entry.size for entry in pin.members.values())
    _require_room(nbytes, checkpoint.uri, Path(folder.path))
    place = folder.join(locate(pin.uri).name)
    home = place if pin.base.uri == pin.uri else folder  # the folder that the members' names are relative to
    copy_files([(pin.base.member(name), home.member(name), one) for name, one in pin.members.items()], None)
    pin.require_unchanged(checkpoint)
    return nbytes, place.path


def _require_room(nbytes: int, uri: str, folder: Path) -> None:
    stated = os.environ.get(_VARIABLE) or service("settings").configured_value("child.disk")
    most = parse_size(stated) if stated else _MOST_BYTES
    if nbytes > most:
        raise UnsupportedError(
            f"the library reads only local files, and the checkpoint has {show_size(nbytes)}, which exceeds the limit "
            f"of {show_size(most)} for a temporary copy",
            uri=uri,
            cure=Cure(
                "raise the limit: export {}={}; or fetch it first: {}",
                _VARIABLE,
                nbytes,
                Command("fetch", uri, Blank("DIR")),
            ),
        )
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise StorageError(
            f"the disk is too small for a temporary copy: {show_size(nbytes)} are needed, {show_size(free)} are free",
            uri=uri,
            cure="set TMPDIR to a folder with more free space",
        )
