"""A Hub on this machine: the few answers that huggingface_hub needs to look up a repository and to fetch its files."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "fedcba9876543210fedcba9876543210fedcba98"


class FakeHub:
    """`repos`: files by repository and revision, where a revision is a branch, a tag or a commit. `refusals`: (HTTP
    status, X-Error-Code) by repository. `asked`: method and path of every request, `fetched`: files that were sent."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, tuple[str, dict[str, bytes]]]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main", commit: str = COMMIT) -> None:
        revisions = self.repos.setdefault(repo, {})
        revisions[revision] = revisions[commit] = (commit, files)

    @property
    def fetched(self) -> list[str]:
        return [
            line.split("/resolve/", 1)[1].split("/", 1)[1]
            for line in self.asked
            if line.startswith("GET /o/") and "/resolve/" in line
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(f"{request.command} {path}")
        is_api = path.startswith("/api/models/")
        words = path.removeprefix("/api/models").split("/")[1:]
        repo = "/".join(words[:2])
        revision = words[3].replace("%2F", "/") if len(words) > 3 else "main"
        if repo in self.refusals:
            return self._send(request, *self.refusals[repo])
        if repo not in self.repos:
            return self._send(request, 401, "RepoNotFound")
        if revision not in self.repos[repo]:
            return self._send(request, 404, "RevisionNotFound")
        commit, files = self.repos[repo][revision]
        if is_api:
            siblings = [{"rfilename": name, "size": len(data), "blobId": "0" * 40} for name, data in files.items()]
            return self._send(request, 200, "", json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode())
        data = files.get("/".join(words[4:]))
        if data is None:
            return self._send(request, 404, "EntryNotFound")
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        return self._send(request, 200, "", data, {"ETag": etag, "X-Repo-Commit": commit})

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        code: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in ((headers or {}) | ({"X-Error-Code": code} if code else {})).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
