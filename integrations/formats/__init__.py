"""One file per checkpoint system: how it is recognised, read and written. The registry finds them here."""
