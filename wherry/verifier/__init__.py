"""Verifies and inspects checkpoints: verify, native loading, inspect.

- Verification: the verdict of one level of checks on one checkpoint (`verify`).
- Evidence of bytes: what reading every byte of a checkpoint has shown, compared with its sidecar (`evidence`).
"""
