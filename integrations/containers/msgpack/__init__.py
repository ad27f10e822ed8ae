"""MessagePack files of Flax and Orbax: an index of where each tensor is, and the layout of files that are written."""
