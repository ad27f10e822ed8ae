"""Where each tensor and each element goes: key paths renamed, axes, regions and values changed; pure arithmetic.

- Mapping: which source tensor becomes which target tensor, and which are ignored by a named rule (`mapping`).
- Rename: a rule that rewrites key paths (`renames`).
- Names in memory: those of transformers 5 that differ from the published ones (`memory_names`).
- Axis names: logical names, partition specs and scan axes of tensors (`axes`).
- Layout: the axes of a parameter in one system, in the order in which they are stored (`layout`).
- Box: a region of a tensor, as a range of each of its axes (`copies`).
- Word: an invertible change of values, such as `cast`, `scale` or `pad` (`words`).
"""
