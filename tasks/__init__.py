"""Tasks: the steps as Prefect tasks, one file per verb, each a thin wrapper of the engine's function of that name.

A task is a step of one checkpoint, never a tensor, a chunk or a request: a task costs 11–17 ms and several rows in
Prefect's database. Tasks take and return only JSON values; nothing is pickled.
"""
