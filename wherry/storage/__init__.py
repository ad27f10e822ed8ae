"""Storage of checkpoint files: where they are, how they are read, and how writes become durable.

- Location: one file or folder in one store (`location`).
- Stores: that of a local disk, and the parsing of URIs (`stores`); files are opened by the rules of `open_file`.
- Views: a remote store as one command sees it (`object_view`).
- Sidecar: the manifest stored next to a checkpoint that wherry wrote (`sidecar`).
- Home: the folder of the user's ledger, keys and settings (`home`).
"""
