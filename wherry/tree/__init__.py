"""Renaming key paths: the name in one checkpoint of a tensor of another.

- Mapping: which source tensor becomes which target tensor, and which are ignored by a named rule (`mapping`).
- Rename: a rule that rewrites key paths (`renames`).
- Names in memory: those of transformers 5 that differ from the published ones (`memory_names`).
- Axis names: logical names, partition specs and scan axes of tensors (`axes`).
"""
