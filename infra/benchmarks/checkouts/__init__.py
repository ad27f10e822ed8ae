"""`infra/bench --against DIR`: is this wherry as fast as that of another checkout, for example an older commit?

- Rows: what is done with which container, of which size (`rows`), and the checkpoints that it is done with (`inputs`).
- Child: a warm process that imports the wherry of one checkout, and measures the processor time of one call (`child`).
- Bench: two children do each row by turns; the report has the ratio of their least times (`bench`, `report`).
"""
