"""Storage of checkpoint files: where they are, how they are read, and how writes become durable.

- Location: one file or folder in one store (`location`).
- Store: a local disk or an object store, with declared capabilities (`stores`).
- Sidecar: the manifest stored next to a checkpoint that wherry wrote (`sidecar`).
- Home: the folder of the user's ledger, keys and settings (`home`).
"""
