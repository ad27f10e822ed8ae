"""Credentials in what libraries say are taken out before it is shown or kept."""

from __future__ import annotations

import time
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wherry.credentials import redact, redact_values
from wherry.errors import UsageError, internal_error, storage_error
from wherry.ledger.deliver import _describe_error
from wherry.store.failures import translate_error
from wherry.store.local_store import locate

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
        ("s3://AK:12/secret@bucket/x", "s3://***@bucket/x"),
        ("https://u:p@secret@h/x", "https://***@h/x"),
        ("password='a, secret' host=h", "password='***' host=h"),
        ("{'secret': 'a,secret', 'b': 1}", "{'secret': '***', 'b': 1}"),
        ("https://h/x?sas=secret&a=1", "https://h/x?sas=***&a=1"),
        ("https://h/x?auth=secret", "https://h/x?auth=***"),
        ("https://h/x?tok%65n=secret", "https://h/x?tok%65n=***"),
        ("u=https%3A%2F%2Fh%3Fsig%3Dsecret", "u=https%3A%2F%2Fh%3Fsig%3D***"),
        ("https://hooks.slack.com/services/T0/B0/secret", "https://hooks.slack.com/services/***"),
        ("-----BEGIN PRIVATE KEY-----\nsecret\n", "-----BEGIN PRIVATE KEY-----***"),
        ("signature:      valid", "signature:      valid"),
        ("{'signature': 'secret'}", "{'signature': '***'}"),
        ("sk-learn-classifier-of-a-long-name", "sk-learn-classifier-of-a-long-name"),
    ],
)
def test_what_is_taken_out_and_what_stays(text, shown):
    assert redact(text) == shown


_OF_TOKENS = (
    "eos_token_id", "decoder_start_token_id", "pad_token_id", "forced_bos_token_id", "image_token_index",
    "max_tokens", "num_tokens", "tokens_per_step", "max_new_tokens", "token_accuracy",
)  # fmt: skip
_NUMBERS = st.one_of(
    st.integers(-10, 10**12).map(str), st.floats(0, 1e6).map("{:.4g}".format), st.just("2e12")
)


@given(
    st.sampled_from(_OF_TOKENS),
    _NUMBERS,
    st.sampled_from(
        (
            "{0} = {1}",
            "{0}={1}",
            '"{0}": {1},',
            "{0}: {1}",
            "set {0}={1}.",
            "--set {0}=[{1}, 7]",
            "({0} = {1})",
        )
    ),
)
def test_numbers_of_tokens_stay(name, number, form):
    text = form.format(name, number)
    assert redact(text) == text
    assert redact_values({name: number}) == {name: number}


@pytest.mark.parametrize(
    "text",
    [
        "pad_token: '<pad>'", '"eos_token": "</s>"', "image_token='<image>'", "bos_token=[BOS]",
        "--set eos_token_id=VALUE", "unk_token: '<|endoftext|>'", "eos_token_id is 2; pad_token_id = None",
    ],
)  # fmt: skip
def test_tokens_of_a_vocabulary_stay(text):
    assert redact(text) == text


@given(
    st.sampled_from(
        (
            "token", "hf_token", "access_token", "HF_TOKEN", "id-token", "token_id", "refresh_token", "password",
            "db_password", "secret", "client_secret", "api_key", "passphrase",
        )
    ),
    st.text("abcdefghijkXYZ0123456789", min_size=8, max_size=40).filter(lambda one: not one.isdigit()),
    st.sampled_from(
        (
            "{0}={1}", "{0} = {1}", "{0}='{1}'", "https://h/x?{0}={1}&a=1", "u=https%3A%2F%2Fh%3F{0}%3D{1}",
            '{0}="{1}"',
        )
    ),
)  # fmt: skip
def test_secrets_do_not_stay(name, secret, form):
    assert secret not in redact(form.format(name, secret))


@given(st.sampled_from(["password", "db_password", "secret", "api_key"]), st.integers(0, 10**9).map(str))
def test_a_password_may_be_a_number(name, number):
    assert redact(f"{name}={number}") == f"{name}=***"


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "a1" * 17, "github_pat_11AB" + "a_1" * 10, "sk-proj-" + "a-1" * 10, "sk-" + "a1" * 24,
        "npm_" + "a1" * 18, "dckr_pat_" + "a-1" * 9, "ya29.a0" + "a_1" * 10, "GOOG1E" + "A1" * 28,
        "dapi" + "0f" * 16, "pnu_" + "a1" * 18, f"eyJ{'a1' * 9}.{'b2' * 9}.{'c3' * 9}", "glpat-" + "a1" * 12,
    ],
)  # fmt: skip
def test_tokens_of_known_form(token):
    assert redact(f"used {token} for it") == "used *** for it"
    assert redact_values({"note": token}) == {"note": "***"}


@pytest.mark.parametrize(
    "name",
    ["key", "sas", "cred", "OPENAI_API_KEY", "ssh_key", "api key", "db_pwd", "login", "pat", "auth", "psk"],
)
def test_names_of_metadata_that_state_a_credential(name):
    assert redact_values({name: "value"}) == {name: "***"}


@pytest.mark.parametrize(
    "name", ["keys", "keynote", "compass", "passes", "patience", "author", "monkey", "tokens"]
)
def test_names_of_metadata_that_do_not(name):
    assert redact_values({name: "17"}) == {name: "17"}


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AK:12/secret@bucket/x", "s3://u:p@bucket/x", "https://h/x?sas=secret", "https://h/x?tok%65n=secret",
        "gs://bucket/x?X-Goog-Signature=secret", "s3://AKIAIOSFODNN7EXAMPLE/x",
    ],
)  # fmt: skip
def test_a_uri_with_credentials_is_refused_and_not_repeated(uri):
    with pytest.raises(UsageError, match="must not carry credentials") as refusal:
        locate(uri)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "repeated",
    [
        "a", "sig", "x://a:b", "w://", "a.b+", "eyJ-", "eyJaaaaaaaaaaaa.", "token ", "password='", "authorization:",
        "secret_", "?a%", "&policy", "-----BEGIN ", "b@", "sk-", "a-", " ", "bearer ", "x:/a:",
    ],
)  # fmt: skip
@pytest.mark.parametrize("begin", ["", "secret", "https://", "token='", "?", "eyJ"])
def test_the_time_grows_with_the_length_and_not_with_its_square(begin, repeated):
    """A name of 300 kB took 46 s when each word of it was searched to the end."""
    text = begin + repeated * (60_000 // len(repeated)) + "secret"
    started = time.process_time()
    redact_values({"x": text})
    assert time.process_time() - started < 3, "a linear search takes 0.1 s"


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
