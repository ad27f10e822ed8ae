"""flax.training checkpoints: what names and trees tell, the GDA variant, and the layout of files that are written."""
