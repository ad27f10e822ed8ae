"""Conversions to MaxText, with the config that comes out, and the tensors of any checkpoint by name."""

from __future__ import annotations

import yaml

import wherry


def tensors(folder):
    """Key path, with slashes → array."""
    with wherry.open(folder) as checkpoint:
        return {"/".join(path): checkpoint.read(path) for path in checkpoint.manifest.tensors}


def to_maxtext(source, target, options=None):
    """Convert a model to MaxText; MaxText's config of it."""
    wherry.convert(source, target, to="maxtext", options=options or {}, lineage=False)
    return yaml.safe_load((target / "items" / "assets" / "maxtext_config.yml").read_text())
