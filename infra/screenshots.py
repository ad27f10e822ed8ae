"""Takes the pictures of README and docs/ with a real browser: Prefect, MLflow, the lineage page, the served ledger.

Both servers run on the demo's stores, on free loopback ports, and are stopped at the end. Each picture is taken when
its expected words are on the page; a page without them is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import demo
import demo_site as site
import demo_telling as tell

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
LARGEST = 250_000  # size limit of a picture in bytes
_SETTLED = 4000  # milliseconds to wait for graphs, fonts and animations
_PATIENCE = 300.0  # seconds to wait for a server to answer


@dataclass(frozen=True, slots=True)
class Page:
    """One picture.

    Attributes:
        name: name of the file.
        url: URL of the page.
        words: words that must be on the page before the picture is taken.
        size: size of the window.
        clicks: elements to click before, in order, each by its role and name.
        theme: light or dark.
    """

    name: str
    url: str
    words: tuple[str, ...]
    size: tuple[int, int] = (1280, 920)
    clicks: tuple[tuple[str, str], ...] = ()
    theme: str = "light"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the demo; the demo runs there first if needed")
    parser.add_argument("pictures", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    folder = options.folder.resolve()
    demo.settle(folder)
    if not (folder / "lineage.html").exists():
        tell_story(folder)
    with ExitStack() as stack:
        prefect, mlflow = stack.enter_context(servers(folder))
        shown = [*pages(prefect, mlflow, folder), *screens(folder, stack.enter_context(served_ledger()))]
        for file in take(shown, options.pictures):
            print(f"  {file.stat().st_size:7,} bytes  {file}")
    return 0


def tell_story(folder: Path) -> None:
    """Run the demo and end the embedded server that it leaves running.

    Raises:
        SystemExit: the demo failed.
    """
    command = [sys.executable, str(Path(__file__).with_name("demo.py")), str(folder)]
    with running(command, {}, None) as process:
        code = process.wait()
    if code:
        raise SystemExit(f"the demo failed with exit code {code}")


@contextmanager
def servers(folder: Path) -> Generator[tuple[str, str]]:
    """Run both servers on the demo's stores.

    Yields:
        The addresses of Prefect's and MLflow's servers.
    """
    tools = Path(sys.executable).parent
    first, second = free_port(), free_port()
    commands = {
        "prefect": (tell.prefect_server(tools, first), tell.prefect_settings(first)),
        "mlflow": (tell.mlflow_server(tools, second), {}),
    }
    addresses = f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"
    with ExitStack() as stack:
        started = [
            stack.enter_context(running(command, settings, folder / f"{name}-server.log"))
            for name, (command, settings) in commands.items()
        ]
        for process, url in zip(
            started, (f"{addresses[0]}/api/health", f"{addresses[1]}/health"), strict=True
        ):
            await_answer(process, url)
        yield addresses


@contextmanager
def running(
    command: list[str], settings: Mapping[str, str], log: Path | None
) -> Generator[subprocess.Popen[bytes]]:
    """Run a process in a new session, and end it with its child processes.

    Args:
        command: the command to run.
        settings: variables to add to its environment.
        log: file for its output; None inherits the output of this process.
    """
    with log.open("wb") if log else nullcontext() as output:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def await_answer(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} failed with exit code {process.returncode}; see its log")
        with suppress(OSError), urllib.request.urlopen(url, timeout=10):
            return
        time.sleep(0.5)
    raise SystemExit(f"timed out after {_PATIENCE:.0f} s: no answer from {url}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pages(prefect: str, mlflow: str, folder: Path) -> Generator[Page]:
    """The pages to show."""
    night = flow_run(prefect, "nightly-convert")
    yield Page(
        "prefect-nightly",
        f"{prefect}/v2/runs/flow-run/{night}?tab=Artifacts",
        ("night of", "nightly-convert", "Completed", "16 Task runs", "wherry-nightly"),
        (1280, 1040),
    )
    version = f"{mlflow}/#/models/{site.JAX_MODEL}/versions/1"
    close, run = ("button", "Close"), ("link", f"register {site.JAX_MODEL}")
    said = ("@ champion", "converted from", "wherry fetch", "wherry.checkpoint_digest")
    yield Page("mlflow-version", version, said, clicks=(close,))
    said = ("Logged models", "Input", site.RUN, "Output", "wherry.format")
    yield Page("mlflow-run", version, said, clicks=(close, run))
    yield Page("lineage", (folder / "lineage.html").as_uri(), _LINEAGE, (1440, 760))


# Width and height of a phone, a tablet and a desktop; what docs/ shows: page, screen, theme.
SCREENS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
SHOWN = (
    ("lineage", "phone", "light"), ("lineage", "phone", "dark"), ("lineage", "tablet", "dark"),
    ("ledger", "tablet", "light"), ("ledger", "desktop", "dark"), ("storage", "phone", "light"),
)  # fmt: skip


def screens(folder: Path, ledger: str) -> Generator[Page]:
    """The pages of wherry's own on other screens and in both themes.

    Args:
        folder: of the demo.
        ledger: the address of the served ledger.
    """
    places = {
        "lineage": ((folder / "lineage.html").as_uri(), _LINEAGE[:2]),
        "ledger": (ledger, ("huggingface",)),
        "storage": (f"{ledger}storage", ("of tensors in",)),
    }
    for name, screen, theme in SHOWN:
        url, words = places[name]
        yield Page(f"screens/{name}-{screen}-{theme}", url, words, SCREENS[screen], theme=theme)


@contextmanager
def served_ledger() -> Generator[str]:
    """The address of the ledger of the demo, served by a thread."""
    from wherry.trace.site_server import SiteServer

    with SiteServer(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.url
        finally:
            server.shutdown()


_LINEAGE = (
    "1 failed verification", "altered at level digest", "huggingface", "flax-msgpack", "dcp", site.JAX_MODEL,
)  # fmt: skip


def flow_run(prefect: str, flow: str) -> str:
    """The run of a flow with the most task runs: the first night, which had something to convert."""
    query = {"flows": {"name": {"any_": [flow]}}, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    runs = post(f"{prefect}/api/flow_runs/filter", query)
    return max(runs, key=lambda run: run["total_run_time"])["id"]


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def take(wanted: list[Page], pictures: Path, *, patience: float = 60.0) -> list[Path]:
    """Take the pictures of all pages.

    Args:
        wanted: the pages.
        pictures: folder for the pictures.
        patience: seconds to wait for each word.

    Raises:
        SystemExit: a page lacks an expected word, or a picture is too large.
    """
    from playwright.sync_api import sync_playwright

    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            return [picture(browser, page, pictures, patience) for page in wanted]
        finally:
            browser.close()


def picture(browser: Any, page: Page, pictures: Path, patience: float) -> Path:
    size = {"width": page.size[0], "height": page.size[1]}
    shown = browser.new_page(viewport=size, color_scheme=page.theme)
    shown.set_default_timeout(patience * 1000)
    shown.goto(page.url)
    for role, name in page.clicks:
        shown.get_by_role(role, name=name).first.click()
    for word in page.words:
        _await_word(shown, page, word)
    shown.wait_for_timeout(_SETTLED)
    file = pictures / f"{page.name}.png"
    file.parent.mkdir(exist_ok=True)
    shown.screenshot(path=str(file))
    shown.close()
    if file.stat().st_size > LARGEST:
        raise SystemExit(f"{file} has {file.stat().st_size:,} bytes, which exceeds the limit of {LARGEST:,}")
    return file


def _await_word(shown: Any, page: Page, word: str) -> None:
    from playwright.sync_api import TimeoutError as Late

    try:
        shown.get_by_text(word).locator("visible=true").first.wait_for()
    except Late:
        raise SystemExit(f"{page.name}: {word!r} not found on {page.url}") from None


if __name__ == "__main__":
    raise SystemExit(main())
