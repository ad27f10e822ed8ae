"""What operators see: how runs end, notifications, metrics, and checks before a run."""
