"""Credentials in what libraries say are taken out before it is shown or kept."""

from __future__ import annotations

import types

import pytest

from wherry.errors import internal_error, redact, storage_error
from wherry.ledger.deliver import _describe_error
from wherry.remote.errors import translate_error

PRESIGNED = (
    "403 Forbidden for url: https://cdn.example/x?X-Amz-Credential=AKIAsecret%2F1&X-Amz-Expires=3600"
    "&X-Amz-Signature=secret&X-Amz-Security-Token=secret"
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:secret@h/db refused", "postgresql://***@h/db refused"),
        ("postgresql://u:secr/et@h/db refused", "postgresql://***@h/db refused"),
        ("https://cdn/x?Policy=secret&Key-Pair-Id=secret", "https://cdn/x?Policy=***&Key-Pair-Id=***"),
        ("https://blob/x?sv=1&sig=secret", "https://blob/x?sv=1&sig=***"),
        ("{'authorization': 'Bearer secret', 'a': 1}", "{'authorization': 'Bearer ***', 'a': 1}"),
        ('{"password": "secret"}', '{"password": "***"}'),
        ("hdfs://host:8020/user/me@corp/x: no such file", "hdfs://host:8020/user/me@corp/x: no such file"),
        ("gs://bucket/a@b", "gs://bucket/a@b"),
        ("not found (/tmp/s3:/user:secret@bucket/x)", "not found (/tmp/s3:/***@bucket/x)"),
        ("C:/Users/me@corp/x", "C:/Users/me@corp/x"),
        ("AccountKey=secret==;EndpointSuffix=x", "AccountKey=***;EndpointSuffix=x"),
        ("sent Bearer secret9x", "sent Bearer ***"),
        ("bearer tokens are fine", "bearer tokens are fine"),
        ("no access key: run it", "no access key: run it"),
        ("tokenizer: not found", "tokenizer: not found"),
        ("NoAuthTokenError: no credentials", "NoAuthTokenError: no credentials"),
    ],
)
def test_what_is_taken_out_and_what_stays(text, shown):
    assert redact(text) == shown


def hub(text):
    kind = types.new_class("HfHubHTTPError", (Exception,), {}, lambda body: body.update(__module__="httpx"))
    error = kind(text)
    error.response = types.SimpleNamespace(status_code=403)
    return error


def test_every_translation_is_clean():
    found = [
        translate_error(hub(PRESIGNED), "hf", "a/b"),
        storage_error(OSError(PRESIGNED), "s3://b"),
        storage_error(OSError(5, PRESIGNED), "s3://b"),
        internal_error(KeyError(PRESIGNED)),
    ]
    texts = [*map(str, found), _describe_error(KeyError(PRESIGNED))]
    assert ["secret" in text for text in texts] == [False] * 5
    assert all("X-Amz-Expires=3600" in text for text in texts)
