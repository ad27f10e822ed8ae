"""The bucket of `infra/demo --bucket`: a store on this machine, emulated by the same servers as in the tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NAME = "wherry-demo"
# protocol → the variable with which its libraries, and so wherry, find a server
_ENDPOINTS = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}


@contextmanager
def emulated_bucket(protocol: str, folder: Path) -> Generator[str]:
    """A bucket that exists while the block runs, in a store that asks for no login of yours.

    Args:
        protocol: `gs` or `s3`.
        folder: of the demo; credentials are looked for there instead of in your home.

    Yields:
        URI of the bucket's folder of models.
    """
    from tests.support import buckets

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the web server of moto logs every request
    os.environ |= {
        **buckets.KEYS,
        "AWS_CONFIG_FILE": str(folder / "no-aws-config"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "CLOUDSDK_CONFIG": str(folder / "no-gcloud-config"),
    }
    with ExitStack() as stack:
        server = stack.enter_context(getattr(buckets, protocol)())
        buckets.create_bucket(protocol, server, NAME)
        os.environ[_ENDPOINTS[protocol]] = server.url
        yield f"{protocol}://{NAME}/models"
