"""A store behind a web server that answers ranges is staged like any other."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from distrag.data.store import Store, open_store
from tests.data.staging import NUM_ROWS, build_store, same_rows, staged


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(tmp_path_factory.mktemp("elsewhere"))


class Ranges(http.server.BaseHTTPRequestHandler):
    """A web server of one folder that answers ranges of bytes, or does not."""

    folder: Path
    answers_ranges = True

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.folder / unquote(self.path.lstrip("/"))
        if not path.is_file():
            self.send_error(404)
            return
        content, asked = path.read_bytes(), self.headers.get("Range")
        part = content
        if asked and self.answers_ranges:
            first, last = asked.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last) + 1]
        self.send_response(206 if len(part) < len(content) else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body:
            self.wfile.write(part)

    def log_message(self, *told: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server(store: Store) -> Iterator[http.server.ThreadingHTTPServer]:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not installed here")
    handler = type("Handler", (Ranges,), {"folder": store.path})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_web_server_is_read_by_ranges(server: http.server.ThreadingHTTPServer, store: Store, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    some = staged(url, tmp_path / "cache", [(100, 200)])
    same_rows(some, store, 100, 200)
    same_rows(open_store(url, cache=tmp_path / "cache", verify=True), store, 0, NUM_ROWS)
    server.RequestHandlerClass.answers_ranges = False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"(?s)Ranges of bytes are not answered.*wanted: \d+ bytes"):
        open_store(url, cache=tmp_path / "other")


def test_names_are_quoted_once_behind_a_cache_as_well(server: http.server.ThreadingHTTPServer, store: Store, tmp_path: Path) -> None:
    url = f"simplecache::http://127.0.0.1:{server.server_port}"
    same_rows(open_store(url, cache=tmp_path / "cache", verify=True), store, 0, NUM_ROWS)
