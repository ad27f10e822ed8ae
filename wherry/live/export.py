"""export: write a checkpoint directly from a live training state, without a file in between.

The plan is made first, from shapes alone, so that an unsupported state is an error before a byte is copied. Then
training waits while its arrays are copied (a real copy: training may donate or overwrite them afterwards). Everything
else happens in the background, in the same engine as every conversion. If several processes hold one state together,
all of them call `export`; each provides its share, and rank 0 writes.

    handle = wherry.export(state, "/ckpt/llama/hf", to="huggingface", system="maxtext", config="config.json")
    ...                                          # training continues
    handle.result()                              # the receipt; raises if the export failed
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Unpack

from wherry.converter.keywords import OF_FILES, ExportKeywords, spelled_out
from wherry.core.progress import logger
from wherry.core.request import ConvertRequest, TargetRequest, options_of
from wherry.errors import (
    AmbiguousError,
    MissingExtraError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
)
from wherry.live.handle import Export
from wherry.live.request import export_request
from wherry.live.run import Begun, begin

log = logger("wherry.export")
# Errors that the same call would have at every step of the training.
_WRONG_REQUESTS = (UsageError, UnsupportedError, AmbiguousError, UnrepresentableError, MissingExtraError)


@spelled_out(ExportKeywords, options_of(TargetRequest, ConvertRequest), without=OF_FILES)
def export(
    state: object,
    uri: str | os.PathLike[str],
    *,
    to: str,
    snapshot: str = "host",
    step: int | None = None,
    on_done: Callable[[Export], None] | None = None,
    emit: bool | None = None,
    exit_wait: float = 600.0,
    **common: Unpack[ExportKeywords],
) -> Export:
    """Write a checkpoint of a live training state in the background.

    Args:
        state: a JAX pytree (sharded arrays, Flax boxes, NNX state, Penzai model), a torch module or a state dict
            (DTensors included).
        uri: the target; with `into` the run folder.
        to: target format, a name or alias.
        snapshot: `host` copies the state into memory, `disk` into a file next to the target.
        step: of training; by default the state's own `step` if it has one.
        on_done: called in the background with the handle when the export has ended, successfully or not.
        emit: whether the end is posted as an event (see `wherry.emit`); by default if `PREFECT_API_URL` is set.
        exit_wait: seconds for which the process waits for the export when it exits.
        common: other fields of `wherry.live.request.ExportRequest` and of its conversion, as in ExportKeywords.

    Returns:
        A handle, as soon as the snapshot is taken. Every later error, and every error of the storage, is logged and
        kept in the handle.

    Raises:
        UsageError, UnsupportedError, AmbiguousError, UnrepresentableError, MissingExtraError: the request cannot be
            fulfilled at any time: an unknown format or option, a state that the target cannot hold. Nothing was copied.
    """
    clock = time.monotonic()
    handle = Export(os.fspath(uri), step, exit_wait)

    begun: Begun | None = None

    def then(ended: Export) -> None:
        if begun is None or begun.leads:
            _tell(ended, emit)
        if on_done is not None:
            on_done(ended)

    try:
        request = export_request(uri=handle.uri, to=to, snapshot=snapshot, step=step, **common)
        begun = begin(state, request)
    except _WRONG_REQUESTS:
        raise
    except Exception as error:  # noqa: BLE001  the storage may recover before the next save: training goes on
        handle.failed(error)
        handle.blocked = time.monotonic() - clock
        handle.end(then)
        return handle
    handle.blocked = time.monotonic() - clock
    handle.step = begun.step
    handle.start(begun.work, then, begun.undo)
    return handle


def _tell(handle: Export, wanted: bool | None) -> None:
    """Post the end of an export; if the server cannot be reached, only log it."""
    from wherry.core.emit import COMMITTED, FAILED, emit

    if wanted is False or (wanted is None and not os.environ.get("PREFECT_API_URL")):
        return
    receipt, error = handle.receipt, handle.error
    if receipt is None and error is None:
        return
    uri = receipt.target.uri if receipt else handle.uri
    payload = {"format": receipt.target.format} if receipt else {}
    payload |= {"error": error.to_json()} if error else {}
    try:
        emit(uri, event=COMMITTED if receipt else FAILED, step=handle.step, payload=payload)
    except (ValueError, OSError) as failure:
        log.warning("could not post the end of the export to %s: %s", uri, failure)
