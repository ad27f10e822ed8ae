"""Quantised checkpoints: weights stored as codes of a few bits and scales that blocks of them share.

`schemes` says which ways of storing them are known, as data (`schemes.toml`). `tensors` pairs the codes of a checkpoint
with their scales. `codes` is the arithmetic. `view` shows a checkpoint as if it had been saved dequantised, so that
families, formats and checks need to know nothing of quantisation. `coded_view` is the way back, with the arithmetic of
`encode`. `ggml` and `ggml_view` do the same as `codes` and `view` for the blocks of GGUF files.
"""
