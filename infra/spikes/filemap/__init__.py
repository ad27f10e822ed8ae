"""The spike of issue 44, step 0: a format's writer as a value, and one engine that writes it anywhere."""
