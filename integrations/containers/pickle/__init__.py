"""Pickles: read by an inert machine that imports and calls nothing, and written opcode by opcode."""
