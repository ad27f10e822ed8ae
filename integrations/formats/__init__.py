"""One file per checkpoint system: how to detect, read and write its format. The registry finds the modules here."""
