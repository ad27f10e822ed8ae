"""Zip archives as checkpoints have them: members stored raw or deflated, found and written without a copy."""
