"""Pickles, interpreted by an inert machine that imports and calls nothing, and pickles that are written."""
