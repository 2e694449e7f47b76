"""Who may ask the page's server anything? Whoever has its token, by one of the names that the server has.

    ?token=…   → a cookie that scripts cannot read and other sites cannot send, and the same address without the token
    the cookie → the page, its stream, its buttons; for these, too, where the request comes from
    a bearer   → /metrics, for programs

Host is compared so that no name of somebody else's that points to this machine makes a browser ask as if it were that
site [DNS rebinding].
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener.core.files import read_file, write_atomic
from evener.watch.pages import refused_page

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ACTION = "x-evener"  # no form and no other site's script can send it
HEADERS = {
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
    """Where this user's token is kept."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "evener" / "watch.token"


def user_token() -> str:
    """This user's, made at the first time and then the same: a tab that is open goes on when the server was started
    again. Nobody else can read it; one that others could is replaced.
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


class Guard:
    """Lets in who may."""

    def __init__(self, app: ASGIApp, token: str, port: int, hosts: Collection[str] = ()) -> None:
        """`hosts`: names and addresses of the server beside those of the loopback."""
        self._app, self._token, self._hosts = app, token, {*LOOPBACK, *map(_bracketed, hosts)}
        self._cookie = f"evener_watch_{port}"  # cookies know no ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # a web socket: nobody here speaks that

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((name.encode(), value.encode())
                                                            for name, value in HEADERS.items())]  # fmt: skip
            await send(message)

        request = Request(scope)
        answer = self._refusal(request)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """What whoever may not is told; None: let it through."""
        host, is_read = request.headers.get("host", ""), request.method in ("GET", "HEAD")
        if _name_of(host) not in self._hosts:
            return PlainTextResponse("this server has another name\n", 421)
        given = request.query_params.get("token")
        if request.url.path == "/metrics":
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            if is_read and (self._is_right(given) or (scheme.lower() == "bearer" and self._is_right(bearer.strip()))):
                return None
        elif given is not None and is_read and self._is_right(given):
            return self._exchange(request)
        if not self._is_right(request.cookies.get(self._cookie)):
            return HTMLResponse(refused_page("Whoever has no token may not see what runs here."), 403)
        if not is_read:
            origin = request.headers.get("origin")
            if request.method != "POST" or ACTION not in request.headers or origin != f"http://{host}":
                return PlainTextResponse("not from this page\n", 403)
        return None

    def _exchange(self, request: Request) -> Response:
        """The token for a cookie; the address that is shown, kept and sent on has none."""
        rest = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
        path = "/" + request.url.path.lstrip("/")  # two slashes would name another host
        answer = RedirectResponse(path + ("?" + rest if rest else ""), 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer

    def _is_right(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _name_of(host: str) -> str:
    """Without its port.

    >>> _name_of("localhost:80"), _name_of("[::1]:80"), _name_of("attic")
    ('localhost', '[::1]', 'attic')
    """
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() and not (":" in name and not name.endswith("]")) else host.lower()


def _bracketed(host: str) -> str:
    return f"[{host.lower()}]" if ":" in host and not host.startswith("[") else host.lower()
