"""Files of `torch.save`: the zip archive since torch 1.6, the legacy stream before it, and the writer."""
