"""Addresses of clouds and of this machine are refused in every spelling, after DNS and in redirects."""

from __future__ import annotations

import socket
import urllib.request
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

import wherry
from tests.support.noting_server import noting_server
from wherry.errors import UsageError, WherryError
from wherry.store.addresses import (
    ELSEWHERE,
    LOCAL,
    METADATA,
    AddressError,
    host_of,
    kind_of_host,
    open_checked,
    require_host,
    require_named_address,
)
from wherry.store.local_store import locate, locate_recorded
from wherry.store.remote_store import remote_store
from wherry.store.transfers import BodyRequest, exchange

BODY = save({"w": np.arange(16, dtype=np.float32)})
HOSTS = [
    line
    for line in (Path(__file__).parents[1] / "golden/metadata-hosts.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.fixture
def names(monkeypatch):
    """DNS of this test: name → address; other names as always."""
    known, real = {}, socket.getaddrinfo

    def answer(host, *arguments, **named):
        return real(known.get(host, host), *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return known


def test_two_hundred_spellings_of_a_metadata_address_are_refused_before_anything_is_opened():
    assert len(set(HOSTS)) == len(HOSTS) >= 200
    assert [host for host in HOSTS if kind_of_host(host) != METADATA] == []
    for host in HOSTS:
        bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
        for uri in (f"http://{bracketed}/latest/meta-data/", f"https://{bracketed}:80/x.safetensors"):
            with pytest.raises(AddressError, match="where clouds tell a machine its secrets"):
                locate(uri)


def test_no_spelling_is_hidden_by_what_stands_around_it():
    for uri in (
        "http://169.254.169.254", "http://169.254.169.254:80", "http://169.254.169.254?a=/b", "http://169.254.169.254#x",
        "http://169.254.169.254\\@good.example/x", "https://[::ffff:a9fe:a9fe]:443/x", "http://good@169.254.169.254/",
    ):  # fmt: skip
        with pytest.raises(AddressError):
            require_host(uri)
    assert host_of("https://huggingface.co:443/a@b") == "huggingface.co"


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", LOCAL), ("[::1]", LOCAL), ("::ffff:127.0.0.1", LOCAL), ("0.0.0.0", LOCAL), ("localhost", LOCAL),
        ("LOCALHOST.", LOCAL), ("127.1", LOCAL), ("0x7f.1", LOCAL), ("2130706433", LOCAL), ("0177.0.0.1", LOCAL),
        ("0", LOCAL), ("::", LOCAL), ("bucket.localhost", LOCAL), ("64:ff9b::7f00:1", LOCAL), ("10.0.0.5", ELSEWHERE),
        ("8.8.8.8", ELSEWHERE), ("huggingface.co", ELSEWHERE), ("2606:4700::1111", ELSEWHERE), ("fd00::1", ELSEWHERE),
        ("192.168.1.1", ELSEWHERE), ("", ELSEWHERE), ("x" * 5000, ELSEWHERE), ("0xzz", ELSEWHERE),
        ("1.2.3.4.5", ELSEWHERE), ("metadata.example", ELSEWHERE), ("9" * 290, None),
    ],
)  # fmt: skip
def test_hosts_by_their_text(host, kind):
    """A number without end wraps around to any address."""
    assert kind_of_host(host) in ((kind,) if kind else (LOCAL, METADATA, ELSEWHERE))


def test_a_stated_address_of_this_machine_is_read_and_a_recorded_one_is_not():
    pytest.importorskip("aiohttp")
    with noting_server(BODY) as (port, seen):
        uri = f"http://127.0.0.1:{port}/m.safetensors"
        assert locate(uri).read(0, 8) == BODY[:8]
        before = len(seen)
        for recorded in (
            uri,
            f"http://localhost:{port}/m",
            f"http://0x7f.1:{port}/m",
            f"http://[::1]:{port}/m",
        ):
            with pytest.raises(AddressError, match="an address of this machine"):
                locate_recorded(recorded)
        assert len(seen) == before
    assert locate_recorded("s3://models/x").uri == "s3://models/x"


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "fe80::1"])
def test_a_name_that_dns_lets_point_here_is_refused(address, names):
    pytest.importorskip("aiohttp")
    names["models.example"] = address
    with noting_server(BODY) as (port, seen):
        with pytest.raises(AddressError, match=f"models.example leads to {address}"):
            wherry.detect(f"http://models.example:{port}/m.safetensors")
        assert seen == []


def test_a_redirect_to_a_name_that_dns_lets_point_here_is_refused(names):
    pytest.importorskip("aiohttp")
    names["rebound.example"] = "169.254.169.254"
    with noting_server(redirect="http://rebound.example/latest/") as (port, seen):
        with pytest.raises(AddressError, match=r"rebound\.example leads to 169\.254"):
            wherry.detect(f"http://127.0.0.1:{port}/m.safetensors")
        assert seen


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "0xa9fea9fe", "[::ffff:a9fe:a9fe]", "metadata.google.internal"]
)
def test_a_redirect_to_a_metadata_address_is_refused(host):
    pytest.importorskip("aiohttp")
    what = "the server redirects to the metadata address"
    with (
        noting_server(redirect=f"http://{host}/latest/") as (port, _seen),
        pytest.raises(AddressError, match=what),
    ):
        wherry.detect(f"http://127.0.0.1:{port}/m.safetensors")


def test_a_file_system_that_opens_other_uris_is_refused():
    with noting_server(BODY) as (port, seen):
        with pytest.raises(UsageError, match="generic:// cannot be read"):
            locate(f"generic://http://127.0.0.1:{port}/m.safetensors")
        assert seen == []


def test_bodies_go_to_no_metadata_address(names, monkeypatch):
    with noting_server(BODY) as (port, seen):
        names["bucket.example"] = "127.0.0.1"  # an emulator by its name: the user's configuration names it
        assert exchange(BodyRequest("GET", f"http://bucket.example:{port}/x", {}), 10).body == BODY
        names["other.example"] = "127.0.0.1"  # a connection of its own
        monkeypatch.setattr("wherry.store.addresses.kind_of_host", lambda _host: METADATA)
        with pytest.raises(AddressError):
            exchange(BodyRequest("GET", f"http://other.example:{port}/x", {}), 10)
        assert len(seen) == 1


@pytest.mark.parametrize("protocol", ["s3", "gs", "az"])
def test_clients_of_buckets_check_what_dns_gives(protocol, names, monkeypatch):
    pytest.importorskip({"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}[protocol])
    names["bucket.example"] = "169.254.169.254"
    monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "5")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://bucket.example:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://bucket.example:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    account = (
        "AccountName=x;AccountKey=eA==;BlobEndpoint=http://bucket.example:9/x;DefaultEndpointsProtocol=http"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account)
    with pytest.raises(AddressError, match=r"bucket\.example leads to 169\.254"):
        wherry.detect(f"{protocol}://models/x")


# The clients of servers that only the configuration names, as wherry calls them.


def of_hub(uri, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", uri)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    import_module("huggingface_hub").HfFileSystem.clear_instance_cache()
    return remote_store("hf").read("owner/model@main/x", 0, 8)


def of_mlflow(uri, monkeypatch):
    pytest.importorskip("mlflow")
    client = import_module("wherry.integrations.mlflow.client")
    monkeypatch.setattr(client, "require_answer", lambda *_uris: None)
    with client.open_client(client.Stores(uri, uri)) as opened:
        return opened


def of_registry(uri, monkeypatch):
    """Without MLflow's client: whether it answers, and a version."""
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    return wherry.resolve("models:/m@c")


def of_urllib(uri, _monkeypatch):
    with open_checked(urllib.request.Request(uri), 10) as answer:
        return answer.read()


def addressed(monkeypatch, **kinds):
    """Addresses of this machine count as others: `{"127.0.0.1": METADATA}`."""
    monkeypatch.setattr(
        "wherry.store.addresses.kind_of_host", lambda host: kinds.get(host) or kind_of_host(host)
    )


@pytest.mark.parametrize("client", [of_hub, of_mlflow, of_registry, of_urllib])
def test_clients_of_configured_servers_send_nothing_to_a_metadata_address(client, names, monkeypatch):
    names["server.example"] = "127.0.0.1"
    addressed(monkeypatch, **{"127.0.0.1": METADATA})
    with noting_server(BODY) as (port, seen):
        with pytest.raises(AddressError, match=r"server\.example leads to 127\.0\.0\.1, where clouds tell"):
            client(f"http://server.example:{port}", monkeypatch)
        assert seen == []


@pytest.mark.parametrize("client", [of_hub, of_mlflow, of_registry, of_urllib])
def test_a_configured_server_may_be_on_this_machine(client, names, monkeypatch):
    names["server.example"] = "127.0.0.1"
    with noting_server() as (port, seen):
        with pytest.raises((WherryError, OSError)) as caught:  # it answers that nothing is there
            client(f"http://server.example:{port}", monkeypatch)
        assert not isinstance(caught.value, AddressError)
        assert seen


@pytest.mark.parametrize("client", [of_hub, of_mlflow])
@pytest.mark.parametrize("stated", ["here.example", "localhost", "127.0.0.2"])
def test_a_configured_server_elsewhere_leads_to_nothing_on_this_machine(client, stated, names, monkeypatch):
    names.update({"server.example": "127.0.0.1", "here.example": "127.0.0.2", "localhost": "127.0.0.2"})
    addressed(monkeypatch, **{"127.0.0.1": ELSEWHERE})
    with noting_server(BODY, address="127.0.0.2") as (port, seen):
        elsewhere = noting_server(redirect=f"http://{stated}:{port}/latest")
        with elsewhere as (first, paths), pytest.raises(AddressError, match="an address of this machine"):
            client(f"http://server.example:{first}", monkeypatch)
        assert paths
        assert seen == []


def test_other_calls_of_mlflow_in_the_program_are_kept_from_metadata_alone(names, monkeypatch):
    """The program that uses wherry has the same sessions."""
    pytest.importorskip("mlflow")
    client = import_module("wherry.integrations.mlflow.client")
    session = client.request_utils._get_request_session(0, 0, 0, (), True, True)
    names.update({"own.example": "127.0.0.1", "other.example": "127.0.0.1"})
    with noting_server(BODY) as (port, seen):
        assert session.get(f"http://own.example:{port}").content == BODY
        addressed(monkeypatch, **{"127.0.0.1": METADATA})
        with pytest.raises(Exception, match="clouds tell a machine its secrets"):
            session.get(f"http://other.example:{port}")
        assert len(seen) == 1


def test_no_spelling_of_an_address_that_dns_gives_is_connected_to():
    for address in HOSTS:
        with pytest.raises(AddressError):
            require_named_address("server.example", address, {"server.example", "localhost"})
