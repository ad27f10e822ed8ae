"""Target: what its files are, how their bytes come to storage, and how it becomes visible in one step or not at all.

- File map: what each byte of each file is (`file_map`, `grids`).
- Files: written at offsets on a local disk, with direct I/O, and made durable in groups (`files`, `blocks`); one that
  several processes write (`shared_file`); what one of several processes writes of them (`slice`).
- Lease: the right to write one target, held by one process and renewed by its heartbeat (`lease`, `lease_watch`).
- Staging: what a conversion writes until the commit (`staging`). Each kind of sink has its own: an area on a disk
  (`file_staging`, `area`), objects of a store (`object_staging`), files that are copied (`copied_staging`).
- Signed log and journal: which moves are durable, so that another run resumes (`signed_log`, `journal`).
- Clean: what ended runs have left, and whether somebody still uses it (`clean`, `leftovers`, `owners`, `in_use`);
  temporary files outside of targets (`janitor`).
"""
