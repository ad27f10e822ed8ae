"""Text of checkpoints: JSON, YAML and TOML read within limits, and names as they are printed.

A **limit** bounds what a file becomes in memory and the time that this takes, not its length. An **entry** is one
member of a large object or array, which is read without the others.
"""
