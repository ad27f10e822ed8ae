"""Flat files: raw tensor bytes at known offsets of a file, read by extents and written by spans."""
