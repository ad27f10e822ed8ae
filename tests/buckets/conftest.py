"""Buckets of emulated stores."""

from tests.support.bucket_fixtures import bucket, bucket_servers

__all__ = ["bucket", "bucket_servers"]
