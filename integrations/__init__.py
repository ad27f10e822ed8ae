"""Integrations: everything that knows an outside system, each module imported only when it is needed."""

from __future__ import annotations

import os

# MLflow reports its use to a server of its makers. Set this to false to allow it.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
