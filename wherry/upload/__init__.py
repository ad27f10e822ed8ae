"""Upload: files of a target that are written at offsets, and become objects of a store without a copy on a local disk.

- Pieces: the bytes of one part, in the order in which they come (`pieces`).
- Overflow: pieces of incomplete parts that wait in the store, where memory may hold no more (`overflow`).
- Sender: the threads that send parts, and the memory of all parts that wait (`sender`).
- Uploaded file: one object that is sent in parts, or by one put if it is small (`uploaded_file`).
- Growing file: one to which bytes are appended, whose size is known at its end (`growing_file`).
- Known bytes: what earlier runs have sent of an object, if its bytes are the same (`known_bytes`).
- Upload run: all objects of one run, and what an earlier run has sent of them (`run`).
- Staged objects: the store in which the writer and the reader of a target see it before it is committed (`staged`).
"""
