"""Dashboard server: pages, their data, and a stream that announces new data.

Read-only, over the given run directories and nothing else. A request needs the token (in the
address once, then in a cookie; or as a bearer token), one of the server's own names as Host, and an
Origin that is its own. Browsers are notified of changes and fetch what they show: a slow or absent
one costs nothing, and nothing is read without a viewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.util
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from shoal.cluster.launch import run_directory
from shoal.observe import runs
from shoal.observe.dashboard import prometheus, views
from shoal.observe.dashboard.feed import RunFeed

STATIC = Path(__file__).parent / "static"
COOKIE = "shoal_dashboard"
POLL_EVERY_S = 0.5
MAX_SHARE = 0.01
"""Of one core, beside a run that trains: browsers are told of a change so rarely that what they then ask for takes no more, and at least
every `SLOWEST_S`. The dashboard shares the workers' cores."""

SLOWEST_S = 5.0
HEARTBEAT_S = 15.0
MAX_COMPARED = 12
MAX_FEEDS = 12
"""Runs whose curves are kept in memory; of others only what their list shows is read."""

SECURITY_HEADERS = {
    # Plotly sets style attributes. No script but our files, no network but this server.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(slots=True)
class Library:
    """Runs that may be shown, listed anew at each request. A run is addressed by name, never by path."""

    root: Path
    """A directory of runs, or one run."""

    feeds: dict[str, RunFeed] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of `feeds`: requests are answered in several threads."""

    @property
    def is_one_run(self) -> bool:
        return (self.root / "config.json").is_file()

    def names(self) -> list[str]:
        if self.is_one_run:
            return [self.root.resolve().name]
        return [name for name in runs.names(self.root) if self._path(name) is not None]

    def feed(self, name: str) -> RunFeed:
        path = self._path(name)
        if path is None:
            raise HTTPException(404, f"there is no run '{name[:80]}' here")
        with self.lock:
            feed = self.feeds.pop(name, None) or RunFeed(path)
            self.feeds[name] = feed  # the newest last
            while len(self.feeds) > MAX_FEEDS:
                del self.feeds[next(iter(self.feeds))]
        return feed

    def is_alive(self, name: str) -> bool:
        path = self._path(name)
        return path is not None and run_directory.is_alive(path)

    def _path(self, name: str) -> Path | None:
        """The directory of a run of this name; None for one that is not there, or lies elsewhere by a link."""
        if self.is_one_run:
            return self.root if name == self.root.resolve().name else None
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            return None
        path = self.root / name
        try:
            is_inside = path.resolve().parent == self.root.resolve() and not path.is_symlink()
            return path if is_inside and (path / "config.json").is_file() else None
        except OSError:
            return None


class Guard:
    """Refuses foreign requests: another Host, another Origin, no token, any method that could write."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, token: str, hosts: set[str]
    ) -> None:
        self._app, self._token, self._hosts = app, token.encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                extra = {"cache-control": "no-store", **SECURITY_HEADERS}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in present),
                ]
            await send(message)

        answer = self._refusal(Request(scope)) or self._entry(Request(scope))
        await (answer or self._app)(scope, receive, secured)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "").lower()
        if host not in self._hosts:
            return _refused(
                421,
                "This is not one of this dashboard's addresses. Use the one that was printed at its start.",
            )
        if request.method not in ("GET", "HEAD"):
            return _refused(405, "The dashboard only shows; it takes no such request.")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            return _refused(403, "This request comes from another site.")
        if (
            request.headers.get("sec-fetch-site") == "cross-site"
            and request.headers.get("sec-fetch-mode") != "navigate"
        ):
            return _refused(403, "This request comes from another site.")
        return None

    def _entry(self, request: Request) -> Response | None:
        """Move the token from the address into a cookie, so that it does not stay there; None for an
        authenticated client.
        """
        port = request.headers.get("host", "").rpartition(":")[2]
        cookie = f"{COOKIE}_{port}" if port.isdigit() else COOKIE
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            left = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
            answer = RedirectResponse(request.url.path + (f"?{urlencode(left)}" if left else ""), 303)
            answer.set_cookie(cookie, given, httponly=True, samesite="lax", path="/")
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if given is None and (
            self._is_token(request.cookies.get(cookie, ""))
            or (scheme.lower() == "bearer" and self._is_token(bearer))
        ):
            return None
        return _refused(
            403,
            "This dashboard opens with the token in the address that was printed at its start"
            + (", and the one in this address is another." if given is not None else "."),
        )

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)


def _refused(status: int, why: str) -> Response:
    headers = {"allow": "GET, HEAD"} if status == 405 else None
    return PlainTextResponse(why + "\n", status, headers=headers)


class Dashboard:
    """The routes over one library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._index = (STATIC / "index.html").read_bytes()

    def routes(self) -> list[Route]:
        pages = ["/", "/compare", "/run/{name}", "/run/{name}/{page}"]
        return [
            *(Route(path, self._page) for path in pages),
            Route("/api/runs", self._runs),
            Route("/api/compare", self._compare),
            Route("/api/stream", self._stream),
            Route("/api/run/{name}/{page}", self._view),
            Route("/graph/{name}.svg", self._svg),
            Route("/metrics", self._metrics),
            Route("/static/{file}", self._static),
        ]

    async def _page(self, request: Request) -> Response:
        return Response(self._index, media_type="text/html")

    async def _static(self, request: Request) -> Response:
        found = _static_files().get(request.path_params["file"])
        if found is None:
            raise HTTPException(404, "there is no such file")
        path, kind = found
        at = path.stat()
        headers = {"etag": f'"{at.st_mtime_ns:x}-{at.st_size:x}"', "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(await run_in_threadpool(path.read_bytes), media_type=kind, headers=headers)

    async def _runs(self, request: Request) -> Response:
        def read() -> list[dict[str, Any]]:
            root = self._library.root
            found = []
            for name in self._library.names():
                run = runs.read(root if self._library.is_one_run else root / name)
                found.append(run.facts() | {"name": name, "path": ""})
            return sorted(found, key=lambda run: run["started"] or 0.0, reverse=True)

        return _json({"runs": await run_in_threadpool(read), "is_one_run": self._library.is_one_run})

    async def _view(self, request: Request) -> Response:
        view = views.PAGES.get(request.path_params["page"])
        if view is None:
            raise HTTPException(404, "there is no such page")
        feed = await run_in_threadpool(self._library.feed, request.path_params["name"])

        def read() -> bytes:
            with feed.lock:
                _refresh(feed)
                return _encoded({"version": feed.version, "head": views.head(feed), **view(feed)})

        return Response(await run_in_threadpool(read), media_type="application/json")

    async def _svg(self, request: Request) -> Response:
        feed = await run_in_threadpool(self._library.feed, request.path_params["name"])

        def read() -> str:
            with feed.lock:
                _refresh(feed)
                return feed.drawing()

        return Response(await run_in_threadpool(read), media_type="image/svg+xml")

    async def _compare(self, request: Request) -> Response:
        names = request.query_params.get("runs", "").split(",")[:MAX_COMPARED]

        def read() -> bytes:
            feeds = [self._library.feed(name) for name in dict.fromkeys(names) if name]
            with contextlib.ExitStack() as held:
                # In one order for all requests: two that name the same runs must not deadlock.
                for feed in sorted(feeds, key=lambda feed: feed.name):
                    held.enter_context(feed.lock)
                    _refresh(feed)
                return _encoded(views.compare(feeds))

        return Response(await run_in_threadpool(read), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        def read() -> str:
            found = []
            for name in self._library.names():
                # An ended run does not change: only live ones are read.
                if name in self._library.feeds or self._library.is_alive(name):
                    feed = self._library.feed(name)
                    with feed.lock:
                        _refresh(feed)
                        found.append(prometheus.figures(feed))
            return prometheus.text(found)

        return PlainTextResponse(await run_in_threadpool(read), media_type="text/plain; version=0.0.4")

    async def _stream(self, request: Request) -> Response:
        names = [name for name in request.query_params.get("runs", "").split(",") if name][:MAX_COMPARED]
        feeds = [await run_in_threadpool(self._library.feed, name) for name in names]
        return StreamingResponse(_changes(feeds), media_type="text/event-stream")


async def _changes(feeds: list[RunFeed]) -> AsyncIterator[str]:
    """A line whenever one of the runs has something new. Sent as fast as the browser takes it, and never queued."""
    seen, told_at, spent_s = [-1] * len(feeds), time.monotonic(), time.process_time()
    said_at = told_at
    yield "retry: 1000\n\n"
    while True:
        for feed in feeds:
            await run_in_threadpool(_locked_refresh, feed)
        now = [feed.version for feed in feeds]
        is_training = any(feed.state is runs.RunState.ALIVE for feed in feeds)
        # Since the last change was told: polls, and the views of it for all browsers.
        passed_s, cost_s = time.monotonic() - told_at, time.process_time() - spent_s
        has_rested = cost_s <= MAX_SHARE * passed_s or passed_s >= SLOWEST_S or not is_training
        if now != seen and has_rested:
            seen, told_at, spent_s = now, time.monotonic(), time.process_time()
            said_at = told_at
            yield f"data: {','.join(map(str, now))}\n\n"
        elif time.monotonic() - said_at >= HEARTBEAT_S:
            said_at = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(POLL_EVERY_S)


def _locked_refresh(feed: RunFeed) -> None:
    with feed.lock:
        _refresh(feed)


def _refresh(feed: RunFeed) -> None:
    """Poll, unless another request did so just now."""
    if time.monotonic() - feed.polled_at >= POLL_EVERY_S / 2:
        feed.poll()


def _static_files() -> dict[str, tuple[Path, str]]:
    kinds = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    found = {path.name: (path, kinds[path.suffix]) for path in STATIC.iterdir() if path.suffix in kinds}
    spec = importlib.util.find_spec("plotly")  # found, not imported: that takes a second
    if spec is not None and spec.origin is not None:
        script = Path(spec.origin).parent / "package_data" / "plotly.min.js"
        found["plotly.min.js"] = (script, kinds[".js"])
    return found


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)  # what is not finite becomes null


def _json(value: Any) -> Response:
    return Response(_encoded(value), media_type="application/json")


async def _said(request: Request, error: Exception) -> Response:
    status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "error")
    return PlainTextResponse(f"{detail}\n", status)


def application(root: Path, *, token: str, hosts: set[str]) -> Guard:
    """The dashboard over a directory of runs or one run. `hosts` are the values of Host that it answers to."""
    dashboard = Dashboard(Library(Path(os.path.abspath(root))))
    app = Starlette(routes=dashboard.routes(), exception_handlers={HTTPException: _said})
    return Guard(app, token=token, hosts={host.lower() for host in hosts})
