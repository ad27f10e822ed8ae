"""Bytes on their way from a source to a target, within a budget of memory.

- Move: whole leaves of one target tensor with the regions of the source that they need (`move`).
- Carrier: carries out moves in threads (`carrier`).
- Output: a writer with its journal and its digests (`output`).
- Pool: the few buffers that all moves share (`pool`).
"""
