"""A small Hub: the calls that the real client of Hugging Face makes to read and to commit, on loopback.

It checks what the client sends: the SHA-256 and the size of each LFS object, that a commit names only objects that are
there, and that its parent is the head of its branch. Requests can be answered with faults (`Hub.faults`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from base64 import b64decode
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_FROM = 32 << 10  # bytes from which a file is an LFS object: more than a sidecar has with any path
PART = 64 << 10  # bytes of a part of an LFS object


@dataclass
class Hub:
    """The state of the server.

    Attributes:
        url: where it listens.
        commits: id → parent, message and files: path → bytes, or the SHA-256 of an LFS object.
        branches: repository → branch → id of its head.
        objects: SHA-256 → bytes.
        uploads: SHA-256 → part → bytes.
        requests: every request: method and path.
        faults: functions that get method, path and an act, which runs the request; the first that returns a status and
            a body answers.
        token: that requests must carry; any if it is empty.
    """

    url: str = ""
    commits: dict = field(default_factory=dict)
    branches: dict = field(default_factory=dict)
    objects: dict = field(default_factory=dict)
    uploads: dict = field(default_factory=dict)
    requests: list = field(default_factory=list)
    faults: list = field(default_factory=list)
    token: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def create(self, repo, files=None):
        """A repository with one commit."""
        self.branches[repo] = {
            "main": self.add_commit("", "initial commit", files or {".gitattributes": b""})
        }

    def add_commit(self, parent, message, files):
        name = hashlib.sha1(repr((parent, message, sorted(files), len(self.commits))).encode()).hexdigest()
        self.commits[name] = (parent, message, files)
        return name

    def head(self, repo, revision):
        """The commit of a revision; None if there is none."""
        found = self.branches.get(repo, {}).get(revision)
        return found or (revision if revision in self.commits else None)

    def data(self, repo, revision, path):
        """The bytes of a file; None if there is none."""
        commit = self.head(repo, revision)
        found = self.commits[commit][2].get(path) if commit else None
        return self.objects[found] if isinstance(found, str) else found

    def sent(self, method):
        """Paths of the requests of a method."""
        return [path for one, path in self.requests if one == method]


class RefusedError(Exception):
    """An answer with the status of a failure."""

    def __init__(self, status, code="", text=""):
        super().__init__(text)
        self.status, self.code, self.text = status, code, text


@contextmanager
def hub():
    """A running Hub."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def serve(self):
        body = self._body()
        self.hub.requests.append((self.command, self.path))
        status, headers, data = next(
            (
                found
                for fault in self.hub.faults
                if (found := fault(self.command, self.path, lambda: self._answer(body)))
            ),
            None,
        ) or self._answer(body)
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _answer(self, body):
        try:
            with self.hub.lock:
                return self._acted(body)
        except RefusedError as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.text}
            return refusal.status, headers, json.dumps({"error": refusal.text}).encode()

    def _acted(self, body):
        url = urlsplit(self.path)
        parts = [unquote(one) for one in url.path.strip("/").split("/")]
        if parts[0] != "upload" and self.hub.token:
            self._require_token()
        if parts[0] == "api" and parts[1] != "validate-yaml":
            return self._of_repository("/".join(parts[2:4]), parts[4:], body)
        acts = {
            "upload": lambda: self._part(parts, body),
            "api": lambda: _json({"errors": [], "warnings": []}),
            "lfs": lambda: self._lfs(parts[1], json.loads(body)),
        }
        if url.path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        return acts.get(
            parts[0], lambda: self._resolved("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        )()

    def _require_token(self):
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise RefusedError(401, "", "Invalid credentials in Authorization header")

    def _of_repository(self, repo, rest, body):
        if repo not in self.hub.branches:
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        if rest == ["refs"]:
            return self._refs(repo)
        act, revision, *more = rest if len(rest) > 1 else ("revision", "main")
        if act == "branch":
            return self._branch(repo, revision, body)
        commit = self.hub.head(repo, revision)
        if commit is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return getattr(self, f"_{act.replace('-', '_')}")(repo, revision, commit, more, body)

    def _refs(self, repo):
        rows = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in self.hub.branches[repo].items()
        ]
        return _json({"branches": rows, "tags": [], "converts": []})

    def _revision(self, repo, _revision, commit, _rest, _body):
        files = self.hub.commits[commit][2]
        return _json({"id": repo, "sha": commit, "siblings": [{"rfilename": path} for path in files]})

    def _tree(self, _repo, _revision, commit, rest, _body):
        folder = "/".join(rest)
        start = f"{folder}/" if folder else ""
        rows = {}
        for path, content in self.hub.commits[commit][2].items():
            if path.startswith(start):
                name, _, more = path[len(start) :].partition("/")
                rows[name] = _folder(f"{start}{name}") if more else self._file(path, content)
        if not rows and folder:
            raise RefusedError(404, "EntryNotFound", "no such folder")
        return _json(list(rows.values()))

    def _paths_info(self, _repo, _revision, commit, _rest, body):
        files = self.hub.commits[commit][2]
        paths = parse_qs(body.decode()).get("paths", [])
        return _json([self._file(path, files[path]) for path in paths if path in files])

    def _commits(self, _repo, _revision, commit, _rest, _body):
        rows = []
        while commit:
            parent, message, _files = self.hub.commits[commit]
            title, _, rest = message.partition("\n\n")
            rows.append(
                {
                    "id": commit,
                    "authors": [],
                    "date": "2026-01-01T00:00:00.000Z",
                    "title": title,
                    "message": rest,
                }
            )
            commit = parent
        return _json(rows)

    def _preupload(self, _repo, _revision, commit, _rest, body):
        files = self.hub.commits[commit][2]
        rows = []
        for one in json.loads(body)["files"]:
            mode = "lfs" if one["size"] >= LFS_FROM else "regular"
            rows.append(
                {
                    "path": one["path"],
                    "uploadMode": mode,
                    "shouldIgnore": False,
                    "oid": _oid(files.get(one["path"])),
                }
            )
        return _json({"files": rows})

    def _commit(self, repo, revision, commit, _rest, body):
        rows = [json.loads(line) for line in body.splitlines()]
        header = rows[0]["value"]
        if header.get("parentCommit") not in (None, commit):
            raise RefusedError(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(self.hub.commits[commit][2])
        for row in rows[1:]:
            files[row["value"]["path"]] = self._content(row)
        message = f"{header['summary']}\n\n{header['description']}"
        made = self.hub.branches[repo][revision] = self.hub.add_commit(commit, message, files)
        return _json(
            {"success": True, "commitOid": made, "commitUrl": f"{self.hub.url}/{repo}/commit/{made}"}
        )

    def _content(self, row):
        value = row["value"]
        if row["key"] == "file":
            return b64decode(value["content"])
        assert row["key"] == "lfsFile"
        if len(self.hub.objects.get(value["oid"], b"")) != value["size"]:
            raise RefusedError(400, "", f"the LFS object {value['oid']} was not uploaded")
        return value["oid"]

    def _branch(self, repo, branch, body):
        branches = self.hub.branches[repo]
        if self.command == "DELETE":
            if branches.pop(branch, None) is None:
                raise RefusedError(404, "RevisionNotFound", "no such branch")
            return _json({})
        if branch in branches:
            raise RefusedError(409, "", "Reference already exists")
        start = self.hub.head(repo, json.loads(body or b"{}").get("startingPoint", "main"))
        if start is None:
            raise RefusedError(404, "RevisionNotFound", "no such starting point")
        branches[branch] = start
        return _json({})

    def _batch(self, request):
        assert request["operation"] == "upload"
        return _json({"transfer": "multipart", "objects": [self._offer(one) for one in request["objects"]]})

    def _offer(self, one):
        if one["oid"] in self.hub.objects:
            return one
        verify = {"href": f"{self.hub.url}/lfs/verify"}
        upload = {"href": f"{self.hub.url}/upload/{one['oid']}/1"}
        if one["size"] > PART:
            count = -(-one["size"] // PART)
            urls = {
                f"{number:05d}": f"{self.hub.url}/upload/{one['oid']}/{number}"
                for number in range(1, count + 1)
            }
            upload = {"href": f"{self.hub.url}/lfs/complete", "header": {"chunk_size": str(PART), **urls}}
        return {**one, "actions": {"upload": upload, "verify": verify}}

    def _part(self, parts, body):
        assert self.command == "PUT"
        self.hub.uploads.setdefault(parts[1], {})[int(parts[2])] = body
        return 200, {"ETag": hashlib.md5(body).hexdigest()}, b""

    def _lfs(self, act, request):
        sent = self.hub.uploads.get(request["oid"], {})
        data = b"".join(sent[number] for number in sorted(sent))
        if act == "complete":
            for part in request["parts"]:
                assert part["etag"] == hashlib.md5(sent[part["partNumber"]]).hexdigest()
            return _json({})
        if len(data) != request["size"] or hashlib.sha256(data).hexdigest() != request["oid"]:
            raise RefusedError(422, "", "the bytes are not those that the SHA-256 names")
        self.hub.objects[request["oid"]] = data
        return _json({})

    def _resolved(self, repo, revision, path):
        data = self.hub.data(repo, revision, path)
        if data is None:
            raise RefusedError(404, "EntryNotFound", "no such file")
        wanted = self.headers.get("Range")
        if not wanted:
            return 200, {"ETag": '"x"', "X-Repo-Commit": self.hub.head(repo, revision)}, data
        start, stop = (int(one) for one in wanted.removeprefix("bytes=").split("-"))
        if start >= len(data):
            raise RefusedError(416)
        return 206, {"Content-Range": f"bytes {start}-{stop}/{len(data)}"}, data[start : stop + 1]

    def _file(self, path, content):
        row = {"type": "file", "path": path, "oid": _oid(content), "size": len(content)}
        if isinstance(content, str):
            size = len(self.hub.objects[content])
            row |= {"size": size, "lfs": {"oid": content, "size": size, "pointerSize": 130}}
        return row

    def _body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_):
        pass


def _folder(path):
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}


def _oid(content):
    """The id of a blob, as git computes it; of an LFS object its SHA-256."""
    if content is None or isinstance(content, str):
        return content
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _json(value):
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
