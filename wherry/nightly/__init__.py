"""Which targets should exist, the nightly run that makes the missing ones, retention, and what is said of runs.

- Survey: the checkpoints below a route's root (`survey`), and their missing targets (`reconcile`).
- Night: one pass over all routes (`night`).
- Retention: the rules that say which checkpoints are kept (`prune`).
- End of a run: notifications and metrics (`ending`, `notify`, `metrics`); checks before one (`preflight`, `doctor`).
"""
