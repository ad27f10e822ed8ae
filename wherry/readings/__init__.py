"""Readings: cuts what several workers read and hash: a checkpoint, or the boxes of a target that is being made.

- Units of a checkpoint that is read (`read_units`).
- Boxes: chunks that are no runs of a tensor's bytes (`box_readings`), read before there is metadata
  (`made_checkpoint`), and what the commit believes of that (`box_check`).
"""
