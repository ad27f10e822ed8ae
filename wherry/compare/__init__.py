"""Compares checkpoints by their contents: what differs between two of them, and statistics of the values of one."""
