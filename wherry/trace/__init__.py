"""What the ledger knows: what produced a checkpoint, what was derived from it, what is stale, and what exists.

- Lineage: the answers of the ledger about one checkpoint (`answers`), as text and as a page (`lineage_text`, `page`).
- Catalog: the checkpoints that exist, as a list and as sums of their sizes (`catalog`).
- Site: read-only pages over the whole ledger, served on this machine alone (`site_server`, `site_pages`).
"""
