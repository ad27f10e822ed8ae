"""The matrix of servers: each part of a site is killed at each moment of each flow, on real servers.

    python -m tests.support.server_matrix --out FILE [--flows nightly,export] [--parts ...] [--moments ...]

The rule: the next run of the deployment ends Completed, and after the time of the automations nothing is open in
Prefect, MLflow, ledger and storage. All flows of one drill are brought to the moment together, and the part is killed
once. What the rule gives 15 minutes is shortened by configuration: the automations wait less. Prefect sends heartbeats
no more often than each 30 s.

With `--away SECONDS` a server is away for that time while the runs go on (with `--stopped` it is there, but does not
answer), and the rule is that they end Completed themselves; the automations are the shipped ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import save_file

from tests.support import e2e, held_runs
from tests.support.e2e import ROOT, Child, Site, site, start_mlflow, start_prefect, start_worker
from tests.support.postgres import PostgresServer, new_database, postgres_process
from wherry.integrations.prefect.lost_runs import GRACE

PARTS = ("worker", "run", "server", "mlflow", "postgresql", "all")
MOMENTS = ("scheduled", "pending", "before the first beat", "running", "registering", "committing")
SERVERS, AT_WORK = ("server", "mlflow", "postgresql"), ("running", "registering", "committing")
"""What can be away for a while, and when."""
DEPLOYMENTS = {
    "nightly": "nightly-convert/nightly-convert",
    "export": "post-training-export/post-training-export",
    "promote": "promote/promote",
    "audit": "audit/audit",
}
FLOWS = tuple(DEPLOYMENTS)
_WAITS = " after 240 s"
_CHILDREN = {"worker": "worker", "server": "prefect", "mlflow": "mlflow"}
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
_CONVERTING = {
    "running": "wherry.converter.job:complete",
    "registering": "wherry.integrations.mlflow.runs:_link",
    "committing": "wherry.target.staging:rename_without_replacing",
}
_HOLDS: dict[str, dict[str, str]] = {
    "nightly": _CONVERTING,
    "export": _CONVERTING,
    "promote": {
        "running": "wherry.models.promote:_verify",
        "registering": "wherry.integrations.mlflow.aliases:_set",
        "committing": "wherry.ledger.record:record_event",
    },
    "audit": {
        "running": "wherry.prove.audit:ask",
        "registering": "wherry.integrations.mlflow.read:registered_versions",
        "committing": "wherry.prove.audit:_record",
    },
}
_EVERY_FLOW = {"pending": held_runs.START, "before the first beat": "prefect.flow_engine:_send_heartbeats"}
BEAT_SECONDS, PENDING_SECONDS = 40, 60
"""The shortened times of the automations: more than one beat, and more than a run of this machine needs to start."""

_CONFIG = """
ledger = "{ledger}"
[mlflow]
tracking_uri = "{mlflow}"
[concurrency]
file = 4
[routes.night]
root = "runs/night"
select = "all"
min_age = 0
first_night = "convert"
model = "{{run}}"
alias = "candidate"
[[routes.night.targets]]
format = "dcp"
uri = "out/night/{{run}}/{{step}}"
[routes.export]
root = "runs/export"
select = "all"
min_age = 0
model = "export-{{run}}"
alias = "candidate"
[[routes.export.targets]]
format = "dcp"
uri = "out/export/{{run}}/{{step|final}}"
"""


@dataclass
class Cell:
    """A part that was killed at a moment of a flow.

    Attributes:
        flow, part, moment: which cell.
        killed: how the run ended that was at the moment: the name of its state.
        following: how the next run ended.
        open: what was open afterwards; empty if the rule holds.
        missed: whether the automations missed the run, so that a later run ended it.
        seconds: that the next run took.
    """

    flow: str
    part: str
    moment: str
    killed: str = ""
    following: str = ""
    open: list[str] = field(default_factory=list)
    missed: bool = False
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the rule holds."""
        return self.following == "Completed" and not self.open


@dataclass(frozen=True)
class Away:
    """How a server is away: for how many seconds, and whether its processes are stopped, so that it does not answer."""

    seconds: float
    stopped: bool


@dataclass
class Servers:
    """A site with all parts of the matrix.

    Attributes:
        place: its folder, environment and processes.
        postgres: the server of the ledger.
        ledger: URL of the ledger.
        mlflow: URL of MLflow.
    """

    place: Site
    postgres: PostgresServer
    ledger: str
    mlflow: str

    @property
    def api(self) -> str:
        """URL of Prefect's API."""
        return self.place.environment["PREFECT_API_URL"]

    @property
    def held(self) -> Path:
        """The folder of the runs that are held."""
        return self.place.folder / "held"

    def wherry(self, *words: str) -> str:
        """The output of a command of wherry."""
        return self.place.run(sys.executable, "-m", "wherry.cli", *words)

    def submit(
        self, flow: str, parameters: dict[str, Any], hold: str | None = None, delay: float = 0.0
    ) -> str:
        """A run as a schedule makes it, which will stop at a function."""
        deployment = get(f"{self.api}/deployments/name/{DEPLOYMENTS[flow]}")["id"]
        state: dict[str, Any] = {"type": "SCHEDULED"}
        begins = time.time() + (max(delay, 1.0) if hold else delay)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(begins)) + "Z"
        state["state_details"] = {"scheduled_time": moment}
        body = {"state": state, "parameters": parameters}
        run: str = post(f"{self.api}/deployments/{deployment}/create_flow_run", body)["id"]
        if hold:
            (self.held / "wanted" / run).write_text(hold)
        return run

    def state(self, run: str) -> dict[str, Any]:
        """The state of a run."""
        found: dict[str, Any] = get(f"{self.api}/flow_runs/{run}")["state"]
        return found

    def ended(self, run: str, seconds: float) -> dict[str, Any] | None:
        """The state in which a run ended; None if it did not."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            state = self.state(run)
            if state["type"] in _ENDED:
                return state
            time.sleep(0.5)
        return None

    def beat(self, run: str) -> bool:
        """Whether the server has a heartbeat of a run."""
        wanted = {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "any_resource": {"id": [f"prefect.flow-run.{run}"]},
        }
        return bool(post(f"{self.api}/events/filter", {"filter": wanted, "limit": 1})["events"])


@contextmanager
def servers(folder: Path, *, shortened: bool = True) -> Iterator[Servers]:
    """All parts, deployed: a Prefect server, a worker, MLflow, and PostgreSQL with a ledger.

    Args:
        folder: everything lies below it.
        shortened: whether the automations wait less than the shipped ones.
    """
    place = site(folder)
    with ExitStack() as stack:
        postgres = stack.enter_context(postgres_process())
        stack.callback(place.close)
        ledger = new_database(postgres.url, "ledger").replace("postgresql://", "postgresql://")
        place.environment |= held_runs.install(folder / "held")
        place.environment |= {
            "WHERRY_CONFIG": str(folder / "wherry.toml"), "WHERRY_SETTLE_SECONDS": "0", "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([place.environment["PYTHONPATH"], str(ROOT)]),
        }  # fmt: skip
        (folder / "tmp").mkdir()
        mlflow = start_mlflow(place)
        start_prefect(place)
        (folder / "wherry.toml").write_text(_CONFIG.format(ledger=ledger, mlflow=mlflow))
        found = Servers(place, postgres, ledger, mlflow)
        infra = ROOT / "infra"
        automations = _automations(folder) if shortened else infra / "automations.yaml"
        found.wherry("deploy", str(infra / "prefect.yaml"), "--pools", str(infra / "pools"),
                     "--automations", str(automations))  # fmt: skip
        e2e.patch(
            f"{found.api}/work_pools/wherry-process", {"concurrency_limit": None}
        )  # all flows are held at once
        _begin_worker(found)
        yield found


def _begin_worker(found: Servers) -> None:
    start_worker(found.place, "wherry-process", limit=8)


def _automations(folder: Path) -> Path:
    """The shipped automations with shorter times."""
    text = (ROOT / "infra" / "automations.yaml").read_text()
    short = text.replace("within: 120\n", f"within: {BEAT_SECONDS}\n")
    short = short.replace("within: 600\n", f"within: {PENDING_SECONDS}\n")
    assert short.count(f"within: {BEAT_SECONDS}\n") == short.count(f"within: {PENDING_SECONDS}\n") == 1
    path = folder / "automations.yaml"
    path.write_text(short)
    return path


def checkpoint(found: Servers, root: str, run: str, seed: int) -> Path:
    """A source of a few small tensors."""
    path = found.place.folder / "runs" / root / run / "step_1" / "model.safetensors"
    path.parent.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    save_file({f"layer.{n}": rng.standard_normal((64, 64), np.float32) for n in range(4)}, path)
    return path


def begin(found: Servers) -> None:
    """The first night, which makes two versions of models that promotions move an alias between."""
    for number in (1, 2):
        checkpoint(found, "night", f"base-{number}", number)
    done = found.ended(found.submit("nightly", {"spec": {"routes": ["night"]}}), 300)
    assert done is not None, found.place.logs()
    assert done["type"] == "COMPLETED", (done, found.place.logs())


def parameters(found: Servers, flow: str, number: int) -> dict[str, Any]:
    """The parameters of both runs of a drill."""
    if flow == "nightly":
        checkpoint(found, "night", f"night-{number}", 1000 + number)
        return {"spec": {"routes": ["night"]}}
    if flow == "export":
        source = checkpoint(found, "export", f"export-{number}", 2000 + number)
        return {"spec": {"source": str(source), "routes": ["export"]}}
    if flow == "promote":
        return {"spec": {"subject": f"models:/base-{1 + number % 2}/1", "alias": f"champion-{number}"}}
    return {"spec": {"scope": "all"}}


def get(url: str) -> Any:
    """As `e2e.get`, of a server that is busy."""
    return _patiently(lambda: e2e.get(url))


def post(url: str, body: Any) -> Any:
    """As `e2e.post`, of a server that is busy."""
    return _patiently(lambda: e2e.post(url, body))


def _patiently(call: Callable[[], Any], tries: int = 5) -> Any:
    for left in reversed(range(tries)):
        try:
            return call()
        except OSError:
            if not left:
                raise
            time.sleep(2)
    return None


def makes_no_sense(part: str, moment: str) -> str:
    """Why a cell is left out; empty if it is not."""
    if part == "run" and moment == "scheduled":
        return "a scheduled run has no process"
    return ""


def drill(found: Servers, part: str, moment: str, flows: Sequence[str], number: int) -> list[Cell]:
    """Bring runs of the flows to a moment, kill a part, start it again, and look at the next runs."""
    cells = [Cell(flow, part, moment) for flow in flows]
    chosen = {flow: parameters(found, flow, number) for flow in flows}
    delay = 8.0 if moment == "scheduled" else 1.0
    runs = {flow: found.submit(flow, chosen[flow], _hold_of(flow, moment), delay) for flow in flows}
    if moment != "scheduled":
        for flow, run in runs.items():
            _await_held(found, flow, run, moment)
    _kill(found, part, runs.values())
    _start(found, part)
    _release(found)
    if moment == "scheduled" or part not in ("worker", "run", "all"):
        for run in runs.values():  # it lives; the next one begins a day later
            found.ended(run, 240)
    begun = time.monotonic()
    following = {flow: found.submit(flow, chosen[flow]) for flow in flows}
    for cell in cells:
        done = found.ended(following[cell.flow], 240)
        cell.seconds = round(time.monotonic() - begun, 1)
        cell.following = done["name"] if done else found.state(following[cell.flow])["name"] + _WAITS
        if done and done["type"] != "COMPLETED":
            cell.open.append(f"message: {done.get('message')}")
    return _look(found, cells, runs, following)


def absence(
    found: Servers, part: str, moment: str, flows: Sequence[str], number: int, away: Away
) -> list[Cell]:
    """Bring runs of the flows to a moment, take a server away for a while as they go on, and look how they end."""
    cells = [Cell(flow, part, moment) for flow in flows]
    chosen = {flow: parameters(found, flow, number) for flow in flows}
    runs = {flow: found.submit(flow, chosen[flow], _hold_of(flow, moment)) for flow in flows}
    for flow, run in runs.items():
        _await_held(found, flow, run, moment)
    begun = time.monotonic()
    _leave(found, part, stopped=away.stopped)
    _release(found)
    time.sleep(away.seconds)
    _return(found, part, stopped=away.stopped)
    for cell in cells:
        done = found.ended(runs[cell.flow], 240)
        cell.seconds = round(time.monotonic() - begun, 1)
        cell.killed = cell.following = done["name"] if done else found.state(runs[cell.flow])["name"]
        if cell.following != "Completed":
            cell.open.append(f"message: {done.get('message') if done else None}")
    for what in still_open(found):
        cells[0].open.append(what)
    return cells


def _leave(found: Servers, part: str, *, stopped: bool) -> None:
    if not stopped:
        _kill(found, part, ())
        return
    if part == "postgresql":
        found.postgres.signal(signal.SIGSTOP)
    else:
        _signal_tree(found.place.children[_CHILDREN[part]], signal.SIGSTOP)


def _return(found: Servers, part: str, *, stopped: bool) -> None:
    if not stopped:
        _start(found, part)
    elif part == "postgresql":
        found.postgres.signal(signal.SIGCONT)
    else:
        _signal_tree(found.place.children[_CHILDREN[part]], signal.SIGCONT)


def _look(found: Servers, cells: list[Cell], runs: dict[str, str], following: dict[str, str]) -> list[Cell]:
    """How the runs ended, and what is open.

    A run that the automations miss, since the server lost its last events, is ended by the next run that begins later,
    of any flow; where one run of a deployment is allowed at a time, its own next run waits for that.
    """
    for cell in cells:
        found.ended(runs[cell.flow], max(BEAT_SECONDS, PENDING_SECONDS) + 20)
    if any(found.state(run)["type"] not in _ENDED for run in runs.values()):
        for cell in cells:
            cell.missed = found.state(runs[cell.flow])["type"] not in _ENDED
        time.sleep(GRACE.total_seconds())
        found.ended(found.submit("audit", {"spec": {"scope": "all"}}), 240)
        for cell in cells:
            if cell.following.endswith(_WAITS) and (done := found.ended(following[cell.flow], 240)):
                cell.following = done["name"]
    for cell in cells:
        state = found.state(runs[cell.flow])
        cell.killed = state["name"]
        if state["type"] not in _ENDED:
            cell.open.append(f"Prefect: the run is {state['name']}")
    for what in still_open(found):
        for cell in cells:
            cell.open.append(what)
    return cells


def _hold_of(flow: str, moment: str) -> str | None:
    return _EVERY_FLOW.get(moment) or _HOLDS[flow].get(moment)


def _release(found: Servers) -> None:
    for held in (found.held / "wanted").iterdir():
        held.unlink()


def _await_held(found: Servers, flow: str, run: str, moment: str) -> None:
    def reached() -> bool:
        state = found.state(run)
        assert state["type"] not in _ENDED, f"{flow} was to be held at {moment}: {state}"
        return (found.held / "reached" / run).exists()

    found.place.await_(f"{flow} at {moment}", reached, 180)
    if moment == "before the first beat":
        assert not found.beat(run)
    elif moment not in ("pending", "scheduled"):
        with suppress(AssertionError):  # the server writes events every few seconds
            found.place.await_("a beat", lambda: found.beat(run), 8)


def _kill(found: Servers, part: str, runs: Any) -> None:
    if part in ("run", "worker", "all"):
        _kill_runs(found, runs)
    for one, name in _CHILDREN.items():
        if part in (one, "all"):
            child = found.place.children[name]
            _signal_tree(child, signal.SIGKILL)
            child.kill()
    if part in ("postgresql", "all"):
        found.postgres.kill()


def _kill_runs(found: Servers, runs: Any) -> None:
    """The processes of the runs: each has its id in the environment."""
    wanted = set(runs)
    worker = found.place.children["worker"]
    for process in psutil.Process(worker.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.environ().get(held_runs.RUN) in wanted:
                process.kill()


def _signal_tree(child: Child, number: int) -> None:
    """Send a signal to a process and to all that it started, whichever sessions they made."""
    assert child.process is not None
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(child.process.pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _start(found: Servers, part: str) -> None:
    children = found.place.children
    if part in ("postgresql", "all"):
        found.postgres.start()
    for one, url in (("mlflow", f"{found.mlflow}/health"), ("server", f"{found.api}/health")):
        if part in (one, "all"):
            child = children[_CHILDREN[one]]
            child.start()
            found.place.await_url(child, url)
    if part in ("worker", "all") or not children["worker"].running:
        children["worker"].start()


def still_open(found: Servers) -> list[str]:
    """What is open in MLflow, ledger and storage."""
    import psycopg

    rows: list[str] = []
    experiments = post(f"{found.mlflow}/api/2.0/mlflow/experiments/search", {"max_results": 100})[
        "experiments"
    ]
    wanted = {"experiment_ids": [row["experiment_id"] for row in experiments],
              "filter": "attributes.status = 'RUNNING'"}  # fmt: skip
    running = post(f"{found.mlflow}/api/2.0/mlflow/runs/search", wanted).get("runs", [])
    rows += [f"MLflow: run {row['info']['run_name']} is RUNNING" for row in running]
    with psycopg.connect(found.ledger) as connection:
        claims = connection.execute("SELECT name FROM wherry.registration WHERE state = 'pending'").fetchall()
        rows += [f"ledger: claim of {name}" for (name,) in claims]
        idle = "state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()"
        count = connection.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {idle}").fetchone()
        rows += [f"PostgreSQL: {count[0]} open transactions"] if count and count[0] else []
    folder = found.place.folder
    left = [
        *(folder / "out").rglob(".wherry-*"), *(folder / "runs").rglob(".wherry-*"), *(folder / "tmp").glob("wherry-*"),
        *(folder / "home").glob("*.lease"), *(folder / "home" / "made").glob("*"),
    ]  # fmt: skip
    return rows + [f"storage: {path.relative_to(folder)}" for path in left if path.exists()]


def slots(found: Servers) -> list[str]:
    """Slots of Prefect's limits that are taken while no run is at work, and runs that have not ended."""
    limits = post(f"{found.api}/v2/concurrency_limits/filter", {"limit": 100})
    rows = [f"Prefect: {row['active_slots']:.0f} of {row['limit']} slots of {row['name']}" for row in limits
            if row["active_slots"] >= 1]  # fmt: skip
    states = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING", "PAUSED"]}}}}
    return rows + [f"Prefect: run {row['name']} is {row['state_name']}" for row in
                   post(f"{found.api}/flow_runs/filter", states)]  # fmt: skip


def run_matrix(
    folder: Path,
    flows: Sequence[str],
    parts: Sequence[str],
    moments: Sequence[str],
    out: Path | None = None,
    away: Away | None = None,
) -> list[Cell]:
    """All drills, one after the other; the cells are written after each."""
    cells: list[Cell] = []
    with servers(folder, shortened=away is None) as found:
        begin(found)
        for number, (part, moment) in enumerate(product(parts, moments)):
            if makes_no_sense(part, moment):
                continue
            try:
                made = (
                    absence(found, part, moment, flows, number, away)
                    if away
                    else drill(found, part, moment, flows, number)
                )
            except AssertionError as error:
                made = [
                    Cell(flow, part, moment, following="not reached", open=[str(error)[:3000]])
                    for flow in flows
                ]
                _clear(found)
            cells += made
            taken = slots(found)
            for cell in made:
                print(json.dumps(asdict(cell))[:1500], flush=True)
            print(time.strftime("%H:%M:%S"), "slots:", taken, flush=True)
            if out:
                _write(out, cells, away)
        rest = _at_the_end(found)
        print("at the end:", rest, flush=True)
        if out:
            _write(out, cells, away, rest)
    return cells


def _clear(found: Servers) -> None:
    _release(found)
    for name, child in found.place.children.items():
        if not child.running:
            print("started again:", name)
            child.start()


def _at_the_end(found: Servers, seconds: float = 420.0) -> list[str]:
    """What stays open for longer than the leases of slots last, which are 300 s."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and slots(found):
        time.sleep(5)
    return [*slots(found), *still_open(found)]


def _write(out: Path, cells: Sequence[Cell], away: Away | None, rest: Sequence[str] | None = None) -> None:
    """Cells of this call replace those that the file has."""
    before = json.loads(out.read_text())["cells"] if out.exists() else []
    measured = {(one.flow, one.part, one.moment) for one in cells}
    kept = [row for row in before if (row["flow"], row["part"], row["moment"]) not in measured]
    now = {"commit": _commit(), "date": time.strftime("%Y-%m-%d")}
    rows = [*kept, *({**asdict(one), **now} for one in cells)]
    machine = f"{os.cpu_count()} processors, {platform.system()} {platform.release()}"
    data = {"machine": machine, "away": away and asdict(away), "at_the_end": rest, "cells": rows}
    out.write_text(json.dumps(data, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(data))


_HEAD = f"""# What is killed, and when

`python -m tests.support.server_matrix` kills each part of a site with SIGKILL at each moment of a flow, starts it again
and looks at the next run of its deployment: on a Prefect server, a process worker, an MLflow server and a ledger in
PostgreSQL. The worker is killed with its runs, as if its machine had lost its power.

**ok**: the next run ended Completed; then nothing was open in Prefect, MLflow, ledger and storage. In brackets:
how the run ended that was hit; `later`: the automations missed it, as the killed server had lost its last events, and
the next run that began after their time ended it. The times of the automations were shortened to {BEAT_SECONDS} s
(heartbeats, which come each 30 s; 70 s where PostgreSQL dies as runs register: held for a minute on busy cores,
they had lost one) and {PENDING_SECONDS} s (pending). `–`: a scheduled run has no process.
"""


_HEAD_AWAY = """# What is away for a minute, and when

`python -m tests.support.server_matrix --away 60` takes a server away for 60 s while a flow goes on: its processes are
killed and started again, or, with `--stopped`, stopped and continued. The automations are the shipped ones.

**ok**: the run ended Completed, and afterwards nothing was open in MLflow, ledger and storage.
"""


def table(data: dict[str, Any]) -> str:
    """The Markdown page of a file of results: for each flow a row of parts and a column of moments."""
    away = data.get("away")
    parts, moments = (SERVERS, AT_WORK) if away else (PARTS, MOMENTS)
    cells = {(row["flow"], row["part"], row["moment"]): row for row in data["cells"]}
    commits = ", ".join(sorted({row["commit"] for row in data["cells"]}))
    lines = [f"{_HEAD_AWAY if away else _HEAD}\nMachine: {data['machine']}. Commits: {commits}."]
    flows = {row["flow"] for row in data["cells"]}
    rest = [flow for flow in FLOWS if flow not in flows]
    lines += ["", f"Not run yet: {', '.join(rest)}."] if rest else []
    for flow in sorted(flows, key=FLOWS.index):
        lines += [
            "",
            f"## {flow}",
            "",
            f"| part | {' | '.join(moments)} |",
            "|---" * (1 + len(moments)) + "|",
        ]
        for part in parts:
            words = [_words(cells.get((flow, part, moment)), part, moment) for moment in moments]
            lines.append(f"| {part} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _words(row: dict[str, Any] | None, part: str, moment: str) -> str:
    if makes_no_sense(part, moment):
        return "–"
    if row is None:
        return "not run"
    came = row["killed"] + (", later" if row["missed"] else "")
    if row["following"] == "Completed" and not row["open"]:
        return f"ok ({came})"
    text = f"**{row['following']}** ({came}): {'; '.join(row['open'])[:200]}"
    return text.replace("|", "\\|").replace("\n", " ")


@cache
def _commit() -> str:
    """The commit of the checkout when the matrix began; `WHERRY_COMMIT` where a copy of it is run."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return os.environ.get("WHERRY_COMMIT") or done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill each part of a site at each moment of each flow.")
    for name, every in (("flows", FLOWS), ("parts", PARTS), ("moments", MOMENTS)):
        parser.add_argument(f"--{name}", default=",".join(every))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--away", type=float, help="Seconds that a server is away for, instead of being killed."
    )
    parser.add_argument("--stopped", action="store_true", help="Stop its processes for that time.")
    chosen = parser.parse_args()
    away = Away(chosen.away, chosen.stopped) if chosen.away else None
    with tempfile.TemporaryDirectory(prefix="wherry-servers-") as folder:
        cells = run_matrix(
            Path(folder),
            chosen.flows.split(","),
            chosen.parts.split(","),
            chosen.moments.split(","),
            chosen.out,
            away,
        )
    raise SystemExit(0 if all(one.holds for one in cells) else 1)


if __name__ == "__main__":
    main()
