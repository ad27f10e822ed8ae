"""Audit: compare the ledger with storage and the model registry.

- Finding: one difference, with its severity and its cure (`report`).
- Bundle: the evidence of an audit as files that others can check (`bundle`).
"""
