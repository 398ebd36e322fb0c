"""Who is asked: the hub (or HF_ENDPOINT), what it says a repository holds, and what was heard.

Every listing is kept beside the files, in the repository's folder of the hub's own cache, so that a
machine without network finds later what was fetched, by the same name.

    HF_HUB_CACHE/datasets--OWNER--NAME/blobs/CHECKSUM           a file, whole and checked
                                      /blobs/CHECKSUM.part      one on its way
                                      /snapshots/COMMIT/PATH    a link to it, as the hub's tools do
                                      /foundling/refs, trees    what the hub said
                                      /foundling/checked        what was compared, and when changed
"""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from foundling.config.errors import DataError
from foundling.data.hub.errors import NotThere
from foundling.data.hub.transfer import Patience, insist
from foundling.data.hub.uri import HubUri
from foundling.runtime.files import write_text_atomic

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it."""

    path: str
    size: int
    checksum: str
    """sha256 of the content for large files (64 digits), else git's sha1 of it (40 digits)."""

    @property
    def identity(self) -> str:
        return f"{self.path} {self.size} {self.checksum}"


@dataclass(frozen=True)
class Repo:
    """One repository at one commit; names never move once this is made."""

    kind: Literal["dataset", "model"]
    name: str
    commit: str

    @property
    def folder(self) -> str:
        return f"{self.kind}s--{self.name.replace('/', '--')}"


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where to ask and where to keep; picklable, and the token is never part of it."""

    endpoint: str = ""
    """Empty: HF_ENDPOINT, else the public hub."""
    cache: str = ""
    """Empty: HF_HUB_CACHE."""
    patience: Patience = field(default_factory=Patience)

    @property
    def offline(self) -> bool:
        """HF_HUB_OFFLINE: nothing is asked, only what was fetched is used."""
        from huggingface_hub import constants

        return bool(constants.HF_HUB_OFFLINE)

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return (self.endpoint or constants.ENDPOINT).rstrip("/")

    def home(self, repo: Repo) -> Path:
        """The repository's folder in the hub's cache."""
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE).expanduser() / repo.folder

    def page(self, repo: Repo) -> str:
        """Where a person looks, and accepts a licence."""
        kind = "datasets/" if repo.kind == "dataset" else ""
        return f"{self.url}/{kind}{repo.name}"

    def file_url(self, repo: Repo, path: str) -> str:
        return f"{self.page(repo)}/resolve/{repo.commit}/{quote(path)}"

    def headers(self) -> dict[str, str]:
        """Our name, and the user's token from HF_TOKEN or the hub's login."""
        import huggingface_hub.utils

        utils: Any = huggingface_hub.utils
        return dict(utils.build_hf_headers(library_name="foundling"))

    def pin(self, uri: HubUri) -> Repo:
        """The repository at the commit its revision means now (offline: meant when last asked)."""
        if re.fullmatch(r"[0-9a-f]{40}", uri.revision):
            return Repo(uri.kind, uri.repo, uri.revision)
        loose = Repo(uri.kind, uri.repo, "")
        note = self.home(loose) / "foundling" / "refs" / quote(uri.revision or "main", safe="")
        if self.offline:
            if not note.is_file():
                raise DataError(
                    f"{uri} was never fetched and HF_HUB_OFFLINE is set; run `foundling"
                    f" {fetch_verb(uri)} {uri}` where there is network, with this cache."
                )
            return Repo(uri.kind, uri.repo, note.read_text().strip())
        commit = self._ask(loose, str(uri), lambda api: _commit(api, uri))
        repo = Repo(uri.kind, uri.repo, commit)
        _keep(note, repo.commit)
        return repo

    def tree(self, repo: Repo, under: str = "", *, recursive: bool = True) -> list[RemoteFile]:
        """Files of a folder (empty: of the repository), in order of their names."""
        name = quote(under, safe="") + ("" if recursive else ",top")
        note = self.home(repo) / "foundling" / "trees" / repo.commit / f"{name or ',all'}.json"
        if note.is_file():  # a commit never changes
            return [RemoteFile(*entry) for entry in json.loads(note.read_text())]
        if self.offline:
            raise DataError(
                f"the files of {repo.name} were never listed here and HF_HUB_OFFLINE is set; run"
                " `foundling data fetch` where there is network, with this cache."
            )
        try:
            files = self._ask(repo, repo.name, lambda api: _files(api, repo, under, recursive))
        except NotThere:
            if not under:
                raise
            files = []
        _keep(note, json.dumps([[f.path, f.size, f.checksum] for f in files]))
        return files

    def _ask(self, repo: Repo, what: str, question: Callable[[Any], T]) -> T:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.url, library_name="foundling")
        # Few tries: whether there is a network at all shows here, and nobody waits long for that.
        patience = replace(self.patience, tries=min(self.patience.tries, 5))
        return insist(lambda: question(api), what=what, page=self.page(repo), patience=patience)


def fetch_verb(uri: HubUri) -> str:
    """The verb that fetches what `uri` names."""
    return "data fetch" if uri.kind == "dataset" else "tokenizer fetch"


def _commit(api: Any, uri: HubUri) -> str:
    revision = uri.revision or "main"
    info = api.repo_info(uri.repo, repo_type=uri.kind, revision=revision, expand=["sha"])
    return str(info.sha)


def _files(api: Any, repo: Repo, under: str, recursive: bool) -> list[RemoteFile]:
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(
        repo.name, under or None, recursive=recursive, revision=repo.commit, repo_type=repo.kind
    )
    files = [
        RemoteFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile)
    ]
    return sorted(files, key=lambda file: file.path)


def _keep(note: Path, text: str) -> None:
    """Remember an answer; a cache that is read-only is still good for reading."""
    with contextlib.suppress(OSError):
        if not note.is_file() or note.read_text() != text:
            write_text_atomic(note, text)
