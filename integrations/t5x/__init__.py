"""T5X: its legacy checkpoints (a msgpack tree beside zarr arrays) and those it saves through Orbax."""
