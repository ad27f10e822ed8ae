"""Adapters of engines: each opens a pool of workers for `wherry.carriers`, in about a hundred lines."""
