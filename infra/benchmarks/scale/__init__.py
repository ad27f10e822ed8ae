"""`infra/bench --scale`: one conversion through several workers, measured on this machine, and simulated beyond it.

- `server`, the double: a server with the interface of S3 that needs no disk: the source is generated on read, of
  targets it keeps checksums.
- `fleet`: a row: one conversion through worker processes, each with a bandwidth of its own; some are killed or paused.
- `model`: the same conversion in simulated time, fitted to one worker.
- `report`: JSON, Markdown, curves, and the tables of the docs.
"""
