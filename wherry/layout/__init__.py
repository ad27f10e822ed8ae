"""Relayout: pure arithmetic on axes, regions and values that decides which elements of a tensor go where.

- Layout: the axes of a parameter in one system, in the order in which they are stored (`layout`).
- Box: a region of a tensor, as a range of each of its axes (`copies`).
- Word: an invertible change of values, such as `cast`, `scale` or `pad` (`words`).
"""
