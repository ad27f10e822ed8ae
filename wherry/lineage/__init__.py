"""Lineage from the ledger: what produced a checkpoint, what was derived from it, and what is stale."""
