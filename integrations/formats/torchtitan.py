"""torchtitan's steps: DCP folders whose model is at the top, with the train states of the run next to it.

A step is `step-N/`. The model's parameters have their own names (`tok_embeddings.weight`, `layers.0.…`), at the
top and not below `model`; what else is saved has the names of its objects: `optimizer.state.PARAMETER.exp_avg`,
`optimizer.param_groups.PARAMETER.lr`, `lr_scheduler.last_epoch`, `train_state.step`, `dataloader.dp_rank_0`. A
last step has the model alone, perhaps in another element type. 0.3 calls the projections
`attention.qkv_linear.wq`, the output `lm_head` and the experts `moe.routed_experts.inner_experts.w1_EFD`; 0.2
`attention.wq`, `output`, `moe.experts.w1`.

Nothing in a step says which model it is: `torchtitan_config.json` is wherry's own, in the names of torchtitan's
config classes. torchtitan builds the model from the Python config of its run, and loads by name with `dcp.load`,
which requires every name that it asks for.
Source: torchtitan 0.3.0, components/checkpointer (base.py, dcp.py), components/optimizer (utils.py), train.py.
"""

from __future__ import annotations

from dataclasses import replace

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Manifest, without_chunks
from wherry.core.steps import step_number
from wherry.errors import UnrepresentableError
from wherry.formats.format import Adapted, Format, Glimpse, Opened
from wherry.integrations.formats import dcp
from wherry.integrations.formats.dcp.folder import METADATA
from wherry.integrations.formats.dcp.layout import NESTED, VERSION
from wherry.store.location import Location

_HEAD = 1 << 18
_OF_LINGUA = "params.json"  # a folder with this file is Lingua's, whose names these are too
_EMBEDDINGS = "tok_embeddings.weight"
_OF_STATES = ("optimizer", "lr_scheduler", "train_state", "dataloader")
# What else is among the names: a part of the optimizer's state, with which a folder begins, or of a layer.
_STATES = (b"optimizer.state.tok_embeddings.weight.", b"optimizer.param_groups.tok_embeddings.weight.")
_LAYER = b"layers.0."
_PREFIX = "model."  # of Lingua
_STEP_FOLDER = "step-"


def _detect(glimpse: Glimpse) -> Detection | None:
    first = dcp.find_evidence(glimpse)
    if first is None or METADATA not in glimpse.entries or _OF_LINGUA in glimpse.entries:
        return None
    found = _find_evidence(glimpse.location)
    if found is None:
        return None
    seen, step = Evidence(METADATA, found), step_number(glimpse.location.name)
    return glimpse.detected("torchtitan", VERSION, "torchtitan", first, seen, step=step)


def _find_evidence(location: Location) -> str | None:
    """The evidence that the names are torchtitan's: its optimizer's state, or the parameters of a decoder."""
    head = location.join(METADATA).read(0, _HEAD)
    state = next((one for one in _STATES if one in head), None)
    if state is not None:
        return f"contains {state.decode().strip('.')}"
    in_step = location.name.startswith(_STEP_FOLDER) and step_number(location.name) is not None
    if _at_top(head) and (in_step or _LAYER in head):
        return f"contains {_EMBEDDINGS} at the top{f', in a folder {_STEP_FOLDER}N' if in_step else ''}"
    return None


def _at_top(head: bytes) -> bool:
    """Whether the embeddings are a whole name: a pickle's text follows its length, of one byte or of four.

    Lingua's names have a prefix, but its nested paths have the same text as a part.
    """
    return _is_whole(_EMBEDDINGS, head) and not _is_whole(_PREFIX + _EMBEDDINGS, head)


def _is_whole(text: str, head: bytes) -> bool:
    name, size = text.encode(), len(text)
    return any(start + name in head for start in (b"\x8c" + bytes([size]), b"X" + size.to_bytes(4, "little")))


def _open(location: Location, detection: Detection) -> Opened:
    opened = dcp.open_folder(location, detection)
    writer = f"torchtitan ({opened.detection.writer})"
    return replace(opened, detection=replace(opened.detection, writer=writer))


def _adapt(source: Manifest, uri: str) -> Adapted:
    """Translate a source's tree: the names stay, and each gets the nested path that torchtitan's objects have.

    Raises:
        UnrepresentableError: the names are not those of a torchtitan model.
    """
    paths = (*source.tensors, *source.values, *source.empties)
    names = {path[0] for path in source.tensors if path}
    lacking = next((name for name in (_EMBEDDINGS, _LAYER.decode()) if not _begins(names, name)), None)
    if lacking is not None:
        raise UnrepresentableError(
            f"missing parameter {lacking.rstrip('.')}: the source does not have torchtitan's parameter names",
            uri=uri,
            cure="convert a checkpoint with torchtitan's names, or choose another target format",
        )
    planned = source.custom.get(NESTED)
    known = planned if isinstance(planned, dict) else {}
    own = {path[0]: _nested_path(path[0]) for path in paths if path}
    return Adapted({path: path for path in paths}, source.lists, {**source.custom, NESTED: {**own, **known}})


def _begins(names: set[str], wanted: str) -> bool:
    """Whether one is this name, or begins with this part of names, which ends in a dot."""
    return wanted in names or (wanted.endswith(".") and any(name.startswith(wanted) for name in names))


def _nested_path(name: str) -> list[str]:
    """The nested path of a flat name: a parameter is one part, and the state of an object is below its name."""
    root, _, rest = name.partition(".")
    return [root, rest] if root in _OF_STATES and rest else [name]


FORMATS = (
    Format(
        name="torchtitan",
        title="torchtitan, step folder",
        detect=_detect,
        signs=dcp.SIGNS,
        open=_open,
        layout=dcp.layout_of,
        holds=replace(dcp.HOLDS, names=((_EMBEDDINGS,), ("layers.0.attention.wo.weight",))),
        refines=("dcp",),
        system="torchtitan",
        commit_members=(METADATA,),
        options=dcp.OPTIONS,
        loaded_by="torchtitan 0.3.0",
        version=lambda _manifest, _options: VERSION,
        step_folder=lambda step: f"{_STEP_FOLDER}{step}",
        prepare=lambda manifest, _options: without_chunks(manifest),
        adapt=_adapt,
    ),
)
