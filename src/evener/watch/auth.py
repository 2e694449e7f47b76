"""Authenticate requests to the dashboard: they need its token and one of the server's own host names.

    ?token=…     → an HttpOnly, SameSite=Strict cookie, and a redirect to the same address without the token
    the cookie   → pages, streams and actions; for actions the Origin header is checked too
    bearer token → /metrics, for programs

The Host header is checked so that a foreign name that resolves to this machine cannot make a browser send requests as
that site [DNS rebinding].
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener.core.base.file_io import read_file, state_folder, write_atomic
from evener.watch.page_fragments import unauthorized_page

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ON_AUTHENTICATED = "evener.on_authenticated"  # in a request's state: to call once its token has proved valid
CSRF_HEADER = "x-evener"  # a form or another site's script cannot send it
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src-elem 'self'; style-src-attr 'unsafe-inline'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def token_path() -> Path:
    """Return the path of this user's token."""
    return state_folder() / "watch.token"


def user_token() -> str:
    """Return this user's token, created on first use. It stays the same, so that an open tab survives a restart of the
    server. Only the user can read its file; a token that others could read is replaced.
    """
    path = token_path()
    try:
        token = read_file(path).decode("ascii").strip()
        if len(token) >= 32 and not path.stat().st_mode & 0o077:
            return token
    except (OSError, UnicodeDecodeError):
        pass
    token = secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, token.encode() + b"\n", mode=0o600)
    return token


class AuthMiddleware:
    """ASGI middleware that refuses requests without a valid token, Host or Origin."""

    def __init__(self, app: ASGIApp, token: str, port: int, hosts: Collection[str] = ()) -> None:
        """`hosts`: names and addresses of this server other than the loopback's."""
        self._app, self._token, self._hosts = app, token, {*LOOPBACK, *map(_bracketed, hosts)}
        self._cookie = f"evener_watch_{port}"  # cookies are shared by all ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # web sockets are not supported

        request = Request(scope)
        response = self._response_without_app(request)
        headers = SECURITY_HEADERS
        if response is None or isinstance(response, RedirectResponse):
            scope.get("state", {}).get(ON_AUTHENTICATED, lambda: None)()
        else:
            headers = SECURITY_HEADERS | {"connection": "close"}  # a stranger gets one answer a connection

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((name.encode(), value.encode())
                                                            for name, value in headers.items())]  # fmt: skip
            await send(message)

        await (response or self._app)(scope, receive, send_with_headers)

    def _response_without_app(self, request: Request) -> Response | None:
        """Return the response that exchanges the token or refuses a request; None to let the request pass."""
        host, is_read = request.headers.get("host", ""), request.method in ("GET", "HEAD")
        if _host_name(host) not in self._hosts:
            return PlainTextResponse("unknown host name\n", 421)
        token = request.query_params.get("token")
        if request.url.path == "/metrics":
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            if is_read and (
                self._is_valid_token(token) or (scheme.lower() == "bearer" and self._is_valid_token(bearer.strip()))
            ):
                return None
        elif token is not None and is_read and self._is_valid_token(token):
            return self._exchange_token(request)
        if not self._is_valid_token(request.cookies.get(self._cookie)):
            return HTMLResponse(unauthorized_page("This page needs a token."), 403)
        if not is_read:
            origin = request.headers.get("origin")
            if request.method != "POST" or CSRF_HEADER not in request.headers or origin != f"http://{host}":
                return PlainTextResponse("cross-site request refused\n", 403)
        return None

    def _exchange_token(self, request: Request) -> Response:
        """Set the cookie and redirect to the address without the token, so that it is not shown, saved or shared."""
        query = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
        path = "/" + request.url.path.lstrip("/")  # two slashes would name another host
        response = RedirectResponse(path + ("?" + query if query else ""), 303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response

    def _is_valid_token(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _host_name(host: str) -> str:
    """Return a host name in lower case without its port.

    >>> _host_name("localhost:80"), _host_name("[::1]:80"), _host_name("attic")
    ('localhost', '[::1]', 'attic')
    """
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() and not (":" in name and not name.endswith("]")) else host.lower()


def _bracketed(host: str) -> str:
    return f"[{host.lower()}]" if ":" in host and not host.startswith("[") else host.lower()
