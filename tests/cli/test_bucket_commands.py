"""What a command prints when its bucket hangs, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal

from tests.support import buckets
from tests.support.command import command


def test_a_server_that_is_stopped_ends_the_command_with_10(tmp_path):
    with buckets.gcs_server() as server:
        url = f"http://127.0.0.1:{server.port}"
        env = {"STORAGE_EMULATOR_HOST": url, "HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path)}
        os.kill(server.pid, signal.SIGSTOP)
        done = command("--storage-timeout", "6s", "detect", "gs://bucket/model", "--json", env=env)
        os.kill(server.pid, signal.SIGCONT)
    assert done.returncode == 10, done.stderr
    error = json.loads(done.stdout)
    assert (error["error"], error["retryable"], error["uri"]) == ("StorageError", True, "gs://bucket/model")
    first, *rest = done.stderr.splitlines()
    assert re.fullmatch(r"gs://bucket/model has not answered for \d+ s; attempt 1 of 12", first)
    assert re.match(r"error: the store did not answer in time; 2 attempts in \d+ s", rest[0])
    assert "Traceback" not in done.stderr
