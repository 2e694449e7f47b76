"""The live page's server admits only requests with its token, reports the run, and refuses path traversal."""

from __future__ import annotations

import json
import random
import re
import stat
import string
import time
from html.parser import HTMLParser

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from evener.core.base.errors import HostError
from evener.core.base.file_io import write_atomic
from evener.watch.auth import SECURITY_HEADERS, AuthMiddleware, user_token
from evener.watch.dashboard import Dashboard, PageView
from evener.watch.http_app import DashboardApp, RunActions
from evener.watch.page_fragments import TabStatus, combined_status
from evener.watch.run_reader import RunReader

from ..conftest import wait_until
from ..tiers import num_examples

TOKEN = "t" * 43
BASE = "http://127.0.0.1:7447"
SAMPLES_EVERY_S = 0.05
HOSTILE = "<script>alert(1)<img src=x onerror=alert(2)>\"'& {{ 7 * 7 }}"


@pytest.fixture
def serve(tmp_path, write_run):
    """(client without a cookie, hub) of runs that are there."""
    opened = []

    def serve(*names, actions=None, verdict="running", **other):
        runs = [write_run(tmp_path / name, [{}, {}], verdict=verdict, evaluations={10: 2.0}, sync_s=0.02, **other)
                for name in names or ("one",)]  # fmt: skip
        hub = Dashboard(lambda: [run.path for run in runs])
        app = AuthMiddleware(
            DashboardApp(hub, actions or RunActions(), samples_every_s=SAMPLES_EVERY_S).build(), TOKEN, 7447
        )
        client = TestClient(app, base_url=BASE, follow_redirects=False).__enter__()
        opened.append(client)
        return client, hub, runs

    yield serve
    for client in opened:
        client.__exit__(None, None, None)


def let_in(client: TestClient) -> TestClient:
    assert client.get(f"/?token={TOKEN}").status_code == 303
    return client


class Page(HTMLParser):
    """What a browser would load or run."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.scripts, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert all(not name.startswith("on") for name, _ in attrs), "an event handler"
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "srcset") or (tag, name) == ("link", "href")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("script", "style"):
            self.scripts += [data] if data.strip() else []


# --- who is let in ----------------------------------------------------------------------------------------------------

PATHS = ["/", "/runs/one", "/compare?run=one", "/stream?page=/runs/one", "/status?page=/", "/metrics",
         "/static/watch.js"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_requests_without_token_are_refused(serve, path):
    client, *_ = serve()
    answers = [client.get(path), client.get(path, headers={"cookie": "evener_watch_7447=wrong"}),
               client.get(path + ("&" if "?" in path else "?") + "token=" + "u" * 43),
               client.get(path, headers={"cookie": f"evener_watch_7448={TOKEN}"}),
               client.get(path, headers={"authorization": "Bearer wrong"})]  # fmt: skip
    assert [answer.status_code for answer in answers] == [403] * 5
    assert all("one" not in answer.text.split() and "loss" not in answer.text for answer in answers)


def test_refused_request_ends_its_connection(serve):
    """Else a stranger keeps it by asking again; the owner's connections are kept."""
    client, *_ = serve()
    refused = [client.get("/"), client.get("/runs/one", headers={"host": "evil.example"})]
    accepted = [client.get(f"/?token={TOKEN}"), client.get("/runs/one")]
    assert [answer.headers.get("connection") for answer in (*refused, *accepted)] == ["close", "close", None, None]


def test_token_becomes_http_only_cookie(serve):
    client, *_ = serve()
    answer = client.get(f"/runs/one?axis=time&token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/one?axis=time")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/runs/one").status_code == 200
    two_slashes = client.get(f"{BASE}//evil.example/?token={TOKEN}")
    assert two_slashes.headers["location"] == "/evil.example/", "two would name another host"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7447", "127.0.0.1.evil.example", "", "[::2]:7447"])
def test_foreign_host_header_is_refused(serve, host):
    """A site whose name points here would otherwise read the page [DNS rebinding]."""
    client = let_in(serve()[0])
    assert client.get("/runs/one", headers={"host": host}).status_code == 421


def test_every_response_has_security_headers(serve):
    client, *_ = serve()
    for answer in (client.get("/"), let_in(client).get("/runs/one"), client.get("/nothing"), client.get("/static/x")):
        assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "unsafe-inline" not in policy.replace("style-src-attr 'unsafe-inline'", "")
    assert "unsafe-eval" not in policy


def test_token_file_is_private_to_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    token = user_token()
    path = tmp_path / "evener" / "watch.token"
    assert (len(token), user_token()) == (43, token)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    again = user_token()
    assert again != token, "others could have read it"
    path.write_text("short")
    path.chmod(0o600)
    assert user_token() not in ("short", token, again)


@pytest.mark.parametrize(
    "headers",
    [{}, {"x-evener": "1"}, {"origin": BASE}, {"x-evener": "1", "origin": "http://evil.example"},
     {"x-evener": "1", "origin": "null"}, {"x-evener": "1", "origin": "http://127.0.0.1:80"}],
)  # fmt: skip
def test_cross_site_post_is_refused(serve, headers):
    pressed = []
    client, *_ = serve(
        actions=RunActions(stop=lambda reader: pressed.append(reader) or "", can_control=lambda reader: True)
    )
    assert let_in(client).post("/runs/one/stop", headers=headers).status_code == 403
    assert pressed == []


def test_path_traversal_is_refused(serve, tmp_path):
    """Names of files, ways out of a folder, noise: what is served are runs by their keys, and our own files."""
    (tmp_path / "secret").write_text("secret-word")
    client = let_in(serve()[0])
    rng = random.Random(7)
    pieces = ["..", "%2e%2e", "..%2f", "%2f", "secret", "one", "manifest.json", "steps", "static", "runs", "\\", "%00",
              "etc", "passwd", "", ".", "stop", "~", "%25", "hang_detector.py", "auth.py", "templates"]  # fmt: skip
    asked = ["/runs/one/../../secret", "/static/../guard.py", "/static/%2e%2e/guard.py", "/runs/%2e%2e%2fsecret",
             "/runs/one/manifest.json", "/static/watch.html", "/static/state.html", "/compare?run=../secret",
             f"/runs/{tmp_path}/secret", "/status?page=/runs/../secret", "/stream?page=/etc/passwd"]  # fmt: skip
    for _ in range(num_examples(100, 600)):
        asked.append("/" + "/".join(rng.choice(pieces) for _ in range(rng.randint(1, 5))))
        asked.append("/static/" + "".join(rng.choices(string.printable[:95], k=rng.randint(1, 12))).replace("#", "%23"))
        asked.append("/status?page=/" + "/".join(rng.choice(pieces) for _ in range(rng.randint(1, 4))))
    for path in asked:
        answer = client.get(path)
        assert answer.status_code in (200, 303, 404, 405), path
        is_ours = answer.text.startswith(("<!doctype html>", '{"title":')) or path.startswith("/static/")
        assert is_ours or answer.text in ("no such page\n", "Not Found", "Method Not Allowed", ""), path
        assert "secret-word" not in answer.text, path


# --- what is told -----------------------------------------------------------------------------------------------------


def test_page_loads_only_own_small_files(serve):
    client = let_in(serve(steps=3000)[0])
    answer = client.get("/runs/one")
    page = Page(answer.text)
    assert page.scripts == []
    assert all(one.startswith("/static/") for one in page.loads)
    files = [client.get(one) for one in page.loads]
    assert all(one.status_code == 200 for one in files)
    assert sum(len(one.content) for one in [answer, *files]) < 1_000_000
    assert all("//" not in re.sub(r"//www\.w3\.org|^\s*//.*$| // .*$", "", one.text, flags=re.M) for one in files)


def test_hostile_names_are_escaped(serve):
    client, _, (run,) = serve(HOSTILE, corpus=HOSTILE, device=HOSTILE, verdict="failed")
    run.add_event("failure", rank=1, error=HOSTILE, kind="exit", hint=HOSTILE)
    run.add_event(HOSTILE, what=HOSTILE)
    home = let_in(client).get("/", follow_redirects=True)
    assert home.status_code == 200
    page = Page(home.text)
    assert page.scripts == []
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert home.text.count("&lt;script&gt;alert(1)") > 4


def test_first_failure_is_at_top_with_its_fix(serve):
    client, _, (run,) = serve(verdict="failed")
    run.add_event("start", step=0, ranks=2, sync="ddp")
    run.add_event("failure", rank=1, error="killed by SIGKILL", kind="exit", hint="was there enough memory?")
    run.add_event("run.peer-exit", rank=0, error="Connection closed by peer", kind="RuntimeError", hint="")
    run.add_event("checkpoint", step=10, val_loss=None)
    text = let_in(client).get("/runs/one").text
    state = text[text.index('data-piece="state"') : text.index('data-piece="facts"')]
    assert "now bad" in state
    assert "rank 1: killed by SIGKILL" in state
    assert "was there enough memory?" in state
    assert "Connection closed" not in state
    assert " ".join(re.sub("<[^>]+>", "", state).split()).count(f"evener train --resume {run.path}") == 1
    assert "<title>✗ failed · one · evener</title>" in text


def events_of(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]


def test_stream_starts_complete_and_ends_on_shutdown(serve, monkeypatch):
    """The client still listens when the hub closes: while the stream waits for the next update."""
    client, hub, _ = serve()

    async def close(timeout_s: float) -> None:
        hub.close_streams()

    monkeypatch.setattr(hub, "wait_for_update", close)
    text = let_in(client).get("/stream?page=/runs/one").text
    assert text.startswith("retry: 1000\n\n")
    [first] = events_of(text)
    assert {"title", "mark", "state", "message", "assets", "pieces"} == first.keys()
    assert {"state", "facts", "loss", "speed", "strips", "events"} <= first["pieces"].keys()


def test_page_parts_are_updated_when_run_progresses(serve, write_run):
    """Nobody shows the page, so that the hub's own thread does not render it meanwhile."""
    _, hub, (run,) = serve()
    shown = PageView("run", ("one",))
    hub.discover_runs()
    hub.read_new(shown)
    first = dict(hub.render_fragments(shown))
    assert hub.render_fragments(shown) == first
    text = run.steps_path(0).read_bytes().split(b"\n")[-2]
    with run.steps_path(0).open("ab") as file:
        file.write(text.replace(b'"step":19', b'"step":20') + b"\n")
    wait_until(lambda: hub.read_new(shown) or "step 21 of 20" in hub.render_fragments(shown)["state"])
    assert "step 20 of 20" in first["state"]
    assert hub.render_fragments(shown)["events"] == first["events"]


def test_runs_are_listed_and_compared(serve):
    client, _, _ = serve("a", "b", "c")
    home = let_in(client).get("/")
    assert [f'href="/runs/{name}"' in home.text for name in "abc"] == [True] * 3
    text = client.get("/compare?run=a&run=b&run=nothing").text
    assert re.findall(r'data-name="([^"]+)"', text) == ["a", "b"] * 3
    assert "What differs between them" in text
    assert client.get("/compare?run=nothing").status_code == 404


def test_runs_of_a_bench_are_folded(serve, tmp_path):
    client, _, _ = serve("alone", "bench/one", "bench/two", verdict="finished")
    (tmp_path / "bench" / "bench.json").write_text("{}")
    text = let_in(client).get("/").text
    own, bench = text.split("<details", 1)
    assert 'href="/runs/alone"' in own
    assert "bench: 2 runs of a bench, 2 finished" in bench
    assert [f'href="/runs/{name}"' in bench for name in ("one", "two", "alone")] == [True, True, False]


@pytest.mark.parametrize(
    ("states", "title"),
    [
        (["failed", "finished", "healthy"], "▶ 1 healthy · evener"),
        (["failed", "slow", "healthy"], "⚠ 1 slow, 1 healthy · evener"),
        (["failed", "finished"], "■ no run goes on · evener"),
    ],
)
def test_title_of_all_runs_is_of_those_that_go_on(states, title):
    status = combined_status({str(i): TabStatus("", "", state, "") for i, state in enumerate(states)})
    assert status.title == title
    assert status.state.startswith("1 failed, ")  # a change of it is read aloud


def test_comparison_shows_only_differing_settings(serve, tmp_path, write_run):
    client, _, (_, b) = serve("a", "b")
    manifest = json.loads(b.manifest_path.read_text())
    manifest["spec"]["train"]["lr"] = 0.007
    write_atomic(b.manifest_path, json.dumps(manifest).encode())
    text = let_in(client).get("/compare?run=a&run=b").text
    cells = re.findall(r"<t[hd][^>]*>([^<]+)</t[hd]>", text[text.index('data-piece="differences"') :])
    assert cells == ["a", "b", "--lr", "0.0003", "0.007"]


def test_stop_request_is_forwarded_and_its_result_shown(serve):
    stopped = []

    def stop(reader: RunReader) -> str:
        stopped.append(reader.rundir.path.name)
        return "it has ended"

    client, *_ = serve("a", "b", actions=RunActions(stop=stop, can_control=lambda reader: True))
    answer = let_in(client).post("/runs/b/stop", headers={"x-evener": "1", "origin": BASE})
    assert (answer.status_code, answer.json()["message"], stopped) == (200, "it has ended", ["b"])
    assert client.post("/runs/b/sample", headers={"x-evener": "1", "origin": BASE}).status_code == 404
    assert client.post("/runs/c/stop", headers={"x-evener": "1", "origin": BASE}).status_code == 404


def test_generated_samples_are_shown_escaped_newest_first(serve):
    """As text, whatever it writes; that of a later checkpoint above."""
    texts = {100: "once", 200: HOSTILE}

    def sample(reader: RunReader) -> str:
        step, text = texts.popitem()
        reader.samples[step] = text
        return f"written after step {step}"

    client, hub, _ = serve(actions=RunActions(sample=sample, can_sample=lambda reader: True))
    assert "write a sample" in let_in(client).get("/runs/one").text
    for step in (200, 100):
        answer = client.post("/runs/one/sample", headers={"x-evener": "1", "origin": BASE})
        assert answer.json()["message"] == f"written after step {step}"
        wait_until(lambda step=step: f"after step {step}" in hub.render_fragments(PageView("run", ("one",)))["samples"])
    page = Page(client.get("/runs/one").text)
    assert page.scripts == []
    assert page.tags.count("blockquote") == 2
    text = client.get("/runs/one").text
    assert text.index("after step 200") < text.index("after step 100")


def test_failed_stop_shows_reason(serve):
    def stop(reader: RunReader) -> str:
        raise HostError("attic cannot be reached", check="ssh.auth", host="attic", hint="is it on?")

    client, *_ = serve(actions=RunActions(stop=stop, can_control=lambda reader: True))
    answer = let_in(client).post("/runs/one/stop", headers={"x-evener": "1", "origin": BASE})
    assert (answer.status_code, answer.json()["message"]) == (409, "attic cannot be reached; is it on?")


def test_metrics_parse_with_prometheus_and_match_records(serve):
    """By its own parser; what stands there is what the records hold."""
    client, *_ = serve("one", 'two"\\x')
    text = client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    assert client.get(f"/metrics?token={TOKEN}").text.count("# TYPE") == text.count("# TYPE")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {sample.labels["run"] for sample in families["evener_steps"].samples} == {"one", 'two"\\x'}
    assert {sample.value for sample in families["evener_steps"].samples} == {20.0}
    [loss, _] = families["evener_loss"].samples
    assert loss.value == pytest.approx(3.0 / 20)
    tokens_per_s = families["evener_tokens_per_second"].samples[0].value
    assert tokens_per_s == pytest.approx(16 * 64 / 0.105)  # a batch of 16 sequences of 64 in MEASURED's 0.105 s
    parts = {sample.labels["part"]: sample.value for sample in families["evener_step_part_seconds"].samples
             if sample.labels["rank"] == "1"}  # fmt: skip
    assert parts["compute"] == pytest.approx(0.1)
    states = {sample.labels["state"] for sample in families["evener_state"].samples if sample.value}
    assert len(states) == 1


def test_sampling_continues_per_checkpoint_while_viewed_and_stops_on_failure(serve):
    """After each checkpoint; not where it failed, until it is asked again."""
    written, can = [], [True]

    def sample(reader):
        written.append(step := max(reader.rundir.checkpoint_steps()))
        if not can[0]:
            raise HostError("no memory")
        reader.samples[step] = "text"
        return "written"

    client, hub, (run,) = serve(actions=RunActions(sample=sample, can_sample=lambda reader: True))

    def save(step):
        run.checkpoint_path(step).mkdir(parents=True)

    save(10)
    assert let_in(client).post("/runs/one/sample", headers={"x-evener": "1", "origin": BASE}).json() == {
        "message": "written"
    }
    with hub.subscribe(PageView("run", ("one",))):
        save(20)
        wait_until(lambda: written == [10, 20])
        can[0] = False
        save(30)
        wait_until(lambda: written == [10, 20, 30])
        time.sleep(4 * SAMPLES_EVERY_S)
        assert written == [10, 20, 30]
        can[0] = True
        client.post("/runs/one/sample", headers={"x-evener": "1", "origin": BASE})
        wait_until(lambda: written[3:] == [30])
    save(40)
    time.sleep(4 * SAMPLES_EVERY_S)
    assert written == [10, 20, 30, 30]
