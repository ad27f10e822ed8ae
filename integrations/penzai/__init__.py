"""Penzai beyond Orbax: restore the axis names and labels of NamedArrays."""
