"""The byte containers that several formats share: safetensors, zarr and OCDBT, torch zip, inert pickle."""
