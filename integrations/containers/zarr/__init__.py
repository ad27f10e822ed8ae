"""Arrays in a folder or an OCDBT database: zarr 2 and 3 metadata, chunks, codecs, the reader and the chunk store."""
