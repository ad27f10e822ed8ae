"""Units: one conversion cut into pieces that several processes, on one machine or on many, can make.

- Target files: which files a writer would create, and where each tensor lies in them (`target_files`); regions of a
  file that is larger than a unit (`regions`).
- Unit: files of the target, with the moves that fill them: the piece of work that another machine can do (`cut`).
- Job: a conversion that is cut; its plan is the queue, and the store of the target is the memory (`split_job`).
- Work: makes units that are free (`work`, `make`), and reads back what others have made (`prove`).
- Commit: takes what receipts name and proofs confirm, and finishes the target (`commit`, `proof_check`).

Units, claims, receipts and proofs as records are in `wherry.records`, and what starts the workers in `wherry.carriers`.
"""
