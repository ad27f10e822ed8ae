"""The catalog: what the ledger knows of the checkpoints that exist, as a list and as sums of their sizes."""
