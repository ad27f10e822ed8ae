"""Units: one conversion cut into pieces that several processes, on one machine or on many, can make.

- Unit: files of the target, with the moves that fill them: the piece of work that another machine can do (`unit`).
- Target files: which files a writer would create, and where each tensor lies in them (`target_files`).
- Job: a conversion that is cut; its plan is the queue, and the store of the target is the memory (`job`).
- Claim: a worker's right to make a unit, which expires when the worker stops to renew it (`claims`).
- Unit receipt: what an attempt at a unit has made, with the hashes of its leaves (`unit_receipt`).
- Unit proof: what another process than its maker has read back of a unit (`unit_proof`, `prove`); what a commit takes
  from it (`proof_check`).
- Carrier: what starts the workers (`carriers`).
"""
