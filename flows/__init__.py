"""Flows: workflows that chain the tasks. Each file is an entrypoint that Prefect can load by path or by name."""
