"""prices: a table of prices of stores, and what the traffic of a plan costs by it.

    currency = "USD"

    [stores."s3"]                # or of one bucket: [stores."s3://models"]
    reads = 0.4                  # of a million requests
    writes = 5.0
    lists = 5.0
    egress = 90.0                # of a TB (10^12 bytes) that leaves the store
    ingress = 0.0                # of a TB that is written

A row of a bucket takes precedence over that of its protocol. `docs/prices.example.toml` is an example with invented
prices: what a provider asks depends on region, storage class, network and contract.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wherry.core.config_text import parse_toml
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import NotFoundError, UsageError
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG

if TYPE_CHECKING:
    from wherry.converter.plan import StoreTraffic

# name → how many requests or bytes a price is for.
_UNITS = {"reads": 1e6, "writes": 1e6, "lists": 1e6, "egress": 1e12, "ingress": 1e12}


@dataclass(frozen=True, slots=True)
class Cost:
    """What traffic costs.

    Attributes:
        currency: of the amounts.
        stores: store → amount; None where the table has no row for it.
    """

    currency: str
    stores: Mapping[str, float | None]

    @property
    def total(self) -> float:
        """The sum of the known amounts."""
        return sum(amount for amount in self.stores.values() if amount is not None)

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry plan --json`."""
        return {"currency": self.currency, "stores": dict(self.stores), "total": self.total}


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices by store.

    Attributes:
        currency: as it is printed.
        stores: protocol, or protocol and bucket → name of `_UNITS` → price.
    """

    currency: str
    stores: Mapping[str, Mapping[str, float]]

    def cost(self, traffic: Sequence[StoreTraffic]) -> Cost:
        """What traffic costs."""
        return Cost(self.currency, {one.store: self._amount(one) for one in traffic})

    def _amount(self, one: StoreTraffic) -> float | None:
        prices = self.stores.get(one.store, self.stores.get(one.store.partition("://")[0]))
        if prices is None:
            return None
        return sum(getattr(one, name) / unit * prices.get(name, 0.0) for name, unit in _UNITS.items())


def load_prices(file: str | os.PathLike[str]) -> PriceTable:
    """Read a table of prices.

    Raises:
        NotFoundError, StorageError: the file cannot be read.
        UsageError: it is not a table of prices.
    """
    place = locate(file)
    if place.entry is None:
        raise NotFoundError("file not found", uri=place.uri, cure="pass the path of a table of prices")
    try:
        data = parse_toml(place.read_whole(MOST_CONFIG), "the table of prices", uri=place.uri)
        _require_valid(data)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        cure = "see docs/prices.example.toml"
        raise UsageError(f"invalid table of prices: {error}", uri=place.uri, cure=cure) from error
    return PriceTable(data.get("currency", "USD"), data["stores"])


def _require_valid(data: Mapping[str, Any]) -> None:
    stores: dict[str, dict[str, Any]] = data["stores"]
    names = (name for row in stores.values() for name in row if name not in _UNITS)
    unknown = [*(name for name in data if name not in ("currency", "stores")), *names]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; a store has {', '.join(_UNITS)}")
    if not isinstance(data.get("currency", ""), str):
        raise TypeError(f"currency must be text, got {data['currency']!r}")
    for store, row in stores.items():
        for name, price in row.items():
            if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
                raise ValueError(f"{name} of {store} must be a number that is not negative, got {price!r}")
