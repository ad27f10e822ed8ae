"""Operations: the end of runs, notifications, metrics, and checks before a run."""
