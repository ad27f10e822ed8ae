"""The append-only, hash-chained record of what was converted, verified, registered and removed.

- Statement: one line of the chain; it names the digest of the line before (`statements`).
- Ledger: the chain and the tables that are derived from it (`record`).
- State: the result of all statements up to a moment, as records of checkpoints, places and conversions (`replay`).
- Cursor: how far a projection (OpenLineage, MLflow) has been delivered (`deliver`).
"""
