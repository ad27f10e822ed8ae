"""Carriers: how the units of a job are distributed over workers.

- Carrier: a name for `--on`, and a function that makes workers make every unit and yields each receipt (`carrier`).
- Engine: software that runs functions on workers: Dask. Its adapter lies in `wherry.integrations.engines`.
- Worker pool: the workers of an engine, as the coordinator sees them (`worker_pool`).
- Coordinator: gives one unit at a time to each worker that has proved itself (`coordinator`).
- Challenge: what a worker has to answer before it gets a unit (`challenge`).
- Read unit: a part of a checkpoint that a worker reads and hashes, for a verification (`read_units`, `hash_on`).
- Straggler: a unit that takes much longer than the others, and gets a second attempt (`stragglers`).

The plan is the queue and the store is the memory: receipts are records beside the target, so a carrier that dies leaves
a job that the same command, another carrier or `wherry work` takes up.
"""

THREADS = "threads"  # the name for this process, which needs none of what follows
