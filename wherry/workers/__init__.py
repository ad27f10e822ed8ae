"""workers: one conversion, or one read of a checkpoint, by several processes on one machine or on many.

- Unit: files of the target, or a region of one, with the moves that fill them (`unit`, `target_files`).
- Job: a conversion that is cut into units; its plan is the queue, and the store of the target is the memory (`job`).
- Records: small signed files in the folder of the job, by which its processes agree (`records`, `record`, `claims`).
- Task: what a worker does at a time: it makes a unit (`make`), or reads back what another has made (`read_back`). A
  worker takes tasks by itself (`work`), or a coordinator gives them to the workers of an engine (`coordinator`,
  `job_work`); engines have names (`engines`), and their adapters lie in `wherry.integrations.engines`.
- Commit: takes what records name and confirm, and finishes the target (`commit`).
- Read unit: a part of a checkpoint that a worker reads and hashes, for a verification (`hash_on`).

Whatever dies leaves a job that the same command, another engine or `wherry work` takes up.
"""

THREADS = "threads"  # the name for this process, which needs none of what follows
