"""OCDBT databases by reference: the same values under a new tree, without copying tensor bytes.

A database refers to its values by files relative to its own folder, so it can refer to the values of another database
in a folder below. Orbax merges the databases of its processes this way; this module does the same and renames keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.errors import UnrepresentableError, UnsupportedError
from wherry.integrations.containers.zarr import kvstore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import tensorstore as ts

    from wherry.storage.location import Location

_NO_KEY = "no such key"


def link(folder: Location, databases: Iterable[str], renamed: Mapping[str, str] | None = None) -> None:
    """Create the database of a folder from databases below it, in one transaction.

    Args:
        folder: the local folder that gets `manifest.ocdbt`.
        databases: names of the folders below.
        renamed: stored name of each array → its new name; None keeps every key unchanged.

    Raises:
        UnrepresentableError: the keys of one array are below those of another.
        UnsupportedError: the databases are configured differently.
        DamagedError, StorageError: a database cannot be read, or the storage failed.
    """
    import tensorstore

    using, names = kvstore.context(), list(databases)
    config = _config(folder, names, using)
    transaction = tensorstore.Transaction(atomic=True)
    pairs = [("", "")]  # key prefix of each array → its new key prefix
    if renamed is not None:
        require_apart(renamed, folder.uri)
        pairs = [(f"{old}/" if old else "", f"{new}/" if new else "") for old, new in renamed.items()]
    top = {**kvstore.store_spec(folder, ocdbt=True, writable=True), "config": config}
    try:
        for name in names:
            below = {**top, "base": kvstore.store_spec(folder.join(name), ocdbt=True, writable=True)["base"]}
            for old, new in pairs:
                source = kvstore.open_store({**below, "path": old}, using, folder.uri)
                target = kvstore.open_store({**top, "path": new}, using, folder.uri)
                source.experimental_copy_range_to(target.with_transaction(transaction)).result()
        transaction.commit_async().result()
    except (ValueError, OSError) as error:
        raise kvstore.translate_error(error, folder.uri) from error


def _config(folder: Location, databases: Iterable[str], using: ts.Context) -> dict[str, Any]:
    """The configuration of the databases (Orbax 0.4.4 differs); references require equal configurations."""
    found: list[dict[str, Any]] = []
    for name in databases:
        place = folder.join(name)
        store = kvstore.open_store(kvstore.store_spec(place, ocdbt=True), using, place.uri)
        kvstore.read_value(store, _NO_KEY, place.uri)  # the configuration is known after the first read
        config = store.spec().to_json()["config"]
        found.append({key: value for key, value in config.items() if key != "uuid"})
    if any(config != found[0] for config in found):
        raise UnsupportedError(
            "unsupported item: the databases of the processes have different configurations",
            uri=folder.uri,
            cure="use another step",
        )
    return found[0]


def require_apart(renamed: Mapping[str, str], uri: str) -> None:
    """Refuse arrays whose keys are below those of another: they cannot be renamed separately.

    Raises:
        UnrepresentableError: two arrays have such keys.
    """
    for name in renamed:
        parts = name.split("/")
        outer = next(
            ("/".join(parts[:n]) for n in range(1, len(parts)) if "/".join(parts[:n]) in renamed), None
        )
        if outer is not None or (not name and len(renamed) > 1):
            raise UnrepresentableError(
                f"the keys of array {name!r} are below those of array {outer or ''!r}",
                uri=uri,
                cure="convert the checkpoint instead",
            )
