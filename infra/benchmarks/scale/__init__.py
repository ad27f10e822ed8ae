"""`infra/bench --scale`: one conversion through several workers, measured on this machine, and simulated beyond it.

- Double: a server with the interface of S3 that needs no disk: the source is generated on read, of targets it keeps
  checksums (`content`, `folder`, `objects`, `parts`, `answers`, `caps`, `tally`, `server`).
- Fleet: worker processes, each with a bandwidth of its own; they can be killed and paused (`fleet`).
- Row: one conversion through a fleet, with what was seen of it (`rows`, `place`, `carry`, `disk_row`).
- Model: the same conversion in simulated time (`model`, `forecast`).
- Report: JSON, Markdown, curves, and the tables of the docs (`report`, `curves`, `tables`).
"""
