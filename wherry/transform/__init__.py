"""A checkpoint as another one that is computed from it while it is read: other layouts, types and codes, merges.

- View: a checkpoint whose tensors have the key paths, axes and values of another system, and the inverse (`view`,
  `inverse`); `choose` decides whether a conversion needs one.
- Group: the sources and targets of a view that must be in memory together (`groups`).
- Scheme: one way in which checkpoints store quantised weights, as a row of `schemes.toml` (`schemes`). `dequantize`
  shows such a checkpoint as if it had been saved plain, so that families, formats and checks need to know nothing of
  quantisation; `quantize` is the way back. `ggml_view` does the same for the blocks of GGUF files, both ways.
- Merge: several opened checkpoints as one, and the checkpoint that a merge makes of them (`merge_view`): weighted sums,
  or a base with a PEFT LoRA adapter (`merged_adapter`).
"""
