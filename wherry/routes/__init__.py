"""What should exist: routes, what is missing, the nightly run, and what is removed.

- Survey: the checkpoints of a route's roots and what each of them lacks (`survey`).
- Night: one pass over all routes (`night`).
- Retention: the rules that say which checkpoints are kept (`prune`).
"""
