"""Models of the Hugging Face hub: the hub's own client, with a hub of our own on this machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama", "vocab_size": 8}',
    "tokenizer.json": b"{}",
    "model.safetensors": (2).to_bytes(8, "little") + b"{}",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.safetensors": b"the weights a second time",
}
FIND = "from pathlib import Path; from evener.cli.hub_models import model_folder; print(model_folder(Path({name!r})))"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that `snapshot_download` uses."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        path = self.path.split("?")[0].lstrip("/")
        if not is_head:
            self.asked.append(path)
        if path.startswith("api/models/home/gated") or path.startswith("api/models/home/missing"):
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            self._send(403 if "gated" in path else 404, b"{}", {"X-Error-Code": code})
        elif path.startswith("api/models/home/llama/tree/"):
            entries = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                       for name, data in FILES.items()]  # fmt: skip
            self._send(200, json.dumps(entries).encode())
        elif path.startswith("api/models/home/llama"):
            self._send(200, json.dumps({"id": "home/llama", "sha": COMMIT, "siblings": []}).encode())
        elif (data := FILES.get(path.partition(f"/resolve/{COMMIT}/")[2])) is not None:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            self._send(200, b"" if is_head else data, headers, length=len(data))
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """A hub, and the paths that were asked of it."""
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Hub.asked
    server.shutdown()
    thread.join()
    server.server_close()


def find(name: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    code = ("import sys\nfrom evener.core.base.errors import EvenerError\ntry:\n    " + FIND.format(name=name)
            + "\nexcept EvenerError as error:\n    sys.exit(f'{error}; {error.hint}')")  # fmt: skip
    env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)


def test_model_of_the_hub_is_downloaded_once_without_pickles(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    first = find("home/llama", endpoint, tmp_path)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "tokenizer.json", "model.safetensors")
    }
    from evener.core.model.pretrained import model_name

    assert model_name(folder) == "llama"
    count = len(asked)
    again = find("home/llama", endpoint, tmp_path)
    assert (again.stdout, len(asked)) == (first.stdout, count)  # from the cache: nothing was asked
    (folder / "model.safetensors").unlink()
    repaired = find("home/llama", endpoint, tmp_path)
    assert repaired.stdout == first.stdout
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_model_that_the_hub_does_not_give_is_a_sentence(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    said = {name: find(name, endpoint, tmp_path).stderr for name in ("home/gated", "home/missing")}
    assert "--model hf:home/gated: the hub gives it only to those who have accepted its licence" in said["home/gated"]
    assert "--model hf:home/missing: no such folder, and the hub has no public model" in said["home/missing"]
    unreachable = find("home/llama", "http://127.0.0.1:9", tmp_path)
    assert "no such folder, and the hub cannot be reached from here" in unreachable.stderr
    assert "hf download home/llama" in unreachable.stderr
    invalid = find("home/a--b", endpoint, tmp_path)  # which the hub allows in no name: train refuses the folder
    assert invalid.stdout.strip() == str(Path("home/a--b").absolute())
    assert not any("Traceback" in text for text in (*said.values(), unreachable.stderr))


def test_folder_comes_before_the_hub(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    (tmp_path / "home" / "llama").mkdir(parents=True)
    assert find(str(tmp_path / "home" / "llama"), endpoint, tmp_path).stdout.strip() == str(tmp_path / "home" / "llama")
    assert find(str(tmp_path / "none"), endpoint, tmp_path).stdout.strip() == str(tmp_path / "none")  # train refuses it
    assert not asked


@pytest.mark.parametrize("verb", ["train", "plan", "probe host"])
def test_verbs_that_take_a_pretrained_model_ask_the_hub(verb: str, hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    data = [] if verb == "probe host" else ["rows.jsonl"]
    argv = [sys.executable, "-m", "evener", *verb.split(), *data, "--model", "hf:home/missing"]
    env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert "error: --model hf:home/missing: no such folder, and the hub has no public model of this name" in done.stderr
