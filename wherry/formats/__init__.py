"""Checkpoint formats: the interface of a format, the registry of all formats, and how a checkpoint is opened.

- Format: one row of the registry: how a system is detected, opened and created, and what it can hold (`format`).
- Contents: the interface through which one checkpoint is read (`format`).
- Access: how the bytes of one tensor are read: Stored, Chunked or Computed (`format`).
- Checkpoint: an opened checkpoint, read-only (`checkpoint`).
- Pin: the state of a source's files when it was opened; it must still hold at the commit (`checkpoint`).
"""
