"""Live training states: trees of JAX, Flax, NNX and Penzai, modules and state dicts of PyTorch, as wherry sees them."""
