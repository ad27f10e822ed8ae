"""Staging: a target is written beside its final path, then made visible in one step.

- Area: the private folder `.wherry-<name>.<id>-<token>` in which a target is written (`area`).
- Lease: the right to write one target, held by one process and renewed by its heartbeat (`lease`).
- Takeover: how a process continues the area of an owner that has ended (`takeover`).
- Journal: which moves are durable in an area, signed, so that another run resumes (`journal`).
- Staging: the area, its journal and its lease together, up to the commit (`staging`).

In a store of objects there are no areas: a target is uploaded as it is written (`object_staging`, with `object_lease`
and `object_journal`), or from a local folder at the commit (`copied_staging`).
"""
