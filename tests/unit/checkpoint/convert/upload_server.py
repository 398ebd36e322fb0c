"""The hub's other half: repositories are created and take commits, large files by LFS.

What it speaks: repos/create, preupload (which files are large), the LFS batch, the upload of one
object with its sha256 checked, and the commit as lines of JSON.
"""

import base64
import hashlib
import json
from typing import Any

from tests.unit.data.hub.hub_server import Handler, HubServer

LARGE = 2000


class UploadServer(HubServer):
    """A hub that can be written to, by one token."""

    token = "hf_secret"

    def __init__(self) -> None:
        self.handler = _Uploads
        self.lose_bytes = False
        super().__init__(page_size=100)


class _Uploads(Handler):
    hub: UploadServer

    def do_POST(self) -> None:  # noqa: N802
        body = self._sent()
        self.fault = self.hub.take_fault("POST", self.path)
        if self.fault is not None:
            return self._json({"error": "out of order"}, self.fault.status)
        if self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self._json({"error": "Invalid credentials"}, 401)
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if "/preupload/" in path:
            return self._preupload(json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if "/commit/" in path:
            return self._commit(path.split("/commit/")[0].removeprefix("/api/"), body)
        return self._json({"content": "", "errors": [], "warnings": []})  # the card's own check

    def do_PUT(self) -> None:  # noqa: N802
        self.fault = None
        data = self._sent()
        data = data[:-1] if self.hub.lose_bytes else data
        if hashlib.sha256(data).hexdigest() != self.path.rpartition("/")[2]:
            return self._json({"error": "the object is not what it was to be"}, 400)
        self.hub.blobs[hashlib.sha256(data).hexdigest()] = data
        return self._json({})

    def _sent(self) -> bytes:
        """The request's body, whole or in chunks."""
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or "me"
        name = f"{owner}/{asked['name']}"
        if f"models/{name}" not in self.hub.repos:
            self.hub.add(f"models/{name}", {".gitattributes": b""}, lfs_over=LARGE)
            self.hub.repos[f"models/{name}"].is_private = (
                asked.get("private") is True or asked.get("visibility") == "private"
            )
        self._json({"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def _preupload(self, asked: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in asked["files"]
        ]
        self._json({"files": files})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for item in asked["objects"]:
            upload = {"href": f"{self.hub.cdn}/upload/{item['oid']}"}
            objects.append({**item, "actions": {"upload": upload}})
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, body: bytes) -> None:
        files = self.hub.repos[repo].revisions["main"]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        self.hub.add(repo, files)
        commit = self.hub.repos[repo].commit("main")
        url = f"{self.hub.url}/{repo.removeprefix('models/')}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url})

    def _json(self, tree: Any, status: int = 200) -> None:
        self._send(status, json.dumps(tree).encode(), {"Content-Type": "application/json"})
