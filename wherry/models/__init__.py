"""Registered models: register, promote, roll back, fetch.

- Registration: a version in the model registry that points to a checkpoint by digest (`register`).
- Policy: the gates that a version passes before its alias moves (`policy`).
"""
