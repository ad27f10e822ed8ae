"""What a checkpoint system is to the engine, which systems there are, and how a checkpoint is opened.

- Format: one row of the registry: how a system is detected, opened and created, and what it can hold (`format`).
- Reader, Writer: what a format gives to read one checkpoint or to write one (`reader`, `writer`).
- Access: how the bytes of one tensor can be had, as its reader declares it (`reader`).
- Checkpoint: an opened checkpoint, read-only (`checkpoint`).
- Pin: the state of a source's files when it was opened; it must still hold at the commit (`pin`).
"""
