"""`wherry.toml` and the environment: what the user has set, and where each setting comes from.

- Config: the settings in force, each with its origin (`config`).
- Route: a rule that says which checkpoints are converted to what (`values`).
"""
