"""The site: read-only pages over the whole ledger, served on this machine alone; `wherry lineage serve`."""
