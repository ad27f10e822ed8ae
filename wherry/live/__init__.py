"""Training state in memory: exported to a checkpoint, and restored from one.

- Snapshot: a copy of the state in host memory, so that training goes on (`snapshot`).
- Export: the handle of an export that runs in the background (`handle`).
- Store: save, restore, latest and best of one training run (`store`).
"""
