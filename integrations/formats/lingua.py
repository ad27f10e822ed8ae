"""Meta Lingua's checkpoints: step folders (DCP with `params.json` and train states) and `consolidated/`.

A step folder is written so that `init_ckpt_path` accepts it; one that Lingua resumes from (`--set resume=true`) needs
the real moments and train states of the source. Lingua itself calls `dcp.load({"model": …})` and, for
`consolidated.pth`, `torch.load(…, weights_only=True)["model"]`; the tests do the same.

A step folder has a name of ten digits and holds DCP files, `params.json` (the whole configuration: `model`, `data`,
`distributed`, …) and, written last, `train_state_<rank>.json` for each rank of data parallelism. Each rank of Lingua
separately resumes from the newest step that has its `train_state_<rank>.json`. To initialise a model (`init_ckpt_path`)
the DCP files suffice, and building that model requires `params.json`. So a step with optimizer state but without all
train states is an interrupted save. Lingua treats every folder whose name starts with ten digits as a step, and its
clean-up fails on folders inside a step other than `consolidated`.
Source: lingua/checkpoint.py, apps/main/train.py, apps/main/generate.py at 437d680.

Its state is {model: {parameter: tensor}, optim: {state: {parameter: {exp_avg, exp_avg_sq, step}}, param_groups: […]}},
where names of parameters keep their dots. In DCP an item has one flat name, the parts joined with dots; dicts always
become items, lists only if they hold tensors or dicts, so that `betas` is one item with two values below it.
`consolidated.pth` stores the nested form. A bare state dict has only the parameters, without `model`.
Source: lingua/checkpoint.py at 437d680, torch/distributed/checkpoint/_nested_dict.py of torch 2.13.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from wherry.core.account import FILES, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.manifest import Manifest, without_chunks
from wherry.core.numbers import decimal_number
from wherry.core.steps import step_number
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, IncompleteError, UnrepresentableError, UsageError
from wherry.formats.format import Adapted, Format, Glimpse, Holds, Opened, Option, Options, Signs
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.torch.archive import read_archive
from wherry.integrations.containers.torch.layout import WRITABLE, Archives, archives_map, build, pickle_object
from wherry.integrations.formats import dcp
from wherry.integrations.formats.dcp.folder import METADATA
from wherry.integrations.formats.huggingface.folder import read_json, surroundings
from wherry.integrations.formats.meta import single_form
from wherry.layout.tree_reading import read_tree
from wherry.mover.read import read_array
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

NESTED, _PICKLE = "planner_data", "pickle"
MODEL, OPTIM = "model", "optim"
EMBEDDINGS = "tok_embeddings.weight"
TIED = "output.tied_module.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE, _GROUPS = "state", "param_groups"
_METAS_OWN = "rope.freqs"
_ROOTS = (MODEL, OPTIM)


def nested_of(name: str) -> tuple[str | int, ...]:
    """The nested path of a flat name of Lingua; for other names, the name itself."""
    root, _, rest = name.partition(".")
    if root == MODEL and rest:
        return (MODEL, rest)
    kind, _, rest = rest.partition(".")
    if root == OPTIM and kind == _STATE and "." in rest:
        return (OPTIM, _STATE, *rest.rsplit(".", 1))
    number, _, key = rest.partition(".")
    at = decimal_number(number)
    if root == OPTIM and kind == _GROUPS and at is not None and key:
        return (OPTIM, _GROUPS, at, key)
    return (name,)


def flat(source: Manifest, uri: str) -> Adapted:
    """Translate a source's tree to the items of a Lingua step folder.

    Raises:
        UnrepresentableError: the names are not those of a Lingua model.
    """
    nested = any(len(path) > 1 and path[0] == MODEL for path in source.tensors)
    opened = _opened_lists(source) if nested else frozenset[KeyPath]()
    names = {path: _flat_path(path, source, opened, nested=nested) for path in _paths(source)}
    _require_model((path[0] for path in names.values() if path), f"{MODEL}.{EMBEDDINGS}", uri)
    lists = frozenset(_flat_path(path, source, opened, nested=nested) for path in source.lists - opened)
    own = {path[0]: list(nested_of(path[0])) for path in names.values() if path}
    notes = _notes(source, lambda path: _flat_path(path, source, opened, nested=nested))
    return Adapted(names, lists, {NESTED: {**own, **_planned_paths(source)}, **notes})


def deep(source: Manifest, uri: str) -> Adapted:
    """Translate a source's tree to the nested dict of `consolidated.pth`.

    Raises:
        UnrepresentableError: the names are not those of a Lingua model.
    """
    names = {path: _deep_path(path, source) for path in _paths(source)}
    _require_model(
        (path[1] for path in names.values() if len(path) > 1 and path[0] == MODEL), EMBEDDINGS, uri
    )
    lists = {_deep_path(path, source) for path in source.lists}
    for path in _paths(source):
        for depth, part in enumerate(_plan_of(path[0], source)):
            if type(part) is int:
                lists.add(tuple(map(str, _plan_of(path[0], source)[:depth])))
    return Adapted(names, frozenset(lists), _notes(source, lambda path: _deep_path(path, source)))


def _paths(source: Manifest) -> Iterable[KeyPath]:
    return (*source.tensors, *source.values, *source.empties)


def _bare(source: Manifest) -> bool:
    return (EMBEDDINGS,) in source.tensors


def _flat_path(path: KeyPath, source: Manifest, opened: frozenset[KeyPath], *, nested: bool) -> KeyPath:
    """Join the parts of a path that form the name of its item; a list of plain values is one item."""
    if nested and path and path[0] in _ROOTS:
        shut = (cut for cut in range(1, len(path)) if path[:cut] in source.lists and path[:cut] not in opened)
        cut = next(shut, len(path))
        return (".".join(path[:cut]), *path[cut:])
    if not path or not _bare(source):
        return path
    return (f"{MODEL}.{path[0]}", *path[1:])


def _opened_lists(source: Manifest) -> frozenset[KeyPath]:
    """The lists that hold tensors or dicts, which DCP splits into items."""
    holding: set[KeyPath] = set()
    for path in _paths(source):
        nodes = [path[:cut] for cut in range(len(path))]
        inside = path in source.tensors or source.empties.get(path) == "dict"
        for node in reversed(nodes):
            if inside and node in source.lists:
                holding.add(node)
            inside = inside or node not in source.lists
    return frozenset(holding)


def _notes(source: Manifest, rename: Callable[[KeyPath], KeyPath]) -> dict[str, Any]:
    """Classes and keys that key paths do not state (`pickle/tree.py`), under the new paths."""
    notes = source.custom.get(_PICKLE)
    if not isinstance(notes, dict):
        return {}
    return {
        _PICKLE: {
            kind: {render(rename(parse(path))): said for path, said in rows.items()}
            for kind, rows in notes.items()
        }
    }


def _planned_paths(source: Manifest) -> Mapping[str, Any]:
    planned = source.custom.get(NESTED)
    return planned if isinstance(planned, dict) else {}


def _plan_of(name: str, source: Manifest) -> tuple[str | int, ...]:
    """The nested path of a flat name: that of the source, else by Lingua's own rule."""
    if _bare(source):
        return (MODEL, name)
    return tuple(_planned_paths(source).get(name) or nested_of(name))


def _deep_path(path: KeyPath, source: Manifest) -> KeyPath:
    name, rest = path[:1], path[1:]
    if not name or (name[0] in _ROOTS and rest):
        return path
    return (*map(str, _plan_of(name[0], source)), *rest)


def _require_model(names: Iterable[str], wanted: str, uri: str) -> None:
    found = set(names)
    if wanted not in found:
        raise UnrepresentableError(
            f"missing parameter {wanted}: the source does not have Lingua's parameter names",
            uri=uri,
            cure="convert a checkpoint with Lingua's names, or choose another target format",
        )
    if {_METAS_OWN, f"{MODEL}.{_METAS_OWN}"} & found:
        raise UnrepresentableError(
            f"unsupported parameter {_METAS_OWN} of Meta's Llama: Lingua cannot use its params.json",
            uri=uri,
            cure="choose another target format",
        )


PARAMS = "params.json"
CONSOLIDATED, CONSOLIDATED_FOLDER = "consolidated.pth", "consolidated"
LEAST_PARAMS = (
    b'{"model": {"dim": 8}, "data": {"tokenizer": {"name": "bytes", "path": null}},'
    b' "distributed": {"model_dtype": "bf16"}}'
)
_TRAIN_STATE = re.compile(r"train_state_(\d{5})\.json")
_STEP = re.compile(r"\d{10}")
_MOST_RANKS = 100_000
# Keys of params.json that load_consolidated_model_and_tokenizer requires.
_REQUIRED = (("model",), ("distributed", "model_dtype"), ("data", "tokenizer", "name"))


def step_name(step: int) -> str:
    """The folder name of a step."""
    return f"{step:010d}"


def is_step(name: str) -> bool:
    """Whether Lingua treats a folder of this name as a step."""
    return _STEP.match(name) is not None


def train_states(names: Collection[str]) -> list[str]:
    """The train states among these names, sorted by rank."""
    return sorted(name for name in names if _TRAIN_STATE.fullmatch(name))


def peek_params(location: Location) -> dict[str, Any]:
    """The configuration of a folder; empty without a valid configuration of Lingua."""
    try:
        found = read_json(location.join(PARAMS))
    except CorruptError:
        return {}  # `open` reads it again and reports the error
    return found if isinstance(found.get("model"), dict) else {}


def read_params(
    location: Location, names: Collection[str], otherwise: str = Cure("pass {}", Argument("format", "dcp"))
) -> dict[str, Any]:
    """The configuration of a folder.

    Args:
        location: the folder.
        names: of its files.
        otherwise: how to read only the arrays, for the error.

    Raises:
        IncompleteError: the configuration is missing.
        CorruptError: the file is not a configuration of Lingua.
    """
    if PARAMS not in names:
        raise IncompleteError(
            f"file not found: {PARAMS}: Lingua cannot build the model without it",
            uri=location.uri,
            cure=Cure("restore {} from the run, or {} to read only the arrays", PARAMS, otherwise),
        )
    found = read_json(location.join(PARAMS))
    if not isinstance(found.get("model"), dict):
        raise CorruptError(f"invalid {PARAMS}: missing key 'model'", uri=location.uri, cure="restore it")
    return found


def require_params(location: Location) -> None:
    """Refuse a configuration from which Lingua cannot build the model.

    Args:
        location: the file.

    Raises:
        UnrepresentableError: keys are missing; the error names them.
    """
    found = read_json(location)
    lacking = [".".join(keys) for keys in _REQUIRED if _at(found, keys) is None]
    if lacking:
        raise UnrepresentableError(
            f"{PARAMS} of the source is not a Lingua configuration: missing {', '.join(lacking)}",
            uri=location.uri,
            cure=f"put Lingua's {PARAMS} (from the run, or written for this model) next to the source's tensors",
        )


def _at(found: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def read_step(location: Location, names: Collection[str]) -> int | None:
    """The step in the train states; None if there are none.

    Raises:
        IncompleteError: one of them is truncated.
        CorruptError: they state different steps, or something that is no number.
    """
    steps: set[Any] = set()
    for name in train_states(names):
        try:
            step = read_json(location.join(name)).get("step")
        except CorruptError as error:
            raise IncompleteError(
                f"{name} is truncated: {error.what}", uri=location.uri, cure="use an earlier step"
            ) from error
        if isinstance(step, list | dict):
            raise CorruptError(
                f"the step in {name} is a {type(step).__name__}, not a number",
                uri=location.uri,
                cure="use another step",
            )
        steps.add(step)
    if len(steps) > 1:
        raise CorruptError(
            f"train states of different steps: {sorted(map(str, steps))}",
            uri=location.uri,
            cure="use another step",
        )
    step = next(iter(steps), None)
    return step if type(step) is int else None


def require_train_states(location: Location, names: Collection[str], params: Mapping[str, Any]) -> None:
    """Refuse a step with optimizer state whose train states are not complete.

    Raises:
        IncompleteError: train states are missing; the error names the first.
    """
    sizes = [_at(params, ("distributed", key)) for key in ("dp_replicate", "dp_shard")]
    said = math.prod(sizes) if all(type(size) is int for size in sizes) else 1
    there = train_states(names)
    last = int(there[-1][-10:-5]) + 1 if there else 1
    wanted = [f"train_state_{rank:05d}.json" for rank in range(max(last, min(said, _MOST_RANKS)))]
    missing = [name for name in wanted if name not in there]
    if missing:
        raise IncompleteError(
            f"file not found: {missing[0]} ({len(missing)} of {len(wanted)} train states missing): "
            "the save was interrupted",
            uri=location.uri,
            cure=Cure("use an earlier step, or pass {} to read only the arrays", Argument("format", "dcp")),
        )


def with_ties(tensors: Mapping[KeyPath, TensorSpec]) -> dict[KeyPath, TensorSpec]:
    """The tensors, with the second copy of tied embeddings marked: Lingua stores both in full."""
    found = dict(tensors)
    for path, spec in tensors.items():
        if path and path[-1].endswith(TIED):
            first = (*path[:-1], path[-1].removesuffix(TIED) + EMBEDDINGS)
            other = tensors.get(first)
            if other is not None and (other.shape, other.dtype) == (spec.shape, spec.dtype):
                found[path] = replace(spec, tags={**(spec.tags or {}), "tied": render(first)})
    return found


def has_optimizer(manifest: Manifest) -> bool:
    """Whether a step holds optimizer state."""
    return any(path[0].startswith(f"{OPTIM}.") for path in manifest.tensors if path)


def require_no_optimizer(manifest: Manifest) -> None:
    """Refuse optimizer state in a step that Lingua should not resume from.

    Raises:
        UnrepresentableError: the step would look like an interrupted save.
    """
    if has_optimizer(manifest):
        raise UnrepresentableError(
            "the source contains optimizer state, which Lingua only reads when it resumes",
            cure=Cure(
                "pass `{}` to write the weights for init_ckpt_path, or write a step to resume from with `{}`",
                Argument("only", "params"),
                Argument("set", "resume=true"),
            ),
        )


def require_moments(manifest: Manifest) -> None:
    """Refuse a target that Lingua should resume from if moments or train states are missing.

    Raises:
        UnrepresentableError: something is missing; the error names it.
    """
    cure = Cure(
        "omit `{}`, since init_ckpt_path needs only the weights; or use a source with its moments",
        Argument("set", "resume"),
    )
    names = {path[0] for path in manifest.tensors if path}
    own = (name for name in names if name.startswith(f"{MODEL}.") and not name.endswith(TIED))
    parameters = [name.removeprefix(f"{MODEL}.") for name in own]
    lacking = [
        f"{OPTIM}.state.{name}.{moment}"
        for name in sorted(parameters)
        for moment in (*MOMENTS, "step")
        if f"{OPTIM}.state.{name}.{moment}" not in names
    ]
    if lacking:
        raise UnrepresentableError(
            f"missing {lacking[0]} ({len(lacking)} missing): Lingua cannot resume without it", cure=cure
        )
    if not train_states([companion.name for companion in manifest.companions]):
        raise UnrepresentableError(
            "missing train_state_00000.json: Lingua cannot resume without it", cure=cure
        )


def refuse_live(target: Location, *, into: bool) -> None:
    """Refuse to write a step into the folder of a run, unless `into` is set.

    Raises:
        UsageError: Lingua would treat it as a step of the run.
    """
    if into or not is_step(target.name):
        return
    siblings = [entry.name for entry in target.parent.entries() if entry.is_dir and entry.name != target.name]
    live = target.parent.name == "checkpoints" and target.parent.exists()
    if live or any(is_step(name) for name in siblings):
        raise UsageError(
            "Lingua would treat the target as a step of the run in that folder, and may resume from it or delete it",
            uri=target.uri,
            cure=Cure("write to another folder, or pass `{}` if this is intended", Argument("into")),
        )


_HEAD = 1 << 16
_WRITER = "lingua"
_CONSOLIDATED_VERSION = f"{CONSOLIDATED} + {PARAMS}"
_RESUME = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _version(names: Collection[str]) -> str:
    states = " + train_state_<rank>.json" if train_states(names) else ""
    return f"DCP + {PARAMS}{states}"


def _detect(glimpse: Glimpse) -> Detection | None:
    first = dcp.find_evidence(glimpse)
    found = None if first is None else _find_evidence(glimpse)
    if first is None or found is None:
        return None
    version, step = _version(glimpse.entries), step_number(glimpse.location.name)
    return glimpse.detected("lingua", version, _WRITER, first, found, step=step)


def _find_evidence(glimpse: Glimpse) -> Evidence | None:
    """Evidence that DCP files are Lingua's: its train states, its configuration, or its names in a step folder."""
    names = glimpse.entries
    states = train_states(names)
    if states:
        return Evidence(states[0], f"train states of {len(states)} ranks in Lingua's form")
    if PARAMS in names and peek_params(glimpse.location):
        return Evidence(PARAMS, "a configuration with `model` in Lingua's form")
    if is_step(glimpse.location.name) and METADATA in names:
        head = glimpse.location.join(METADATA).read(0, _HEAD)
        if EMBEDDINGS.encode() in head:
            return Evidence(METADATA, f"contains {EMBEDDINGS}, in a folder with a name of ten digits")
    return None


def _open(location: Location, detection: Detection) -> Opened:
    opened = dcp.open_folder(location, detection)
    manifest = opened.manifest
    names = [companion.name for companion in manifest.companions]
    params = read_params(location, names)
    said = read_step(location, names)
    if has_optimizer(manifest):
        require_train_states(location, names, params)
    step = detection.step if detection.step is not None else said
    manifest = replace(
        manifest, tensors=with_ties(manifest.tensors), step=step, origin=_origin(manifest, params)
    )
    found = replace(opened.detection, step=step, writer=f"{_WRITER} ({opened.detection.writer})")
    if said is not None and said != step:
        found = found.seen(Evidence(train_states(names)[0], f"states step {said}"))
    reason = "the tensors are read from the files that Lingua made it of"
    whole = ignored_file(CONSOLIDATED_FOLDER, FILES, "the same weights in one file", reason)
    ignored = tuple(whole if entry.path == whole.path else entry for entry in opened.ignored)
    return Opened(found, manifest, opened.reader, ignored)


def _origin(manifest: Manifest, params: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: params[name] for name in ("name", "model") if name in params}
    return {**manifest.origin, **kept}


def _prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest without the train states that Lingua must not resume from."""
    _require_companion(manifest)
    word = str(options["resume"]).lower()
    if word not in _RESUME:
        raise UsageError(
            f"invalid value for resume: {options['resume']!r}; expected true or false",
            cure="pass resume=true or resume=false",
        )
    manifest = without_chunks(manifest)
    if _RESUME[word]:
        require_moments(manifest)
        return manifest
    require_no_optimizer(manifest)
    return _without_states(manifest)


def _without_states(manifest: Manifest) -> Manifest:
    """A manifest without the companions that are train states."""
    states = set(train_states([companion.name for companion in manifest.companions]))
    left = tuple(companion for companion in manifest.companions if companion.name not in states)
    return replace(manifest, companions=left)


def _require_companion(manifest: Manifest) -> None:
    if PARAMS not in [companion.name for companion in manifest.companions]:
        raise UnrepresentableError(
            f"missing {PARAMS}: Lingua requires it next to the source's tensors",
            cure=f"put Lingua's {PARAMS} (from the run, or written for this model) next to them; to convert only the "
            "tensors, choose the target format dcp or torch-zip",
        )


def _layout(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    _require_params(scene)
    return dcp.layout_of(manifest, options, scene)


def _require_params(scene: Scene) -> None:
    params = scene.companion(PARAMS)
    if params is not None:
        require_params(params)


def _detect_consolidated(glimpse: Glimpse) -> Detection | None:
    if CONSOLIDATED not in glimpse.entries:
        return None
    # It is Lingua's by its configuration, its tree, or the folder's name.
    if PARAMS in glimpse.entries:
        known = bool(peek_params(glimpse.location))
    else:
        form = single_form(glimpse.location)
        known = form == "nested" or (form is None and glimpse.location.name == CONSOLIDATED_FOLDER)
    if not known:
        return None
    parent = glimpse.location.parent.name
    step = decimal_number(parent) if is_step(parent) else None
    seen = Evidence(CONSOLIDATED, "the name of Lingua's consolidated checkpoints")
    return glimpse.detected("lingua-consolidated", _CONSOLIDATED_VERSION, _WRITER, seen, step=step)


def _open_consolidated(location: Location, detection: Detection) -> Opened:
    archive = read_archive(location.join(CONSOLIDATED))
    own = location.join(CONSOLIDATED).present()
    neighbours = surroundings(location, {CONSOLIDATED}, CONSOLIDATED)
    params = read_params(
        location, neighbours.names, f"pass the file {shlex.quote(location.join(CONSOLIDATED).uri)}"
    )
    reader = StridedReader(location, archive.placed, (own, *neighbours.companions), neighbours.names)
    manifest = archive.tree.manifest(with_ties(archive.specs), detection.step)
    manifest = replace(manifest, kind=read_tree(manifest).whole, companions=neighbours.listed)
    step = detection.step if detection.step is not None else _optimizer_step(manifest, reader)
    manifest = replace(manifest, step=step, origin=_origin(manifest, params))
    seen = Evidence(CONSOLIDATED, f"{len(archive.placed)} tensors, step {step} by folder or optimizer")
    precise = replace(detection, step=step, kind=manifest.kind).seen(seen)
    return Opened(precise, manifest, reader, tuple(neighbours.ignored))


def _optimizer_step(manifest: Manifest, reader: StridedReader) -> int | None:
    """The step of the optimizer, which has one scalar for each parameter."""
    for path, spec in manifest.tensors.items():
        if path[:2] == (OPTIM, "state") and path[-1] == "step" and spec.shape == ():
            value = read_array(reader, spec, ())
            return int(value) if math.isfinite(value) and value == int(value) else None
    return None


def _prepare_consolidated(manifest: Manifest, _options: Options) -> Manifest:
    _require_companion(manifest)
    return without_chunks(_without_states(manifest))


def _layout_consolidated(manifest: Manifest, _options: Options, scene: Scene) -> FileMap:
    _require_params(scene)
    return archives_map({CONSOLIDATED: Archives([pickle_object(build(manifest))])})


FORMATS = (
    Format(
        name="lingua",
        title="Meta Lingua, step folder",
        detect=_detect,
        signs=dcp.SIGNS,
        open=_open,
        layout=_layout,
        holds=replace(dcp.HOLDS, needs={PARAMS: LEAST_PARAMS}, names=((f"{MODEL}.{EMBEDDINGS}",),)),
        refines=("dcp",),
        system="lingua",
        commit_members=(METADATA,),
        options={
            **dcp.OPTIONS,
            "resume": Option(
                "false", "`true` writes a step that Lingua can resume from, with moments and train states"
            ),
        },
        loaded_by="Lingua 437d680; tested with its calls to torch 2.13",
        version=lambda manifest, _options: _version([one.name for one in manifest.companions]),
        step_folder=step_name,
        prepare=_prepare,
        adapt=flat,
        guard=lambda target, into: refuse_live(target, into=into),
    ),
    Format(
        name="lingua-consolidated",
        title="Meta Lingua, consolidated",
        detect=_detect_consolidated,
        signs=Signs(entries=frozenset({CONSOLIDATED})),
        open=_open_consolidated,
        layout=_layout_consolidated,
        holds=Holds(
            types=True,
            dtypes=WRITABLE,
            values=True,
            empties=True,
            companions=True,
            needs={PARAMS: LEAST_PARAMS},
            names=((MODEL, EMBEDDINGS),),
        ),
        refines=("torch-zip",),
        system="lingua",
        commit_members=(CONSOLIDATED,),
        loaded_by="Lingua 437d680; tested with its calls to torch 2.13",
        version=lambda _manifest, _options: _CONSOLIDATED_VERSION,
        prepare=_prepare_consolidated,
        adapt=deep,
    ),
)
