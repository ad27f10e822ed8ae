"""Whether a checkpoint is what it should be: verify, native loading, inspect.

- Verification: the verdict of one level of checks on one checkpoint (`verify`).
"""
