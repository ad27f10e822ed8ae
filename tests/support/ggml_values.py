"""Values for blocks of GGUF."""

import numpy as np


def k_values():
    """Blocks of 256 values of many shapes: signs, sizes, whole numbers, zeros, runs of very different sizes."""
    draw, shape = np.random.default_rng(0), (8, 256)
    plain = draw.normal(size=shape)
    rows = [
        plain, 1e-3 * plain, np.abs(plain) + 1, -np.abs(plain) - 1, plain * (draw.random(shape) < 0.1), 1e-7 * plain,
        1e-12 * plain, np.full(shape, 0.3), np.full(shape, -0.3), np.zeros(shape), draw.standard_cauchy(shape),
        draw.integers(-3, 4, shape), 1e4 * plain, plain * 10.0 ** draw.integers(-12, 4, shape),
        plain * np.repeat(10.0 ** draw.integers(-14, 3, (8, 16)), 16, axis=1),
    ]  # fmt: skip
    return np.concatenate(rows).astype("f4")
