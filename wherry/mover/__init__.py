"""The mover: transfers bytes from a source to a target within a memory budget.

- Move: whole leaves of one target tensor with the regions of the source that they need (`move`).
- Way: how a tensor is read within the budget, found from its Access (`move`); `read` reads a region of it.
- Source: gives the bytes of moves by these ways (`source`), through spill files where chunks are too large (`decode`).
- Carrier: carries out moves in threads, those that are read together as a batch (`carrier`).
- Output: a target with its journal and its digests (`output`), which MapWriter and ChunkWriter write.
- ReadBack: compares durable parts of an output with the source while later parts are written (`readback`).
- Pool: the few buffers that all moves share (`pool`).
"""
