"""Meta Lingua: how it names things, and what lies around the tensors of its checkpoints."""
