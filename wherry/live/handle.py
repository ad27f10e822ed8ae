"""The handle of an export that writes a checkpoint in the background.

No error of the storage is raised into training: errors are logged with their cure, and `result` raises them. A process
that exits while an export is running waits for it, but not longer than `exit_wait` seconds. A process that is forked
meanwhile does not: the export goes on in its parent alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from wherry.core.background import BackgroundWork, begin, end
from wherry.core.progress import logger
from wherry.core.receipt import Receipt
from wherry.errors import NotRecordedError, UsageError, WherryError, wherry_error
from wherry.store.waits import waiting

log = logger("wherry.export")
_NICE = 10  # training's own threads have priority


class Export:
    """One export that is running or has ended.

    Attributes:
        uri: the target.
        step: of training, if known.
        blocked: seconds for which training waited.
        exit_wait: seconds for which the process waits for the export when it exits.
        error: why it failed; None while it is running and if it succeeded. A NotRecordedError if the checkpoint
            is committed but not recorded.
        receipt: the receipt; None until a checkpoint is committed, and in processes that had nothing to do.
    """

    def __init__(self, uri: str, step: int | None = None, exit_wait: float = 600.0) -> None:
        self.uri = uri
        self.step = step
        self.blocked = 0.0
        self.exit_wait = exit_wait
        self.error: WherryError | None = None
        self.receipt: Receipt | None = None
        self._work = BackgroundWork(
            f"the export to {uri}", exit_wait, on_timeout=self._report_timeout, on_fork=self._fail_in_fork
        )

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._work.ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; False after `timeout` seconds. Never raises the error of the export."""
        with waiting(self.uri, what="the export to end"):
            return self._work.ended.wait(timeout)

    def result(self, timeout: float | None = None) -> Receipt | None:
        """The receipt; None in a process that had nothing to do.

        Raises:
            TimeoutError: it has not ended after `timeout` seconds.
            NotRecordedError: the checkpoint is committed, but the ledger cannot be used; `result` is the receipt.
            WherryError: why it failed.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"timed out after {timeout} s: the export to {self.uri} is still running")
        if self.error is not None:
            raise self.error
        return self.receipt

    def start(
        self,
        work: Callable[[], Receipt | None],
        then: Callable[[Export], None],
        undo: Callable[[BaseException], None],
    ) -> None:
        """Do the work in the background; `then` is called before waiting callers continue.

        Args:
            work: the work.
            then: called when it has ended.
            undo: called instead of the work if no thread can be started.
        """
        begin(self._work)
        try:
            threading.Thread(target=self.run, args=(work, then), name="wherry-export", daemon=True).start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self.failed(error)
            assert self.error is not None
            try:
                undo(self.error)
            except Exception:  # the error of the export is already kept, and training continues
                log.exception("could not release the resources of the export to %s", self.uri)
            self.end(then)

    def run(self, work: Callable[[], Receipt | None], then: Callable[[Export], None]) -> None:
        """Do the work; its error is kept and logged."""
        # Lower the priority of this thread and of those that it will start (on Linux, priority is per thread).
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError as error:
            log.debug("could not lower the priority of the export: %s", error)
        try:
            self.receipt = work()
            if self.receipt is not None:
                log.info(
                    "exported %s in %.1f s; training waited for %.2f s",
                    self.uri,
                    self.receipt.seconds,
                    self.blocked,
                )
        except BaseException as error:  # noqa: BLE001  training continues after any error
            self.receipt = error.result if isinstance(error, NotRecordedError) else None
            self.failed(error)
        self.end(then)

    def failed(self, error: BaseException) -> None:
        """Keep and log the error."""
        self.error = wherry_error(
            error, uri=self.uri, cure="report this error with the log", memory='export with snapshot="disk"'
        )
        self.error.stage = self.error.stage or "export"
        log.error(
            "export to %s %s: %s", self.uri, "is committed" if self.receipt else "failed", self.error,
            exc_info=None if isinstance(error, WherryError) else error,
        )  # fmt: skip

    def end(self, then: Callable[[Export], None]) -> None:
        """Call `then` and wake everyone who waits."""
        try:
            then(self)
        except Exception:  # a user's callback must not change the outcome of the export
            log.exception("the callback after the export to %s failed", self.uri)
        finally:
            end(self._work)

    def _report_timeout(self) -> None:
        log.error("the export to %s timed out after %.0f s; nothing was committed", self.uri, self.exit_wait)

    def _fail_in_fork(self) -> None:
        """Fail the export in a forked child, where no thread finishes it."""
        self.error = UsageError(
            "the export runs in another process, which forked this one",
            uri=self.uri,
            cure="ask for its result in the process that called wherry.export",
        )
        self._work.ended.set()
