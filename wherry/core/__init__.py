"""The data types that every package uses, and helpers without further dependencies.

- KeyPath: the path of a leaf in a checkpoint's tree, a tuple of str as stored (`keypath`).
- TensorSpec: key path, shape, dtype, stored chunk grid and named axes of one tensor (`tensorspec`).
- Manifest: everything that one checkpoint holds (`manifest`).
- Detection: format, version, step and kind of a checkpoint, with the evidence (`detection`).
- Digest: the hash of a tensor, of all weights, of a checkpoint (`digest`).
- Receipt: what a conversion did; the edge of the lineage graph (`receipt`).
"""
