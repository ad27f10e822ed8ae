"""Fixtures that every test may use, and the walls around the developer's own settings."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.corpus import CORPUS, PRESENT, needs
from tests.support.memory_files import MEMORY_FILES, disk_folder, remove_abandoned, temporary_folder
from tests.support.selection import mark_full
from tests.support.skips import NO_CORPUS
from tests.support.workers import END, FIRST
from wherry.kernels.compile import compile_library

if TYPE_CHECKING:
    import tempfile

# No test depends on the load of the machine.
settings.register_profile("wherry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wherry")

_FOREIGN = ("PREFECT_", "MLFLOW_", "WHERRY_", "OPENLINEAGE_", "AWS_", "GOOGLE_")
_KEPT = ("WHERRY_CORPUS", "WHERRY_VENV", "WHERRY_PYTHON", "WHERRY_EVERY_BYTE", END, FIRST)
# Rooms and files about what a file system does: they work on a disk where `infra/test` has the others in memory.
_ON_DISK = ("containers/", "crash/", "mover/", "store/", "target/")

_REGISTRY = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything is imported: no test sees the developer's servers, stores or credentials.

    Prefect reads its settings once, at import, so this cannot wait for a fixture.
    """
    for name in [name for name in os.environ if name.startswith(_FOREIGN) and name not in _KEPT]:
        del os.environ[name]
    compile_library()  # a worktree that shares the environment of another has none
    _bound_memory()
    remove_abandoned()
    home = _home()
    config.add_cleanup(home.cleanup)
    config.stash[_REGISTRY] = f"sqlite:///{home.name}/mlflow.db"
    os.environ |= {
        "PREFECT_HOME": f"{home.name}/prefect",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "MLFLOW_TRACKING_URI": config.stash[_REGISTRY],
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # half a dozen processes that import all of MLflow
        "WHERRY_HOME": f"{home.name}/wherry",
        "WHERRY_SETTLE_SECONDS": "0",  # sources that a test has just made are not waited for
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),  # `cuda,cpu` runs them on a GPU
        # Models of tests are tiny: threads that wait for each other take ten times as long where others need the cores.
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    }


def _bound_memory() -> None:
    """A hostile checkpoint that makes us allocate without end fails one test, and does not take the machine along."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = min(12 << 30, physical * 3 // 4)
    resource.setrlimit(
        resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard)
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Tests and the libraries that they import stay until the end, so no search for garbage has to walk them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests beyond the default selection are marked, before pytest selects by markers.

    Where the corpus is absent, a test that would run once for each of some cases says so.
    """
    mark_full(items)
    if PRESENT:
        return
    for item in items:
        for at, mark in enumerate(item.own_markers):
            if mark.name == "skip" and str(mark.kwargs.get("reason")).startswith("got empty parameter set"):
                item.own_markers[at] = pytest.mark.skip(reason=NO_CORPUS).mark


@pytest.fixture(autouse=True)
def wherry_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ledger and registry of its own for every test that has no `own_home`; not inside its `tmp_path`."""
    if "own_home" in request.fixturenames:
        yield Path(os.environ["WHERRY_HOME"])
        return
    with _home() as home:
        monkeypatch.setenv("WHERRY_HOME", home)
        if (
            os.environ.get("MLFLOW_TRACKING_URI") == request.config.stash[_REGISTRY]
        ):  # no module has chosen another
            monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
        yield Path(home)


def _home() -> tempfile.TemporaryDirectory[str]:
    """A folder for ledgers and registries, in memory: databases sync at each commit."""
    return temporary_folder("home")


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a test; on a disk for tests that are about disks."""
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    if not file.startswith(_ON_DISK) or MEMORY_FILES not in tmp_path.parents:
        yield tmp_path
        return
    with disk_folder("disk") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def own_home() -> Iterator[pytest.MonkeyPatch]:
    """One ledger and registry for a module that asks for it: MLflow takes seconds to make the tables of a new one.

    Yields what a module can set more variables by.
    """
    with _home() as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERRY_HOME", home)
        for name in ("WHERRY_LEDGER", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
            patch.delenv(name, raising=False)
        yield patch


@pytest.fixture(scope="session")
def server() -> Iterator[None]:
    """One temporary Prefect server for all tests that run flows; they bear the marker `server`.

    It takes 14 s to come up, a flow run 2 s. Runs, artifacts and events of other tests are there too: ask for those
    of your own run.
    """
    pytest.importorskip("prefect", reason="prefect is not installed")
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.testing.utilities import prefect_test_harness

    with _home() as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", home)
        harness = prefect_test_harness(server_startup_timeout=180)
        harness.__enter__()
        running = SubprocessASGIServer._instances[None]
        yield
        try:
            harness.__exit__(None, None, None)
        except RuntimeError as error:
            if str(error) != "Event loop is closed":
                raise
            running.stop()  # Prefect waits for events of a loop that ended before, and then does not stop it


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of checkpoints that the real systems wrote."""
    needs()
    return CORPUS
