"""Buckets of emulated stores, and a Hub, to which hf:// leads."""

import pytest

from tests.support.bucket_fixtures import bucket, bucket_servers
from tests.support.hub_server import hub

__all__ = ["bucket", "bucket_servers"]


@pytest.fixture(autouse=True)
def own_ledger(tmp_path, monkeypatch):
    """Places in a bucket of one test do not answer in the next one: no ledger may know them there."""
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub with the repository `owner/model`."""
    from huggingface_hub import HfFileSystem, constants

    with hub() as found:
        for name in ("ENDPOINT", "HF_ENDPOINT"):
            monkeypatch.setattr(constants, name, found.url, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", "hf_token_of_the_tests")
        HfFileSystem.clear_instance_cache()
        found.create("owner/model")
        yield found
    HfFileSystem.clear_instance_cache()
