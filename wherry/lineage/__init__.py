"""Answers from the ledger: what made this, what was made of it, what is stale."""
