"""`wherry.toml` and environment variables: the user's settings, each with its origin.

- Config: the effective settings, each with its origin (`config`).
- Route: a rule that says which checkpoints are converted to what (`values`).
"""
