"""What the processes of the rows of buckets do: `python -m benchmarks.bucket_work NAME SOURCE TARGET …`.

Each prints `{"seconds": …, "value": {"processor": …}}` last, both counted after its imports: those of wherry with jax
and torch take longer than the work on a small checkpoint. The floor is obstore (the client in Rust of
object_store), which downloads, hashes, uploads in parts and reads back the same bytes; the others are peers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

_BLOCK = 8 << 20
_THREADS = 4


def wherry(source: str, target: str, to: str, verify: str, *options: str) -> Callable[[], dict[str, int]]:
    """A conversion; its requests and bytes are counted in the two HTTP clients that send them."""
    import aiohttp
    import blake3 as _blake3  # noqa: F401  imported before the time is counted, as that of the others

    for scheme in {one.partition("://")[0] for one in (source, target) if "://" in one}:
        import_module({"s3": "s3fs", "gs": "gcsfs"}[scheme])
    import wherry as door
    from wherry.converter import convert as _convert  # noqa: F401

    seen = {"requests": 0, "sent": 0, "received": 0}
    real = aiohttp.ClientSession._request  # noqa: SLF001  the only place that sees every request

    async def count_requests(self: Any, *arguments: Any, **options: Any) -> Any:
        answer = await real(self, *arguments, **options)
        seen["requests"] += 1
        seen["sent"] += int(answer.request_info.headers.get("Content-Length", 0))
        seen["received"] += int(answer.headers.get("Content-Length", 0)) * (answer.method != "HEAD")
        return answer

    aiohttp.ClientSession._request = count_requests  # noqa: SLF001
    _count_plain(seen)

    def run() -> dict[str, int]:
        ignore = () if to == "huggingface" else ("companions",)
        stated = dict(option.split("=") for option in options)
        door.convert(source, target, to=to, verify=verify, ignore=ignore, options=stated, lineage=False)
        return seen

    return run


def _count_plain(seen: dict[str, int]) -> None:
    """Count the bodies that wherry sends and receives itself."""
    from urllib3.connectionpool import HTTPConnectionPool

    real: Any = HTTPConnectionPool.urlopen

    def count_request(self: Any, method: str, url: str, **options: Any) -> Any:
        answer = real(self, method, url, **options)
        seen["requests"] += 1
        seen["sent"] += int((options.get("headers") or {}).get("Content-Length", 0))
        seen["received"] += int(answer.headers.get("Content-Length", 0))
        return answer

    HTTPConnectionPool.urlopen = count_request  # pyright: ignore[reportAttributeAccessIssue]


def client(source: str, target: str, *, back: bool = True) -> Callable[[], None]:
    """Copy every file with obstore, hash it on the way, and, with `back`, read it back and hash it again."""
    import obstore  # noqa: F401
    from blake3 import blake3

    def hash_blocks(blocks: Iterator[Any]) -> Iterator[Any]:
        for block in blocks:
            blake3(block).digest()
            yield block

    def run() -> None:
        for name, size in _names(source):
            _put(target, name, hash_blocks(_blocks(source, name, size)))
            for _block in hash_blocks(_blocks(target, name, size)) if back else ():
                pass

    return run


def fsspec_copy(source: str, target: str) -> Callable[[], None]:
    """`cp` of gcsfs or s3fs between a disk and a bucket, or by way of a disk between two buckets."""
    import fsspec

    scheme = next(one.partition("://")[0] for one in (source, target) if "://" in one)
    fs = fsspec.filesystem(scheme)

    def run() -> None:
        if "://" not in source:
            fs.put(source, target, recursive=True)
        elif "://" not in target:
            fs.get(source, target, recursive=True)
        else:
            between = str(Path(os.environ["TMPDIR"]) / "between")
            fs.get(source, between, recursive=True)
            fs.put(between, target, recursive=True)

    return run


def proved_copy(source: str, target: str) -> Callable[[], None]:
    """The copy of fsspec's file system in blocks, several files' blocks hashed on the way, and read back and hashed."""
    import fsspec
    from blake3 import blake3

    fs = fsspec.filesystem(source.partition("://")[0])

    def blocks(path: str, size: int) -> Iterator[bytes]:
        with ThreadPoolExecutor(_THREADS) as pool:
            waiting: list[Any] = []
            for start in range(0, size, _BLOCK):
                waiting.append(pool.submit(fs.cat_file, path, start=start, end=min(start + _BLOCK, size)))
                if len(waiting) == _THREADS:
                    yield waiting.pop(0).result()
            for one in waiting:
                yield one.result()

    def run() -> None:
        for path, row in fs.find(source, detail=True).items():
            to = f"{target}/{path.rpartition('/')[2]}"
            with fs.open(to, "wb", block_size=_BLOCK) as file:
                for block in blocks(path, row["size"]):
                    blake3(block).digest()
                    file.write(block)
            for block in blocks(to, row["size"]):
                blake3(block).digest()

    return run


def remove(target: str, _same: str) -> Callable[[], None]:
    """Remove a folder of a bucket."""
    import fsspec

    fs = fsspec.filesystem(target.partition("://")[0])

    def run() -> None:
        if fs.exists(target):
            fs.rm(target, recursive=True)

    return run


def torch_save(source: str, target: str) -> Callable[[], None]:
    """`torch.save` of the loaded tensors into a file of fsspec."""
    import fsspec
    import torch
    from safetensors.torch import load_file

    def run() -> None:
        state: dict[str, Any] = {}
        for shard in sorted(Path(source).glob("*.safetensors")):
            state |= load_file(shard)
        with fsspec.open(f"{target}/model.pt", "wb") as file:
            torch.save(state, file)

    return run


def tensorstore_write(source: str, target: str) -> Callable[[], None]:
    """Every tensor as an uncompressed zarr array through tensorstore's own driver of the store."""
    import tensorstore as ts
    import torch
    from safetensors import safe_open

    scheme, _, path = target.partition("://")
    bucket, _, folder = path.partition("/")
    base: dict[str, Any] = {"driver": scheme if scheme == "s3" else "gcs", "bucket": bucket}
    if scheme == "s3":
        base |= {"endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": "us-east-1"}
    else:
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = os.environ["STORAGE_EMULATOR_HOST"]

    def write(name: str, array: Any) -> Any:
        where = {**base, "path": f"{folder}/{name}/"}
        made = ts.open(
            {"driver": "zarr", "kvstore": where}, create=True, dtype=ts.uint8, shape=array.shape
        ).result()
        return made.write(array)

    def run() -> None:
        for shard in sorted(Path(source).glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    array = file.get_tensor(name).view(-1).view(torch.uint8).numpy()
                    write(name, array).result()

    return run


def _store(uri: str) -> tuple[Any, str]:
    """The store of obstore, and the path in it."""
    from obstore.store import GCSStore, LocalStore, S3Store

    scheme, found, path = uri.partition("://")
    if not found:
        return LocalStore(prefix=Path(uri), mkdir=True), ""
    bucket, _, folder = path.partition("/")
    if scheme == "s3":
        url, key = os.environ["AWS_ENDPOINT_URL"], os.environ["AWS_ACCESS_KEY_ID"]
        options = {"access_key_id": key, "secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
        return S3Store(
            bucket, endpoint=url, region="us-east-1", client_options={"allow_http": True}, **options
        ), folder
    account = {"gcs_base_url": os.environ["STORAGE_EMULATOR_HOST"], "disable_oauth": True,
               "client_email": "", "private_key": "", "private_key_id": ""}  # fmt: skip
    return GCSStore(
        bucket, service_account_key=json.dumps(account), client_options={"allow_http": True}
    ), folder


def _names(uri: str) -> list[tuple[str, int]]:
    store, folder = _store(uri)
    rows = [row for page in store.list(folder or None) for row in page]
    return [(row["path"].removeprefix(f"{folder}/" if folder else ""), row["size"]) for row in rows]


def _blocks(uri: str, name: str, size: int) -> Iterator[Any]:
    """The bytes of a file in order, some blocks ahead."""
    store, folder = _store(uri)
    path = f"{folder}/{name}".strip("/")
    with ThreadPoolExecutor(_THREADS) as pool:
        starts, waiting = iter(range(0, size, _BLOCK)), []
        for start in starts:
            waiting.append(pool.submit(store.get_range, path, start=start, end=min(start + _BLOCK, size)))
            if len(waiting) == _THREADS:
                yield waiting.pop(0).result()
        for one in waiting:
            yield one.result()


def _put(uri: str, name: str, blocks: Iterator[Any]) -> None:
    store, folder = _store(uri)
    store.put(f"{folder}/{name}".strip("/"), (bytes(block) for block in blocks),
              chunk_size=_BLOCK, max_concurrency=_THREADS)  # fmt: skip


WORKS = {
    "wherry": wherry, "client": client, "client-unread": partial(client, back=False), "copy": fsspec_copy,
    "copy-proved": proved_copy, "remove": remove, "torch-save": torch_save, "tensorstore": tensorstore_write,
}  # fmt: skip


def main() -> None:
    """Do one piece of work and print its seconds, and what it counted."""
    name, *arguments = sys.argv[1:]
    run = WORKS[name](*arguments)
    started, busy = time.monotonic(), time.process_time()
    counts = run()
    seconds, processor = time.monotonic() - started, time.process_time() - busy
    print(json.dumps({"seconds": seconds, "value": {**(counts or {}), "processor": processor}}))


if __name__ == "__main__":
    main()
