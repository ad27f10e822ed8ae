"""Target: what its files are, how their bytes come to storage, and how it becomes visible in one step or not at all.

- File map: what each byte of each file is (`file_map`, `grids`).
- Files: written at offsets and made durable in groups, on a disk with direct I/O, or in a store; what one of several
  processes writes of them is a slice (`files`).
- Upload: the same files in a store, where each becomes an object, which is sent in parts, or by one put if it is small
  (`uploaded_file`); bytes of parts wait in memory, or in the store, until they are sent (`parts`). A run has all
  objects of a target (`upload_run`), which are seen under their final names before the commit (`staged_objects`).
- Lease: the right to write one target, held by one process and renewed by its heartbeat (`lease`).
- Staging: what a conversion writes until the commit (`staging`). Each kind of sink has its own: an area on a disk
  (`staging`), objects of a store (`object_staging`), files that are copied (`copied_staging`).
- Committed: on a disk by the rename of the area, in a bucket by the last object, a create-only put; a single object is
  its own commit (`object_staging.is_committed`).
- Signed log and journal: which moves are durable, so that another run resumes (`signed_log`, `journal`).
- Clean: what ended runs have left, and whether somebody still uses it (`clean`, `leftovers`);
  temporary files outside of targets, and marks on what is read (`janitor`).
"""
