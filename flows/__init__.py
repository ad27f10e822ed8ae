"""Flows: the workflows that chain the tasks; each file is an entrypoint that Prefect can load by path or by name."""
