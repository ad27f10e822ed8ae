"""Proves what a checkpoint holds: verify, inspect, diff, audit.

- Verification: the verdict of one level of checks on one checkpoint (`verify`).
- Evidence of bytes: what reading every byte of a checkpoint has shown, compared with its sidecar (`evidence`).
- Difference: what two checkpoints do not share (`differences`), and statistics of the values of one (`statistics`).
- Finding: what an audit of ledger, storage and model registry found, with its severity and its cure (`report`).
- Bundle: the evidence of an audit as files that others can check (`bundle`).
"""
