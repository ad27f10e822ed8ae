"""remote: calls of remote stores that always end: deadlines, retries, lines about long waits, errors with cures.

It knows the libraries (gcsfs, s3fs, adlfs, huggingface_hub), and nothing of checkpoints. `wherry.store.remote_store`
makes a store of it.
"""
