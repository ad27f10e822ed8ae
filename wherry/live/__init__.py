"""Export a training state in memory to a checkpoint, and restore it from one.

- Snapshot: a copy of the state in host memory, so that training can continue (`snapshot`).
- Export: the handle of an export that runs in the background (`handle`).
- Store: save, restore, latest and best of one training run (`store`).
"""
