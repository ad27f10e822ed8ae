"""records: what the processes of a divided conversion leave for one another: units, claims, receipts, proofs.

Each is a small file or object in the folder of the job, created once and never changed; a claim expires. Nothing here
reads a source or writes a target: `wherry.units` makes, reads back and commits what these records name.
"""
