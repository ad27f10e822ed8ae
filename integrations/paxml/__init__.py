"""PaxML on disk: flat names, the metadata item, padding, the treedef of its Flax checkpoints, and the writer."""
