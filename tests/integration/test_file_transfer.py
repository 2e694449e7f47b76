"""Send and fetch file trees: byte for byte, each file once, resumed if interrupted, damaged data discarded."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evener.core.base.errors import HostError, UsageError
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.node.remote import content_store
from evener.ssh.session import Session, open_session
from evener.transfer import file_tree as tree_module
from evener.transfer.file_transfer import CHUNK_BYTES, FileFetcher, send_to_host, send_to_hosts
from evener.transfer.file_tree import FileTree, TreeFile, describe_data, describe_files, describe_project
from evener.transfer.secret_files import PRIVATE_KEY_BYTES, has_secret_name

from ..tiers import num_examples

MB = 1 << 20


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    opened = open_session("here", HostConfig(address="local"))
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def work(tmp_path) -> str:
    return str(tmp_path / "work dir")


def contents(root: Path) -> dict[bytes, tuple[bytes, bool] | bytes]:
    """Every file (its bytes, is it executable) and link (where it points) below, by path."""
    found: dict[bytes, tuple[bytes, bool] | bytes] = {}
    for folder, folders, names in os.walk(os.fsencode(root)):
        for name in names + [name for name in folders if os.path.islink(os.path.join(folder, name))]:
            path = os.path.join(folder, name)
            key = os.path.relpath(path, os.fsencode(root))
            if os.path.islink(path):
                found[key] = os.readlink(path)
            else:
                found[key] = (Path(os.fsdecode(path)).read_bytes(), os.access(path, os.X_OK))
    return found


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def parts(work: str) -> list[Path]:
    return sorted(Path(work, "blobs").glob("*.part"))


# -- Any names, any contents --

NAME = (
    st.one_of(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20),
        st.binary(min_size=1, max_size=20).map(lambda raw: os.fsdecode(raw.replace(b"/", b"-").replace(b"\0", b"-"))),
        st.sampled_from(["a", "b", " ", "a b", "'", '"', "$(x)", "new\nline", "-rf", "*", "\\", "ü", "u\u0308", "日"]),
    )
    .filter(lambda name: not name.startswith(".") and len(os.fsencode(name)) < 200)
    .filter(lambda name: name not in ("runs", "__pycache__", "pyvenv.cfg") and not has_secret_name(name))
)
PATH = st.lists(NAME, min_size=1, max_size=3).map(tuple)
CONTENT = st.binary(max_size=3000).filter(lambda content: not PRIVATE_KEY_BYTES.search(content))
FILES = st.dictionaries(PATH, st.tuples(CONTENT, st.booleans()), max_size=12)


@settings(max_examples=num_examples(15, 60), deadline=None)
@given(files=FILES)
@example(files={})
@example(files={("same",): (b"x", False), ("too",): (b"x", True), ("dir", "empty"): (b"", False)})
def test_every_tree_round_trips_byte_for_byte(session, files):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "project")
        root.mkdir()
        for path, (content, executable) in files.items():
            place = root.joinpath(*path)
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
            except (FileExistsError, IsADirectoryError, NotADirectoryError):
                continue  # it is a folder's name already, or a file's
            place.chmod(0o755 if executable else 0o644)
        there = contents(root)

        arrived = send_to_host(session, f"{folder}/work", describe_project(root))
        assert contents(Path(arrived.path)) == there
        assert arrived.sent_bytes == sum(len(content) for content in {entry[0] for entry in there.values()})
        assert send_to_host(session, f"{folder}/work", describe_project(root)).sent_bytes == 0
        fetch(session, Path(arrived.path), Path(folder, "back"), [os.fsdecode(name) for name in there])
        assert contents(Path(folder, "back")) == there


# -- Sending --


def test_existing_files_are_not_sent_again(session, tmp_path, work):
    root = write(tmp_path / "p", {"a.py": b"1", "big": noise(3 * MB), "b.py": b"2"})
    first = send_to_host(session, work, describe_project(root))
    assert first.sent_bytes == 3 * MB + 2
    again = send_to_host(session, work, describe_project(root))
    assert (again.path, again.sent_bytes) == (first.path, 0)
    (root / "a.py").write_bytes(b"other")
    changed = send_to_host(session, work, describe_project(root))
    assert (changed.path != first.path, changed.sent_bytes) == (True, 5)
    assert Path(first.path, "a.py").read_bytes() == b"1"


def test_files_are_sent_to_all_hosts_at_once(tmp_path):
    fleet = Fleet(hosts={name: HostConfig(address="local", workdir=str(tmp_path / name)) for name in ("a", "b")})
    sessions = {name: open_session(name, host) for name, host in fleet.hosts.items()}
    root = write(tmp_path / "p", {"big": noise(5 * MB), "small": b"x"})
    try:
        arrived = send_to_hosts(sessions, fleet, describe_project(root))
    finally:
        for one in sessions.values():
            one.close()
    for name in ("a", "b"):
        assert arrived[name].path.startswith(str(tmp_path / name / "trees"))
        assert contents(Path(arrived[name].path)) == contents(root)


def test_progress_of_send_ends_at_total(session, tmp_path, work):
    told: list[tuple[str, int, int]] = []
    root = write(tmp_path / "p", {"big": noise(5 * MB), "small": b"x"})
    send_to_host(session, work, describe_project(root), lambda *sent: told.append(sent))
    assert told[-1] == ("here", 5 * MB + 1, 5 * MB + 1)
    assert [done for _, done, _ in told] == [1, *(1 + number * MB for number in range(6))]
    assert {total for _, _, total in told} == {5 * MB + 1}


def test_interrupted_copy_resumes_at_last_byte(session, tmp_path, work):
    size = 24 * MB + 12345
    tree = describe_data(write(tmp_path / "d", {"train.bin": noise(size)}))
    killed = open_session("here", HostConfig(address="local"))

    def kill(name: str, done: int, total: int) -> None:
        if done > 9 * MB:
            killed._process.kill()
            killed._process.wait()  # until then it may receive more

    with pytest.raises(HostError, match="connection was lost"):
        send_to_host(killed, work, tree, kill)
    killed.close()
    [part] = parts(work)
    left = part.stat().st_size
    assert 9 * MB < left < size
    assert not list(Path(work).glob("trees/*"))

    arrived = send_to_host(session, work, tree)
    assert (arrived.resumed_bytes, arrived.sent_bytes) == (left, size - left)
    assert Path(arrived.path, "train.bin").read_bytes() == noise(size)
    assert not parts(work)


def test_corrupt_partial_file_is_discarded(session, tmp_path, work):
    size = 5 * MB
    tree = describe_data(write(tmp_path / "d", {"train.bin": noise(size)}))
    digest = tree.files["train.bin"].digest
    left = write(Path(work), {f"blobs/{digest}.x.part": noise(2 * MB, seed=1)}) / f"blobs/{digest}.x.part"
    arrived = send_to_host(session, work, tree)
    assert Path(arrived.path, "train.bin").read_bytes() == noise(size)
    assert (arrived.resumed_bytes, not left.exists(), parts(work)) == (0, True, [])
    assert arrived.sent_bytes == size


def test_partial_file_longer_than_the_whole_one_is_not_sent_again(session, tmp_path, work):
    tree = describe_data(write(tmp_path / "d", {"train.bin": noise(2 * MB)}))
    digest = tree.files["train.bin"].digest
    write(Path(work), {f"blobs/{digest}.x.part": noise(2 * MB) + b"and more"})
    assert send_to_host(session, work, tree).sent_bytes == 0


def test_two_senders_can_send_same_file(tmp_path, work):
    tree = describe_data(write(tmp_path / "d", {"train.bin": noise(24 * MB), "small": b"x" * 1000}))
    sessions = [open_session(f"s{number}", HostConfig(address="local")) for number in range(4)]
    gate, found, errors = threading.Barrier(4), [], []

    def one(opened: Session) -> None:
        try:
            gate.wait()
            found.append(send_to_host(opened, work, tree).path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=[opened]) for opened in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for opened in sessions:
        opened.close()
    assert not errors
    assert len(found) == 4
    assert len(set(found)) == 1
    assert Path(found[0], "train.bin").read_bytes() == noise(24 * MB)
    assert not parts(work)
    assert len(list(Path(work, "trees").iterdir())) == 2  # the tree and its list


def test_stalled_sender_does_not_block_others(session, tmp_path, work):
    tree = describe_data(write(tmp_path / "d", {"train.bin": noise(3 * MB)}))
    digest = tree.files["train.bin"].digest
    stuck = open_session("stuck", HostConfig(address="local"))
    stuck.call("content_store", "find_missing_blobs", workdir=work, digests={digest: 3 * MB}, tree="x")
    part = stuck.call("content_store", "open_upload", workdir=work, digest=digest, size=3 * MB)["part"]
    stuck.call("content_store", "write_upload", part=part, offset=0, body=noise(3 * MB)[:1000])
    arrived = send_to_host(session, work, tree)
    assert (arrived.resumed_bytes, arrived.sent_bytes) == (1000, 3 * MB - 1000)
    stuck.call("content_store", "write_upload", part=part, offset=1000, body=b"not what it should be")
    assert stuck.call("content_store", "finish_upload", part=part)
    stuck.close()
    assert Path(arrived.path, "train.bin").read_bytes() == noise(3 * MB)
    assert not parts(work)


def test_chunks_that_arrive_out_of_order_are_written_in_order(session, tmp_path, work):
    content = noise(2 * MB)
    digest = describe_data(write(tmp_path / "d", {"x": content})).files["x"].digest
    session.call("content_store", "find_missing_blobs", workdir=work, digests={digest: 2 * MB}, tree="x")
    part = session.call("content_store", "open_upload", workdir=work, digest=digest, size=2 * MB)["part"]
    late = threading.Thread(
        target=session.call,
        args=("content_store", "write_upload"),
        kwargs={"part": part, "offset": MB, "body": content[MB:]},
    )
    late.start()
    session.call("content_store", "write_upload", part=part, offset=0, body=content[:MB])
    late.join()
    assert session.call("content_store", "finish_upload", part=part)


@pytest.mark.parametrize("size", [100, 3 * MB])
def test_file_changed_during_send_is_an_error(session, tmp_path, work, size):
    root = write(tmp_path / "p", {"a": noise(size), "b": b"2"})
    tree = describe_project(root)
    (root / "a").write_bytes(noise(size, seed=1))
    with pytest.raises(HostError, match="/p/a changed while it was sent to here") as caught:
        send_to_host(session, work, tree)
    assert caught.value.check == "files.changed"
    assert not list(Path(work, "trees").glob("*"))
    assert Path(send_to_host(session, work, describe_project(root)).path, "a").read_bytes() == noise(size, seed=1)


def test_tree_changed_by_program_is_restored_without_resending(session, tmp_path, work):
    """Modes stop an ordinary user; root, who trains on rented machines, only the check."""
    root = write(tmp_path / "p", {"a.py": b"1", "sub/b.py": b"2"})
    path = Path(send_to_host(session, work, describe_project(root)).path)
    assert not os.stat(path / "a.py").st_mode & 0o222
    (path / "__pycache__").mkdir()  # as Python makes it: no harm
    assert send_to_host(session, work, describe_project(root)).path == str(path)
    assert (path / "__pycache__").exists()
    (path / "a.py").chmod(0o644)
    (path / "a.py").write_bytes(b"9")
    arrived = send_to_host(session, work, describe_project(root))
    assert (arrived.path, arrived.sent_bytes) == (str(path), 0)
    assert (path / "a.py").read_bytes() == b"1"


def test_data_changed_through_hard_link_is_sent_again(session, tmp_path, work):
    tree = describe_data(write(tmp_path / "d", {"train.bin": noise(2 * MB), "val.bin": b"1"}))
    path = Path(send_to_host(session, work, tree).path)
    assert (path / "train.bin").stat().st_nlink == 2
    (path / "train.bin").chmod(0o644)
    with (path / "train.bin").open("r+b") as file:
        file.write(b"xx")
    assert send_to_host(session, work, tree).sent_bytes == 2 * MB
    assert (path / "train.bin").read_bytes() == noise(2 * MB)


def test_incomplete_tree_is_completed(session, tmp_path, work):
    root = write(tmp_path / "p", {f"{number}.py": b"%d" % number for number in range(20)})
    path = Path(send_to_host(session, work, describe_project(root)).path)
    shutil.rmtree(path)
    assert send_to_host(session, work, describe_project(root)).sent_bytes == 0
    assert contents(path) == contents(root)


def test_full_disk_is_reported_before_sending(session, work):
    tree = FileTree({"train.bin": TreeFile(Path("nowhere"), "0" * 64, 10**15)})
    with pytest.raises(HostError, match=r"here: its disk is full: 2000\.0 TB to store") as caught:
        send_to_host(session, work, tree)
    assert (caught.value.check, caught.value.host) == ("disk.full", "here")


def test_path_outside_tree_is_refused(session, tmp_path, work):
    file = write(tmp_path, {"a": b"1"}) / "a"
    for name in ("../a", "/etc/a", "x/../../a", ""):
        with pytest.raises(HostError, match="not a path inside a folder"):
            send_to_host(session, work, describe_files({name: file}))
    assert not list(Path(work, "trees").iterdir())


def test_workdir_below_a_file_is_an_error_with_hint(session, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="Not a directory") as caught:
        send_to_host(session, str(tmp_path / "file/work"), describe_files({}))
    assert "workdir" in caught.value.hint


# -- Fetching --


class CountingSession:
    """A session that counts the fetched bytes, and loses its connection after `limit` of them."""

    def __init__(self, session: Session, limit: float = float("inf")) -> None:
        self.session, self.name, self.limit, self.fetched_bytes = session, session.name, limit, 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        content = self.session.call(*args, **kwargs)
        self.fetched_bytes += len(content)
        if self.fetched_bytes > self.limit:
            self.session._process.kill()
            self.session._process.wait()  # until then it may answer once more
        return content


def fetch(session: Any, there: Path, here: Path, names: list[str] | None = None) -> list[Path]:
    """Fetch files of a folder, or all of them."""
    if names is None:
        names = sorted(path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file())
    entries = list(content_store.hash_files(str(there), names))
    fetcher = FileFetcher(session, str(there), here, here.with_name(f".{here.name}.arriving"))
    return [fetcher.fetch(file) for file in fetcher.missing(entries)]


def test_only_missing_files_are_fetched(session, tmp_path):
    there, here = write(tmp_path / "there", {"model": noise(3 * MB), "sub/a": b"1", "log": b"2"}), tmp_path / "here"
    counting = CountingSession(session)
    assert fetch(counting, there, here) == [here / "log", here / "model", here / "sub/a"]
    assert (contents(here), counting.fetched_bytes) == (contents(there), 3 * MB + 2)
    (there / "log").write_bytes(b"more")
    (here / "sub/a").unlink()
    (there / "link").symlink_to("log")
    assert fetch(counting, there, here, ["gone", "link", "log", "model", "sub/a"]) == [here / "log", here / "sub/a"]
    assert ((here / "log").read_bytes(), counting.fetched_bytes) == (b"more", 3 * MB + 2 + 5)
    (here / "model").write_text("ordinary files: they can be written to")


def test_interrupted_fetch_resumes(session, tmp_path):
    there = write(tmp_path / "there", {"other": noise(2 * MB), "sub/model": noise(24 * MB), "z": b"{}"})
    here, lost = tmp_path / "here", open_session("here", HostConfig(address="local"))
    with pytest.raises(HostError, match="connection was lost"):
        fetch(CountingSession(lost, 9 * MB), there, here)
    lost.close()
    assert set(contents(here)) == {b"other"}
    [part] = (tmp_path / ".here.arriving").iterdir()
    arrived_bytes = part.stat().st_size
    assert 0 < arrived_bytes <= 9 * MB
    counting = CountingSession(session)
    fetch(counting, there, here)
    assert contents(here) == contents(there)
    assert counting.fetched_bytes == 24 * MB + 2 - arrived_bytes
    assert not list((tmp_path / ".here.arriving").iterdir())


@pytest.mark.parametrize("left", [noise(2 * MB, seed=1), noise(3 * MB) + b"and more", noise(4 * MB, seed=1)])
def test_damaged_part_of_fetch_is_discarded(session, tmp_path, left):
    there, here = write(tmp_path / "there", {"model": noise(3 * MB)}), tmp_path / "here"
    [entry] = content_store.hash_files(str(there), ["model"])
    write(tmp_path / ".here.arriving", {entry["digest"]: left})
    fetch(session, there, here)
    assert contents(here) == contents(there)


@pytest.mark.parametrize("content", [b"", b"shorter", noise(3 * MB, seed=1)])
def test_file_changed_during_fetch_gets_no_name(session, tmp_path, content):
    there, here = write(tmp_path / "there", {"model": noise(3 * MB)}), tmp_path / "here"
    write(here, {"model": b"the copy of an earlier one"})
    fetcher = FileFetcher(session, str(there), here, tmp_path / "parts")
    [file] = fetcher.missing(list(content_store.hash_files(str(there), ["model"])))
    (there / "model").write_bytes(content)
    with pytest.raises(HostError, match="there/model changed while it was fetched") as caught:
        fetcher.fetch(file)
    assert caught.value.check == "files.changed"
    assert (here / "model").read_bytes() == b"the copy of an earlier one"
    (there / "model").unlink()
    with pytest.raises(HostError, match="there/model: no such file there") as caught:
        fetcher.fetch(file)
    assert caught.value.check == "files.gone"


# -- What is in a project --


def git(root: Path, *args: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(root), *who, *args], check=True, capture_output=True)


def test_git_decides_which_files_are_code(tmp_path):
    root = write(
        tmp_path / "p",
        {
            "train.py": b"", "new module.py": b"", "gone.py": b"", ".hidden": b"", ".env": b"secret", "data/x.bin": b"",
            "runs/1/log": b"", "venv/pyvenv.cfg": b"", "venv/lib/x.py": b"", "__pycache__/x.pyc": b"",
            "sub/ö\n.py": b"",
        },
    )  # fmt: skip
    write(root, {".gitignore": b"/data/\n"})
    git(root, "init")
    git(root, "add", "train.py", "gone.py", ".hidden", ".gitignore")
    (root / "gone.py").unlink()
    assert set(describe_project(root).files) == {"train.py", "new module.py", ".hidden", ".gitignore", "sub/ö\n.py"}
    assert set(describe_project(root / "sub").files) == {"ö\n.py"}
    assert set(describe_project(root / "data").files) == {"x.bin"}  # ignored as a whole, and yet asked for
    write(root, {"library/mine.py": b"", "library/.gitignore": b"*.log", "library/x.log": b""})
    git(root / "library", "init")
    git(root / "library", "add", "mine.py")
    assert {"library/mine.py", "library/.gitignore"} & set(describe_project(root).files) == {"library/mine.py"}


def test_without_git_generated_folders_are_excluded(tmp_path):
    names = ["train.py", "a b/c.py", ".git2/x", "a b/.hidden", "runs/x", "a b/runs/x", "v/pyvenv.cfg", "v/bin/python"]
    root = write(tmp_path / "p", dict.fromkeys(names, b""))
    os.mkfifo(root / "pipe")
    assert set(describe_project(root).files) == {"train.py", "a b/c.py", "a b/runs/x"}


def test_links_inside_project_are_kept(tmp_path, session, work):
    root = write(tmp_path / "p", {"a/x.py": b"1", "b/y.py": b"2"})
    (root / "b/up").symlink_to("../a/x.py")
    (root / "folder").symlink_to("a")
    (root / "absolute").symlink_to(root / "a/x.py")
    (root / "b/around").symlink_to("../../p/a/x.py")
    (root / "nothing").symlink_to("missing")
    tree = describe_project(root)
    assert tree.links == {
        "b/up": "../a/x.py", "folder": "a", "absolute": "a/x.py", "b/around": "../a/x.py", "nothing": "missing",
    }  # fmt: skip
    path = Path(send_to_host(session, work, tree).path)
    for name in ("b/up", "absolute", "b/around", "folder/x.py"):
        assert (path / name).read_bytes() == b"1"


@pytest.mark.parametrize("to", ["/etc/passwd", "../outside", "..", "/nowhere"])
def test_link_out_of_project_is_refused(tmp_path, to):
    root = write(tmp_path / "p", {"a": b"1"})
    (root / "out").symlink_to(to)
    with pytest.raises(UsageError, match=r"/p/out is a link that leads out of the project") as caught:
        describe_project(root)
    assert "--data" in caught.value.hint


def test_data_behind_link_is_sent(tmp_path):
    write(tmp_path, {"disk/train.bin": b"12", "data/val.bin": b"3"})
    (tmp_path / "data/train.bin").symlink_to("../disk/train.bin")
    tree = describe_data(tmp_path / "data")
    assert (tree.links, tree.files["train.bin"].size) == ({}, 2)
    (tmp_path / "data/more").symlink_to("../disk")
    with pytest.raises(UsageError, match="/data/more is a link to what is not a file"):
        describe_data(tmp_path / "data")


def test_oversized_code_is_refused_by_name(tmp_path):
    root = write(
        tmp_path / "p", {"x.py": b"1" * 10, "ckpt/1.pt": b"1" * 3000, "ckpt/2.pt": b"1" * 1000, "m": b"1" * 50}
    )
    with pytest.raises(
        UsageError, match=r"holds 4\.1 kB of code, more than 2\.0 kB: ckpt/ 4\.0 kB, m 50 B, x\.py 10 B"
    ):
        describe_project(root, max_bytes=2000)
    with pytest.raises(UsageError, match="no such folder"):
        describe_project(tmp_path / "q")


def test_a_large_file_is_hashed_once(tmp_path, monkeypatch):
    root = write(tmp_path / "d", {"train.bin": noise(2 * MB)})
    monkeypatch.setattr(tree_module, "MTIME_SETTLE_S", -1.0)
    first = describe_data(root)
    monkeypatch.setattr(tree_module.hashlib, "file_digest", None)
    assert describe_data(root) == first
    with (root / "train.bin").open("r+b") as file:
        file.write(b"xx")
    with pytest.raises(TypeError):  # it would be hashed
        describe_data(root)


def test_hash_of_just_written_file_is_not_cached(tmp_path):
    root = write(tmp_path / "d", {"train.bin": noise(2 * MB)})
    describe_data(root)
    assert not (tmp_path / "cache/evener/digests.json").exists()


def test_chunk_size_is_one_mebibyte():
    assert CHUNK_BYTES == MB


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "a", "digest": "/etc/passwd", "size": 1, "executable": False},
        {"path": "../a", "digest": "0" * 64, "size": 1, "executable": False},
        {"path": "a", "digest": "0" * 64, "size": -1, "executable": False},
        {"path": "link/a", "digest": "0" * 64, "size": 1, "executable": False},
        {"path": "a", "digest": "0" * 64 + "\n", "size": 1, "executable": False},
        {"path": "", "digest": "0" * 64, "size": 1, "executable": False},
        {"path": "a", "to": "b"},
        {"path": "a"},
        "a",
    ],
)
def test_host_file_listing_cannot_escape_folder(session, tmp_path, entry):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/link").symlink_to(tmp_path)
    with pytest.raises(HostError, match="it sent an invalid file entry") as caught:
        FileFetcher(session, str(tmp_path), tmp_path / "here", tmp_path / "parts").missing([entry])
    assert caught.value.check == "files.odd"
