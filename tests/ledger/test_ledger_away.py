"""A ledger in PostgreSQL whose server is away for some seconds: what needs it waits, and says so."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.command import typed
from tests.support.ledger import postgres
from tests.support.postgres import new_database
from wherry.ledger.record import check_chain, open_ledger

__all__ = ["postgres"]
_WAITED = " has not answered for "


def _pump(source, target):
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    target.close()


class _Door:
    """A port of this machine that is closed until a wait was said, and then leads to a database."""

    def __init__(self, url, records):
        self.parts = urlsplit(url)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}{self.parts.path}"
        self.server = None
        self.opener = threading.Thread(target=self._open, args=(records,))
        self.opener.start()

    def _open(self, records):
        for _ in range(1200):
            if any(_WAITED in record.getMessage() for record in list(records)):
                break
            time.sleep(0.05)
        self.server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with suppress(OSError):
            while True:
                near = self.server.accept()[0]
                far = socket.create_connection((self.parts.hostname, self.parts.port))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()

    def close(self):
        self.opener.join()
        self.server.close()


@pytest.mark.parametrize(
    "line", ["nightly --config HOME/wherry.toml", "convert HOME/runs/a/1 HOME/out/c --to dcp", "ls"]
)
def test_some_seconds_without_it_change_no_exit_code(line, postgres, tmp_path, monkeypatch, capfd, caplog):
    target = new_database(postgres, f"away {line.split()[0]}")
    (tmp_path / "runs" / "a" / "1").mkdir(parents=True)
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "runs" / "a" / "1" / "model.safetensors")
    (tmp_path / "wherry.toml").write_text(
        '[routes.a]\nroot = "runs"\nselect = "all"\nmin_age = "0s"\n'
        '[[routes.a.targets]]\nformat = "dcp"\nuri = "out/{run}/{step}"\n'
    )
    door = _Door(target, caplog.records)
    monkeypatch.setenv("WHERRY_LEDGER", door.url)
    try:
        code, printed = typed(line, tmp_path, capfd)
    finally:
        door.close()
    assert code == 0, printed
    assert any(_WAITED in record.getMessage() for record in caplog.records)
    with open_ledger(target) as ledger:
        assert check_chain(ledger).altered is None
