"""Converts checkpoints: plan, convert, rewrite.

- Plan: the moves of a conversion with their bytes and memory, and a digest (`plan`).
- Job: one target of a conversion while it is being written (`job`).
- Proof: the written checkpoint read back and compared with its source (`proof`).
"""
