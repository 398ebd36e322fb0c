"""A local server that speaks the hub's protocol over real sockets, with faults on order.

What it speaks: info of a repository, its tree page by page, `resolve` with HEAD, the hub's headers,
a redirect to a second host for large files, byte ranges, gated repositories. What can go wrong is
planted with `plant`: a status, a connection cut, reset or silent half way, a flipped byte, a body
that ends early, a range that is ignored.
"""

import hashlib
import io
import json
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq


def parquet(rows: list[dict[str, Any]], group: int = 100) -> bytes:
    """Rows as a file, `group` of them in each group of rows."""
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=group)
    return out.getvalue()


def git_sha1(data: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose path contains `match`."""

    match: str
    kind: str
    times: int = 1
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "GET"
    at: float = 0.5
    """Where in the body, as a share."""


@dataclass(frozen=True)
class Request:
    """One request as it arrived, and what was answered."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int


@dataclass
class Repo:
    """The files of every revision; files above `lfs_over` bytes live on the second host."""

    revisions: dict[str, dict[str, bytes]]
    lfs_over: int = 1000
    token: str | None = None
    is_private: bool = False

    def commit(self, revision: str) -> str:
        """A revision's commit: its name if it is one already."""
        for name, files in self.revisions.items():
            text = json.dumps([[path, git_sha1(data)] for path, data in sorted(files.items())])
            commit = hashlib.sha1(text.encode()).hexdigest()
            if revision in (name, commit):
                return commit
        raise KeyError(revision)

    def files(self, revision: str) -> dict[str, bytes]:
        commit = self.commit(revision)
        return next(f for name, f in self.revisions.items() if self.commit(name) == commit)


class HubServer:
    """Two hosts in one object: the hub at `url`, where large files live at `cdn`."""

    handler: "type[Handler]"
    """Another one, for servers that can do more."""

    def __init__(self, page_size: int = 3) -> None:
        self.repos: dict[str, Repo] = {}
        self.plain: dict[str, bytes] = {}
        """Files of no repository, such as blobs of an archive; path to content."""
        self.blobs: dict[str, bytes] = {}
        self.page_size = page_size
        self.requests: list[Request] = []
        self.open_now = self.open_most = 0
        self.slow = 0.0
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._servers = [_serve(self, "hub"), _serve(self, "cdn")]
        hub, cdn = self._servers
        self.url = f"http://127.0.0.1:{hub.server_port}"
        # Another name, because the library sends its token on to other ports of the same host.
        self.cdn = f"http://localhost:{cdn.server_port}"

    def add(
        self,
        name: str,
        files: dict[str, bytes],
        revision: str = "main",
        **settings: Any,
    ) -> Repo:
        """A repository, such as datasets/owner/name, or another revision of it."""
        repo = self.repos.setdefault(name, Repo({}))
        repo.revisions[revision] = dict(files)
        for key, value in settings.items():
            setattr(repo, key, value)
        self.blobs.update({hashlib.sha256(data).hexdigest(): data for data in files.values()})
        return repo

    def plant(self, match: str, kind: str, **settings: Any) -> None:
        """Make the next requests for `match` go wrong."""
        self._faults.append(Fault(match, kind, **settings))

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault that is due, counted down."""
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.match in path and fault.method == method:
                    fault.times -= 1
                    return fault
        return None

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        """Requests whose path contains `part`."""
        return [r for r in self.requests if part in r.path and r.method == method]

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Keep count of how many bodies are under way at once."""
        with self._lock:
            self.open_now += 1
            self.open_most = max(self.open_most, self.open_now)
        try:
            yield
        finally:
            with self._lock:
                self.open_now -= 1

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


def _serve(home: HubServer, host: str) -> ThreadingHTTPServer:
    class Bound(getattr(home, "handler", Handler)):  # type: ignore[misc]
        hub = home
        role = host

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who hangs up may
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class Handler(BaseHTTPRequestHandler):
    """One request on either host."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every small answer waits 40 ms
    hub: HubServer
    role: str

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.fault = self.hub.take_fault(self.command, self.path)
        if self.fault is not None and self.fault.kind == "status":
            return self._send(self.fault.status, b"{}", self.fault.headers)
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if path.lstrip("/") in self.hub.plain:
            return self._body(self.hub.plain[path.lstrip("/")], {})
        if self.role == "cdn":
            return self._cdn(path)
        if path.startswith("/api/"):
            return self._api(parts.path[len("/api/") :], parse_qs(parts.query))
        if "/resolve/" in parts.path:
            return self._resolve(parts.path.lstrip("/"))
        return self._send(404, b"{}", {})

    def _repo(self, name: str) -> Repo | None:
        """The repository, or None after an answer that says why not."""
        name = name if name.startswith(("datasets/", "models/")) else f"models/{name}"
        repo = self.hub.repos.get(name)
        if repo is None:
            self._send(401, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}":
            status = 401 if self.headers.get("Authorization") is None else 403
            self._send(status, b'{"error":"gated"}', {"X-Error-Code": "GatedRepo"})
        else:
            return repo
        return None

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        words = path.split("/")
        repo = self._repo("/".join(words[:3]))
        if repo is None:
            return None
        revision = unquote(words[4]) if len(words) > 4 else "main"
        try:
            commit = repo.commit(revision)
        except KeyError:
            headers = {"X-Error-Code": "RevisionNotFound"}
            return self._send(404, b'{"error":"no such revision"}', headers)
        if len(words) > 3 and words[3] == "tree":
            return self._tree(repo, revision, unquote("/".join(words[5:])), query)
        named = {"_id": "1", "id": "/".join(words[1:3]), "sha": commit}
        info = {**named, "private": repo.is_private}
        return self._send(200, json.dumps(info).encode(), {})

    def _tree(self, repo: Repo, revision: str, under: str, query: dict[str, list[str]]) -> None:
        files = repo.files(revision)
        entries = [
            *_folders(files),
            *(_entry(path, data, len(data) > repo.lfs_over) for path, data in files.items()),
        ]
        entries.sort(key=lambda entry: str(entry["path"]))
        entries = [e for e in entries if not under or e["path"].startswith(under + "/")]
        if query.get("recursive") not in (["True"], ["true"]):
            entries = [e for e in entries if "/" not in e["path"][len(under) :].lstrip("/")]
        if under and not entries:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.hub.page_size
        headers = {}
        if stop < len(entries):
            base = self.path.partition("?")[0]
            recursive = query.get("recursive", ["false"])[0]
            more = f"{self.hub.url}{base}?recursive={recursive}&expand=False&cursor={stop}"
            headers["Link"] = f'<{more}>; rel="next"'
        return self._send(200, json.dumps(entries[start:stop]).encode(), headers)

    def _resolve(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        repo = self._repo(name)
        if repo is None:
            return None
        revision, _, file = rest.partition("/")
        try:
            commit = repo.commit(unquote(revision))
            data = repo.files(commit)[unquote(file)]
        except KeyError:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if len(data) <= repo.lfs_over:
            return self._body(data, {**headers, "ETag": f'"{git_sha1(data)}"'})
        digest = hashlib.sha256(data).hexdigest()
        where = f"{self.hub.cdn}/cdn/{digest}?signature=abc&name={quote(file)}"
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        return self._send(302, b"", {**headers, **linked, "Location": where})

    def _cdn(self, path: str) -> None:
        data = self.hub.blobs.get(path.removeprefix("/cdn/"))
        if data is None:
            return self._send(404, b"", {})
        if self.headers.get("Authorization"):
            # A signed address that also gets a token is refused, as on the real second host.
            return self._send(400, b"Only one auth mechanism allowed", {})
        return self._body(data, {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def _body(self, data: bytes, headers: dict[str, str]) -> None:
        kind = self.fault.kind if self.fault else ""
        if kind == "corrupt":
            place = int(len(data) * self.fault.at)  # type: ignore[union-attr]
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        wanted = self.headers.get("Range")
        if not wanted or kind == "ignore_range":
            return self._send(200, data, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), int(last) + 1 if last else len(data)
        if start >= len(data):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return self._send(206, data[start:stop], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        asked = self.headers
        self.hub.note(
            Request(self.command, self.path, asked["Range"], asked["Authorization"], status)
        )
        kind = self.fault.kind if self.fault else ""
        share = self.fault.at if self.fault else 1.0
        if kind == "short":
            body = body[: int(len(body) * share)]
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        large = self.role == "cdn" or self.path.lstrip("/") in self.hub.plain
        with self.hub.counting() if large else nullcontext():
            if self.hub.slow and large:
                threading.Event().wait(self.hub.slow)
            if kind == "stall":
                self.wfile.write(body[: int(len(body) * share)])
                self.wfile.flush()
                threading.Event().wait(60)
            elif kind in ("cut", "reset"):
                self.wfile.write(body[: int(len(body) * share)])
                self.wfile.flush()
                self._hang_up(reset=kind == "reset")
            else:
                self.wfile.write(body)

    def _hang_up(self, reset: bool) -> None:
        self.close_connection = True
        if reset:
            # Linger of zero seconds: the other side sees a reset and not an orderly end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        self.connection.shutdown(socket.SHUT_RDWR)


def _folders(files: Iterable[str]) -> list[dict[str, Any]]:
    """Every folder that has a file somewhere below it; the hub lists them too."""
    words = [path.split("/")[:-1] for path in files]
    names = {"/".join(parts[:n]) for parts in words for n in range(1, len(parts) + 1)}
    return [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in names]


def _entry(path: str, data: bytes, lfs: bool) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
    if lfs:
        digest = hashlib.sha256(data).hexdigest()
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n"
        )
        entry["oid"] = git_sha1(pointer.encode())
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": len(pointer)}
    return entry
