"""OCDBT databases, the key-value store of Orbax: their B+tree read and written without tensorstore."""
