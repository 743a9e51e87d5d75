"""A hub on loopback that huggingface_hub accepts: repositories, revisions and files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from http_servers import served_by


@dataclass
class Repository:
    """Files by commit, and commits by branch or tag. A gated one refuses all requests."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False

    def commit(self, files: Mapping[str, bytes], *names: str) -> str:
        """Add a commit with these files under branches or tags, and return it."""
        text = json.dumps([len(self.commits), *sorted(files)])
        commit = sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.names.update(dict.fromkeys(names, commit))
        return commit


@dataclass
class FakeHub:
    """A running hub. Keys of `repositories` are `models/ORG/NAME` and `datasets/ORG/NAME`."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)

    def environment(self, cache: Path, *, offline: bool = False) -> dict[str, str]:
        """Return the environment of a command that uses this hub."""
        flag = "1" if offline else "0"
        return {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": flag,
            "TRANSFORMERS_OFFLINE": flag,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
        }


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a hub on a free port of loopback."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with served_by(handler) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/"):
            kind, org, name, action, revision = path.split("/")[1:6]
            self._describe(f"{kind}/{org}/{name}", action, revision)
            return
        key, _, file = path.partition("/resolve/")
        key = key if key.startswith("datasets/") else f"models/{key}"
        revision, _, file = file.partition("/")
        commit = self._commit(key, revision)
        if commit is not None:
            content = self.hub.repositories[key].commits[commit][file]
            if has_body:
                self.hub.downloads.append(f"{key}/{file}")
            etag = sha1(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
            self._send(200, content, headers, has_body=has_body)

    def _describe(self, key: str, action: str, revision: str) -> None:
        commit = self._commit(key, revision)
        if commit is None:
            return
        files = self.hub.repositories[key].commits[commit]
        if action == "tree":
            answer: object = [
                {"type": "file", "path": path, "size": len(data), "oid": sha1(data).hexdigest()}
                for path, data in files.items()
            ]
        else:
            siblings = [{"rfilename": path} for path in files]
            answer = {"id": key.partition("/")[2], "sha": commit, "siblings": siblings}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _commit(self, key: str, revision: str) -> str | None:
        """Return the commit of a revision, or send the error of the hub."""
        repository = self.hub.repositories.get(key)
        if repository is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        if repository.is_gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return None
        commit = repository.names.get(revision, revision)
        if commit not in repository.commits:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit

    def _send(
        self, code: int, body: bytes, headers: Mapping[str, str], *, has_body: bool = True
    ) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body and self.command != "HEAD":
            self.wfile.write(body)
