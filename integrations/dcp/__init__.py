"""PyTorch's distributed checkpoints (DCP): their metadata, their items, and a writer, all without torch."""
