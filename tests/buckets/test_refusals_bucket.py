"""What a conversion, a night and a command say when a store refuses, throttles or hangs: at once, and with the cure."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support import buckets
from tests.support.bucket_fixtures import on_both
from tests.support.command import command, small
from tests.support.faults import ALWAYS, hang, status
from wherry.errors import NotFoundError, StorageError
from wherry.routes.night import run_night
from wherry.routes.report import failure
from wherry.routes.routes import load_config
from wherry.storage.stores import locate

GOOGLE = '{"error": {"code": %d, "message": "%s"}}'
AMAZON = "<Error><Code>%s</Code><Message>said so</Message></Error>"
REFUSALS = {
    "gs": {
        "no-credentials": (401, GOOGLE % (401, "Anonymous caller does not have access"), "gcloud auth"),
        "forbidden": (
            403,
            GOOGLE % (403, "you@example.com does not have access"),
            "roles/storage.objectUser",
        ),
        "quota": (403, GOOGLE % (403, "The quota of the project was exceeded"), "raise the quota"),
    },
    "s3": {
        "forbidden": (403, AMAZON % "AccessDenied", "s3:PutObject"),
        "region": (301, AMAZON % "PermanentRedirect", "AWS_REGION"),
        "quota": (403, AMAZON % "QuotaExceeded", "raise the quota"),
    },
}
ROWS = [(protocol, kind) for protocol, rows in REFUSALS.items() for kind in rows]
ROUTES = """
[routes.r]
root = "{bucket}/runs"
min_age = 0

[[routes.r.targets]]
format = "npz"
uri = "{bucket}/out/{{run}}.npz"
"""


@pytest.mark.parametrize(("bucket", "kind"), ROWS, indirect=["bucket"])
@pytest.mark.parametrize("methods", [("GET", "HEAD"), ("PUT", "POST")])
def test_a_refusal_ends_a_conversion_at_once(bucket, tmp_path, kind, methods):
    code, body, cure = REFUSALS[bucket.protocol][kind]
    source = small(tmp_path / "a.safetensors")
    locate(f"{bucket.uri}/a").exists()  # connected
    for method in methods:
        bucket.proxy.inject(
            status(code, body.encode(), [("x-amz-bucket-region", "eu-west-1")]), ALWAYS, method
        )
    with pytest.raises(StorageError) as caught:
        wherry.convert(source, f"{bucket.uri}/made.npz", to="npz", lineage=False)
    error = caught.value
    assert "attempts" not in error.what
    assert (error.kind, error.exit_code, error.retryable) == (kind, 10, False)
    assert cure in error.cure
    bucket.proxy.clear()
    assert list(locate(bucket.uri).walk()) == [], "nothing is left"


@on_both("gs")
def test_an_absent_bucket_is_named(bucket, tmp_path):
    with pytest.raises(NotFoundError, match="bucket not found") as caught:
        wherry.convert(
            small(tmp_path / "a.safetensors"), f"{bucket.protocol}://no-such-bucket/made.npz", to="npz"
        )
    assert "attempts" not in caught.value.what
    assert (caught.value.exit_code, bool(caught.value.cure)) == (3, True)


@on_both("s3")
def test_a_night_ends_with_an_error_as_long_as_a_source_is_refused(bucket, tmp_path):
    for name in ("one", "two"):
        bucket.upload(small(tmp_path / "a.safetensors"), f"runs/{name}/model.safetensors")
    (tmp_path / "wherry.toml").write_text(ROUTES.format(bucket=bucket.uri))
    code, body, _cure = REFUSALS[bucket.protocol]["forbidden"]
    config = load_config(tmp_path / "wherry.toml")
    data = {"gs": "one%2Fmodel.safetensors", "s3": "one/model.safetensors"}[bucket.protocol]
    for _night in range(2):
        bucket.proxy.inject(status(code, body.encode()), ALWAYS, "GET", data)
        error = failure(run_night(config, config.routes, go=True))
        assert error is not None
        assert (error.exit_code, error.uri) == (10, f"{bucket.uri}/runs/one/model.safetensors")
        bucket.proxy.clear()
    assert failure(run_night(config, config.routes)) is None
    assert wherry.detect(f"{bucket.uri}/out/one.npz").verdict == "ok"


@on_both("gs")
def test_an_upload_that_hangs_ends_with_10_and_goes_on_later(bucket, tmp_path):
    source, target = small(tmp_path / "a.safetensors"), f"{bucket.uri}/made.npz"
    words = ("convert", source, target, "--to", "npz", "--no-lineage", "--json")
    bucket.proxy.inject(hang, ALWAYS, {"gs": "POST", "s3": "PUT"}[bucket.protocol], after=2)
    done = command("--storage-timeout", "1s", *words)
    assert done.returncode == 10, done.stderr
    error = json.loads(done.stdout)
    assert (error["error"], error["retryable"]) == ("StorageError", True)
    assert error["uri"].startswith(bucket.uri)
    assert "Traceback" not in done.stderr
    bucket.proxy.ended.set()
    bucket.proxy.clear()
    assert not locate(target).exists()
    assert command(*words).returncode == 0
    assert wherry.verify(target, level="roundtrip", against=source).ok
    bucket.proxy.ended.clear()


def test_an_unreachable_web_server_is_10_and_a_missing_file_3(tmp_path):
    done = command("detect", f"http://127.0.0.1:{buckets.free_port()}/model.safetensors", "--json")
    error = json.loads(done.stdout)
    assert (done.returncode, error["retryable"]) == (10, True)
    assert "check the network" in error["cure"]
    with buckets.files_over_http(tmp_path) as url:
        assert command("detect", f"{url}/model.safetensors").returncode == 3
