"""Adapters of engines: each opens a pool of workers for `wherry.workers`, in about a hundred lines."""
