"""A server on localhost that speaks the part of the Hub's API which fetching and pushing need.

Repositories are folders of bytes by commit. Large files (`*.safetensors`) are in large-file storage: their
`resolve` redirects, with `X-Linked-Size` and `X-Linked-ETag`, as the Hub's does. Faults of the wire come from
`fault_proxy` in front of it; what a repository itself is (private, gated, with wrong sizes) is said here.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "a" * 34


@dataclass
class Repository:
    """Commits by their hash, branches by name."""

    kind: str = "models"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    claimed: dict[str, int] = field(default_factory=dict)
    """Sizes that are told in place of the true ones."""
    swapped: dict[str, bytes] = field(default_factory=dict)
    """Bytes that are sent in place of the true ones."""
    summaries: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """A new commit that holds `files`."""
        digest = hashlib.sha1(json.dumps([branch, len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[digest], self.refs[branch] = dict(files), digest
        return digest

    def at(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a model's folder holds, as a commit."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        """Objects of the large-file storage by sha256."""
        self.asked: list[str] = []
        """`METHOD path` of every request."""
        self.storage = f"http://localhost:{self.server_address[1]}"
        """Where large files are: another host to a client, as the Hub's are, to which it takes no token."""
        self.leaked: list[str] = []
        """Tokens that came to the storage."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away in the middle, as tests make them do."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.server.asked.append(f"{self.command} {path}")
        if path.startswith("/storage/"):
            self.server.leaked += filter(None, [self.headers.get("Authorization")])
            self._storage(path.removeprefix("/storage/"), body)
        elif path.startswith("/api/"):
            self._api(path.removeprefix("/api/"), body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(body)
        elif "/resolve/" in path:
            self._resolve(path)
        else:
            self._say(404, {"error": "no such page"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size + 2)[:-2])
        self.rfile.readline()
        return b"".join(parts)

    # -- what the Hub says of repositories

    def _api(self, path: str, body: bytes) -> None:
        if path == "repos/create":
            return self._create(json.loads(body))
        if path == "validate-yaml":
            return self._validate(json.loads(body)["content"])
        if path.count("/") < 2:
            return self._say(404, {"error": "no such page"})
        kind, org, name, *rest = path.split("/")
        found = self._repository(kind, f"{org}/{name}")
        if found is None:
            return None
        if self.command == "POST" and rest[0] in ("preupload", "commit", "branch"):
            return self._upload(found, rest[0], "/".join(rest[1:]), body, f"{org}/{name}")
        commit = found.at("/".join(rest[1:]) if rest else "main")
        if commit is None:
            return self._say(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = found.commits[commit]
        siblings = [self._sibling(found, file, data) for file, data in files.items()]
        self._say(200, {"id": f"{org}/{name}", "sha": commit, "siblings": siblings, "private": found.private})

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not self._authorized():
            return self._say(401, {"error": "Invalid username or password."})
        if repo in self.server.repositories:
            return self._say(
                409, {"error": "You already created this repo", "url": f"{self.server.endpoint}/{repo}"}
            )
        made = Repository(private=asked.get("visibility") == "private")
        made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.server.repositories[repo] = made
        return self._say(200, {"url": f"{self.server.endpoint}/{repo}", "name": repo})

    def _validate(self, content: str) -> None:
        named = content.partition("base_model: ")[2].partition("\n")[0]
        wrong = [{"message": f'"base_model" with value "{named}" is not valid'}] if named[:1] == "/" else []
        return self._say(400 if wrong else 200, {"errors": wrong, "warnings": []})

    @staticmethod
    def _sibling(found: Repository, file: str, data: bytes) -> dict[str, Any]:
        size = found.claimed.get(file, len(data))
        told: dict[str, Any] = {"rfilename": file, "size": size, "blobId": _git_digest(data)}
        if is_large(file):
            told["lfs"] = {"size": size, "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
        return told

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, kind: str, repo: str) -> Repository | None:
        found = self.server.repositories.get(repo)
        if found is None or found.kind != kind or (found.private and not self._authorized()):
            self._say(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        if found.gated and not self._authorized() and "/resolve/" in self.path:
            self._say(403, {"error": "Access is restricted"}, {"X-Error-Code": "GatedRepo"})
            return None
        return found

    # -- files

    def _resolve(self, path: str) -> None:
        place, _, rest = path.removeprefix("/").partition("/resolve/")
        kind, repo = (
            ("datasets", place.removeprefix("datasets/")) if place.count("/") > 1 else ("models", place)
        )
        revision, _, file = rest.partition("/")
        found = self._repository(kind, repo)
        if found is None:
            return
        commit = found.at(revision)
        if commit is None:
            return self._say(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        data = found.commits[commit].get(file)
        if data is None:
            return self._say(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        size = found.claimed.get(file, len(data))
        headers = {"X-Repo-Commit": commit}
        if is_large(file):
            digest = hashlib.sha256(data).hexdigest()
            self.server.large[digest] = found.swapped.get(file, data)
            headers |= {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{digest}"'}
            headers |= {"Location": f"{self.server.storage}/storage/{digest}", "ETag": '"pointer"'}
            return self._send(302, b"", headers)
        self._send(200, found.swapped.get(file, data), headers | {"ETag": f'"{_git_digest(data)}"'})

    def _storage(self, digest: str, body: bytes) -> None:
        if self.command == "PUT":
            self.server.large[digest] = body
            return self._send(200, b"", {})
        self._send(200, self.server.large[digest], {"ETag": f'"{digest}"'})

    # -- pushing

    def _batch(self, body: bytes) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            told = {"oid": one["oid"], "size": one["size"], "authenticated": True}
            if one["oid"] not in self.server.large:
                told["actions"] = {"upload": {"href": f"{self.server.endpoint}/storage/{one['oid']}"}}
            objects.append(told)
        self._say(200, {"transfer": "basic", "objects": objects})

    def _upload(self, found: Repository, what: str, branch: str, body: bytes, repo: str) -> None:
        if not self._authorized():
            return self._say(403, {"error": "you may not write here"})
        if what == "branch":
            found.refs.setdefault(branch, found.refs["main"])
            return self._say(200, {})
        if what == "preupload":
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if is_large(f["path"]) else "regular",
                    "shouldIgnore": False,
                }
                for f in asked
            ]
            return self._say(200, {"files": modes, "commitOid": found.at(branch)})
        before = found.at(branch)
        if before is None:
            return self._say(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = dict(found.commits[before])
        for line in body.splitlines():
            said = json.loads(line)
            key, value = said["key"], said["value"]
            if key == "header":
                found.summaries.append(value["summary"])
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        commit = found.commit(files, branch)
        url = f"{self.server.endpoint}/{repo}/commit/{commit}"
        self._say(200, {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    # -- the wire

    def _say(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        self._send(
            status, json.dumps(document).encode(), {"Content-Type": "application/json"} | (headers or {})
        )

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        asked = self.headers.get("Range")
        if asked is not None and status == 200:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[start:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(data)


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
