"""Every verb on checkpoints in buckets, and what is said when a store refuses."""

from __future__ import annotations

import json
from itertools import count

import pytest

import wherry
from tests.support import buckets
from tests.support.bucket_fixtures import on_both
from tests.support.command import command, small
from tests.support.faults import ALWAYS, hang, status
from tests.support.registry import model_folder
from tests.support.signing import key_pair
from wherry.cli import main
from wherry.errors import NotFoundError, StorageError
from wherry.nightly.night import run_night
from wherry.nightly.report import failure
from wherry.nightly.routes import load_config
from wherry.store.local_store import locate

ROUTES = """
[routes.r]
root = "{bucket}/runs"
min_age = 0
level = "digest"
model = "night"
alias = "candidate"

[[routes.r.targets]]
format = "dcp"
uri = "{bucket}/out/{{run}}/{{step}}/{{format}}"

[routes.r.retention]
keep_last = 1
"""


class Walk:
    """The verbs, run one after the other in this process."""

    def __init__(self, bucket, tmp_path, capsys):
        self.capsys, self.bucket = capsys, bucket
        self.places = {"B": bucket.uri, "TMP": tmp_path}

    def __call__(self, line, code=0):
        """Run a command line; the JSON that it prints."""
        return json.loads(self.said(line, code))

    def lines(self, line):
        """The same of a command that prints one JSON value on each line."""
        return [json.loads(text) for text in self.said(line).splitlines()]

    def said(self, line, code=0):
        """What a command line prints."""
        words = [word.format(**self.places) for word in line.split()]
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([*words, "--json"])
        said = self.capsys.readouterr()
        assert (caught.value.code or 0) == code, f"{line}: {said.out[-1000:]} {said.err[-1000:]}"
        return said.out


_seeds = count(1000, 1000)


@pytest.fixture
def walk(bucket, tmp_path, capsys):
    """With weights of its own: the registry leads to a bucket of another test, which no longer answers."""
    first = next(_seeds)
    for step in (100, 200):
        bucket.upload(model_folder(tmp_path / str(step), seed=first + step), f"runs/one/{step}")
    key_pair(tmp_path)
    (tmp_path / "wherry.toml").write_text(ROUTES.format(bucket=bucket.uri))
    return Walk(bucket, tmp_path, capsys)


@on_both("gs")
def test_looks(walk, bucket):
    found = walk.lines("discover {B}/runs")
    assert [(one["format"], one["uri"][-3:]) for one in found] == [
        ("huggingface", "100"),
        ("huggingface", "200"),
    ]
    source = "{B}/runs/one/200"
    assert walk(f"detect {source}")["verdict"] == "ok"
    assert (
        walk(f"plan {source} {{B}}/made/dcp --to dcp --ignore companions")["stores"][0]["store"] == bucket.uri
    )
    assert len(walk(f"inspect {source}")["tensors"]) == 2
    assert walk(f"inspect {source} --digest --write")
    assert walk(f"verify {source} --level digest")["verdict"] == "ok"


@on_both("s3")
def test_conversions_and_what_follows_from_them(walk):
    source = "{B}/runs/one/200"
    for to, name in (("dcp", "dcp"), ("safetensors", "m.safetensors")):
        target = f"{{B}}/made/{name}"
        assert not walk(f"convert {source} {target} --to {to} --ignore companions")["already"]
        assert walk(f"verify {target} --level roundtrip --against {source} --record")["lineage"] == "recorded"
        walk(f"sign {target} --key {{TMP}}/key.pem")
        assert walk(f"verify-signature {target} --key {{TMP}}/key.pub")
        local, remote = walk(f"fetch {target} {{TMP}}/{name}"), walk(f"fetch {target} {{B}}/fetched/{name}")
        assert local["checkpoint_digest"] == remote["checkpoint_digest"]
        walk(f"verify-signature {{B}}/fetched/{name} --key {{TMP}}/key.pub")
        walk(f"ledger record {target}")
    done = walk("rewrite {B}/made/dcp {B}/made/other --as for-torch=2.3")
    assert done["carried_by"] == {"store": done["carried"]["bytes"]}
    walk("lineage why {B}/made/other")
    assert "dcp" in json.dumps(walk(f"lineage impact {source}"))
    walk("lineage show {B}/made/dcp")
    walk("lineage stale")
    report = walk("audit --level digest --key {TMP}/key.pub")
    assert report["ok"], report["findings"]
    assert report["counts"]["unchanged"] >= 2
    assert walk("audit --level digest --deep")["counts"]["unchanged"] == 0
    walk("ledger check")
    assert walk("clean {B}") == []


@on_both("s3")
def test_a_fetch_within_a_bucket_is_copied_by_the_store(walk, bucket, monkeypatch):
    kind, sent = type(locate(bucket.uri).store), []
    walk("convert {B}/runs/one/200 {B}/made/dcp --to dcp --ignore companions")
    put_object, put_part = kind.put_object, kind.put_part
    monkeypatch.setattr(
        kind, "put_object", lambda self, path, *a, **k: sent.append(path) or put_object(self, path, *a, **k)
    )
    monkeypatch.setattr(
        kind, "put_part", lambda self, upload, *a: sent.append(upload.path) or put_part(self, upload, *a)
    )
    walk("fetch {B}/made/dcp {B}/fetched/dcp")
    assert walk("verify {B}/fetched/dcp --level digest")["verdict"] == "ok"
    assert sent
    assert [path for path in sent if path.endswith((".distcp", ".metadata"))] == []
    assert walk("clean {B}") == []


@on_both("gs")
def test_a_night_its_models_and_what_is_pruned(walk, bucket):
    routes = "--config {TMP}/wherry.toml"
    walk(f"routes check {routes}")
    walk(f"routes explain {{B}}/runs/one/200 {routes}")
    assert walk(f"nightly {routes} --go")["counts"]["converted"] == 1
    assert walk(f"nightly {routes}")["counts"].get("converted", 0) == 0
    walk("promote models:/night@candidate")
    assert walk("resolve models:/night@champion")["uri"] == f"{bucket.uri}/out/one/200/dcp"
    walk("register {B}/out/one/200/dcp --model walked")
    bucket.upload(walk.places["TMP"] / "100", "runs/one/300")
    assert walk(f"nightly {routes}")["counts"]["converted"] == 1
    assert walk(f"prune {routes}")
    walk(f"prune {routes} --yes")
    assert walk("detect {B}/out/one/300/dcp")["verdict"] == "ok"
    roots = "{B} --ledger sqlite:///{TMP}/new.db --no-registry"
    assert walk(f"ledger rebuild {roots}")["conversions"] >= 1
    walk("preflight --pool-type process {B}/out")
    error = walk("emit {B}/out/one/300/dcp --api http://127.0.0.1:1/api", code=10)
    assert error["cure"]


# What a conversion, a night and a command say when a store refuses, throttles or hangs: at once, and with
# the cure.


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
ROUTES_OF_BUCKET = """
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
    (tmp_path / "wherry.toml").write_text(ROUTES_OF_BUCKET.format(bucket=bucket.uri))
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
