"""Routes: which targets should exist, which are missing, the nightly run that makes them, and retention.

- Survey: the checkpoints below a route's root (`survey`), and their missing targets (`reconcile`).
- Night: one pass over all routes (`night`).
- Retention: the rules that say which checkpoints are kept (`prune`).
"""
