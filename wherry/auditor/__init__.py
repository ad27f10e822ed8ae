"""What the ledger says against what storage and the registry hold.

- Finding: one difference, with its severity and its cure (`report`).
- Bundle: the evidence of an audit as files that others can check (`bundle`).
"""
