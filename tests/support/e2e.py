"""Servers and workers started by hand for end-to-end tests: own folder, free ports of loopback, health, teardown.

Every process is a session of its own, so that what it started ends with it, and writes its output to a file that a
failure shows. Starting takes long on a busy machine: limits are generous, and a process that has ended fails at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
BUSY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between two tries of a server that is busy."""

_LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return probe.getsockname()[1]


@dataclass
class Child:
    """A process with a session of its own."""

    name: str
    command: list[str]
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                start_new_session=True, env=dict(self.environment), cwd=self.log.parent,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tail(self) -> str:
        return f"--- {self.name}\n" + self.log.read_text(errors="replace")[-4000:]

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> None:
        """Signal the whole session; kill what is left of it after a while."""
        if self.process is None:
            return
        group = self.process.pid
        for sent, patience in ((number, seconds), (signal.SIGKILL, 30.0)):
            with suppress(ProcessLookupError):
                os.killpg(group, sent)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self.process = None

    def kill(self) -> None:
        """As if the machine had lost its power: nothing of the session gets to say anything."""
        self.stop(signal.SIGKILL)


@dataclass
class Site:
    """What a platform team runs, in one folder.

    Attributes:
        folder: everything lies below it.
        environment: of all processes.
        children: those that were started, by name.
    """

    folder: Path
    environment: dict[str, str]
    children: dict[str, Child] = field(default_factory=dict)

    def child(self, name: str, *command: str, **environment: str) -> Child:
        """Start a process, or start the one of that name again with the same command."""
        child = self.children.get(name)
        if child is None:
            log = self.folder / f"{name}.log"
            child = Child(name, [*command], log, {**self.environment, **environment})
            self.children[name] = child
        child.start()
        return child

    def await_(
        self, what: str, ready: Callable[[], Any], seconds: float = START_SECONDS, every: float = 0.2
    ) -> Any:
        """The first true answer. A server that is busy for longer than a request waits has not answered yet.

        Raises:
            AssertionError: it did not come; with the end of all logs.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with suppress(TimeoutError):
                if answer := ready():
                    return answer
            time.sleep(every)
        raise AssertionError(f"{what} did not happen in {seconds:.0f} s\n{self.logs()}")

    def await_url(self, child: Child, url: str) -> None:
        """Until a server answers."""

        def answers() -> bool:
            assert child.running, child.tail()
            try:
                return get(url) is not None
            except (OSError, ValueError):
                return False

        self.await_(url, answers)

    def run(self, *command: str, seconds: float = START_SECONDS, **environment: str) -> str:
        """The output of a command that must succeed."""
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=seconds, cwd=self.folder,
            env={**self.environment, **environment},
        )  # fmt: skip
        assert done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        )
        return done.stdout

    def logs(self) -> str:
        return "\n".join(child.tail() for child in self.children.values() if child.log.exists())

    def close(self) -> None:
        for child in reversed(self.children.values()):
            child.stop()


def site(folder: Path) -> Site:
    """A site with an environment in which nothing of the developer's own settings is left."""
    foreign = ("PREFECT_", "MLFLOW_", "WHERRY_", "OPENLINEAGE_", "AWS_", "GOOGLE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    paths = [str(Path(sys.executable).parent), environment.get("PATH", "")]
    environment |= {
        "PATH": os.pathsep.join(paths),
        "HOME": str(folder),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "WHERRY_HOME": str(folder / "home"),
    }
    return Site(folder, environment)


def start_prefect(place: Site) -> str:
    """A Prefect server on SQLite; its address goes to the environment of all that start later."""
    port = free_port()
    url = f"http://{_LOOPBACK}:{port}/api"
    place.environment |= {"PREFECT_API_URL": url, "PREFECT_UI_API_URL": url}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", _LOOPBACK, "--port", str(port)]
    place.await_url(place.child("prefect", *command), f"{url}/health")
    return url


def start_mlflow(place: Site) -> str:
    """An MLflow server on SQLite; its address goes to the environment of all that start later."""
    port = free_port()
    url = f"http://{_LOOPBACK}:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", _LOOPBACK, "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{place.folder / 'mlflow.db'}",
        "--artifacts-destination", str(place.folder / "mlflow-artifacts"),
    ]  # fmt: skip
    place.environment |= {"MLFLOW_TRACKING_URI": url}
    server = place.child(
        "mlflow", *command, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"
    )  # nobody runs jobs here
    place.await_url(server, f"{url}/health")
    return url


def start_worker(place: Site, pool: str, name: str = "worker", limit: int = 2) -> Child:
    """A process worker; it is up when the server knows that it is online."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", name]
    child = place.child(name, *command, "--limit", str(limit), PREFECT_WORKER_QUERY_SECONDS="2")
    api = place.environment["PREFECT_API_URL"]

    def online() -> bool:
        assert child.running, child.tail()
        found = post(f"{api}/work_pools/{pool}/workers/filter", {})
        return any(row["name"] == name and row["status"] == "ONLINE" for row in found)

    place.await_(f"worker {name}", online)
    return child


def get(url: str) -> Any:
    """JSON (or text) of a GET."""
    return _answer(urllib.request.Request(url))


def post(url: str, body: Any) -> Any:
    """JSON (or text) of a POST."""
    return _answer(_with_json(url, "POST", body))


def patch(url: str, body: Any) -> Any:
    """JSON (or text) of a PATCH."""
    return _answer(_with_json(url, "PATCH", body))


def _with_json(url: str, method: str, body: Any) -> urllib.request.Request:
    data = json.dumps(body).encode()
    return urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)


def _answer(request: urllib.request.Request) -> Any:
    try:
        text = _text(request)
    except urllib.error.HTTPError as error:
        raise OSError(f"{request.full_url}: {error.code} {error.read().decode()[:500]}") from error
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(request: urllib.request.Request) -> str:
    """The body of the answer; 503 is tried again, as Prefect's own client does: its SQLite file was locked."""
    for pause in (*BUSY_PAUSES, None):
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or pause is None:
                raise
            error.close()
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")
