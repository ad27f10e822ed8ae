"""The data types that every package uses, text read within limits, and the process that wherry runs in.

- KeyPath: the path of a leaf in a checkpoint's tree, a tuple of str as stored (`keypath`).
- TensorSpec: key path, shape, dtype, stored chunk grid and named axes of one tensor (`tensorspec`).
- Manifest: everything that one checkpoint holds (`manifest`).
- Detection: format, version, step and kind of a checkpoint, with the evidence (`detection`).
- Digest: the hash of a tensor, of all weights, of a checkpoint (`digest`).
- Receipt: what a conversion did; the edge of the lineage graph (`receipt`).
- Limit: a bound on what JSON, YAML or TOML becomes in memory and the time that this takes, not on its length
  (`limits`); a large document is read entry by entry (`json_document`).
- Crew: a few threads that carry out tasks until the first one fails (`threads`).
- Child: a process that wherry starts with a minimal environment, an empty working folder and limits (`child`).
"""
