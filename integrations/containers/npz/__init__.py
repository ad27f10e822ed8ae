"""NumPy files: `.npy` headers and `.npz` archives, read and written without loading an array."""
