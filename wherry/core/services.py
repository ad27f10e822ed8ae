"""services: modules of upper packages and integrations that lower packages may call, by their dotted names.

A module is imported when it is first requested. A row names the package that the service needs and the extra that
installs it, so that the error for a missing package says what to install.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from wherry.errors import missing_extra

# service → (module, package that it needs, extra of wherry that installs the package).
_SERVICES: dict[str, tuple[str, str, str]] = {
    "settings": ("wherry.config.settings", "", ""),
    "ledger": ("wherry.ledger.nodes", "", ""),
    "read": ("wherry.mover.read", "", ""),
    "janitor": ("wherry.target.janitor", "", ""),
    "native": ("wherry.integrations.native", "jax", "jax"),
    "live": ("wherry.integrations.live.fill", "jax", "jax"),
    "mlflow": ("wherry.integrations.mlflow", "mlflow", "mlflow"),
    "mlflow-probe": ("wherry.integrations.mlflow_probe", "", ""),
    "mlflow-rest": ("wherry.integrations.mlflow_rest", "", ""),
    "mlflow-sqlite": ("wherry.integrations.mlflow_sqlite", "", ""),
    "prefect": ("wherry.flows.convert", "prefect", "prefect"),
    "prefect-notify": ("wherry.tasks.notify", "prefect", "prefect"),
    "dask": ("wherry.integrations.engines.dask", "distributed", "dask"),
    "ray": ("wherry.integrations.engines.ray_actors", "ray", "ray"),
    "deploy": ("wherry.integrations.prefect.deploy", "prefect", "prefect"),
    "serve": ("wherry.flows.serve", "prefect", "prefect"),
    "signing": ("wherry.integrations.signing", "cryptography", "sign"),
    "openlineage": ("wherry.integrations.openlineage", "", ""),
    "export-state": ("wherry.integrations.live.export", "", ""),
    "export-processes": ("wherry.integrations.live.processes", "", ""),
}


_TRUST = "wherry.config.trust"  # judges the settings that Prefect would read in the working folder


def service(name: str) -> Any:
    """The module of a service.

    Raises:
        MissingExtraError: the package that it needs is not installed.
        HostileError: Prefect is needed, and would read its settings from a checkpoint's folder.
    """
    module, package, extra = _SERVICES[name]
    if package == "prefect":
        import_module(_TRUST).require_own_prefect_settings()
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == package:
            raise missing_extra(package, extra, name) from error
        raise
