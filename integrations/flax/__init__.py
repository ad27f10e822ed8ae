"""Flax boxes: axis names and partition specs for the leaves of a tree, from the names kept with a checkpoint."""
