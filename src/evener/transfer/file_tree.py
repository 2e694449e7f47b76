"""Describe a project or a data folder by path and content hash, for `transfer/file_transfer.py` to send.

In a git repository the project's code is what git tracks, and new files that are not ignored; otherwise every file.
Untracked hidden files, virtual environments, `__pycache__` and a top-level `runs/` are excluded. Files that may hold
secrets (transfer/secret_files.py) are withheld, even if git tracks them, unless the user names them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.file_io import file_digest, write_atomic
from evener.core.base.units import format_bytes
from evener.transfer.secret_files import SECRET_FOLDERS, has_secret_name, is_secret_file

MAX_CODE_BYTES = 512_000_000
MIN_CACHED_BYTES = 1 << 20
MTIME_SETTLE_S = 2.0  # a file hashed sooner after a change may change again with the same time stamp


class TreeFile(msgspec.Struct, frozen=True):
    """A file of a tree."""

    source: Path
    digest: str  # blake2b of its content
    size: int
    is_executable: bool = False


class FileTree(msgspec.Struct, frozen=True):
    """Files and links by their path in the tree, as "a/b"; bytes that are not UTF-8 are surrogates."""

    files: dict[str, TreeFile]
    links: dict[str, str] = {}
    is_hard_linked: bool = False  # hard links to the blobs: data, which is only read
    withheld: list[str] = []  # paths of files that are not in it: they may hold secrets, or are hidden data

    @property
    def digest(self) -> str:
        """Return the hash that names the tree on every host."""
        return hashlib.blake2b(self.canonical_json, digest_size=16).hexdigest()

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def canonical_json(self) -> bytes:
        """Return the canonical JSON that hosts receive and the digest is computed from."""
        files = [[path, file.digest, file.size, file.is_executable] for path, file in sorted(self.files.items())]
        return json.dumps({"files": files, "links": sorted(self.links.items())}).encode()


def describe_project(
    folder: str | os.PathLike[str], include: Sequence[str] = (), *, max_bytes: int = MAX_CODE_BYTES
) -> FileTree:
    """Return the tree of a project's code and of the further files and folders that `include` names.

    A link inside the project is kept. A file that may hold a secret is withheld, unless `include` names it or one of
    the folders for secrets. UsageError for a link that leads out, or more than `max_bytes` of code.
    """
    root = _existing_folder(folder)
    git_files = _git_files(root)
    named: set[str] = set()
    deliberate: set[str] = set()  # secrets that the user names
    for given in include:
        files = _included_files(root, given)
        named.update(files)
        if (root / given).is_file() or has_secret_name(f"{given.rstrip('/')}/"):
            deliberate.update(files)
    found = {*(git_files if git_files else _visible_files(root)), *named}
    withheld = {name for name in found - deliberate if is_secret_file(name, root / name)}
    names = sorted(found - withheld)
    withheld |= {name for name in _unsent_secrets(root, has_git=bool(git_files)) if name not in named}
    sizes: dict[str, int] = {}
    links: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # tracked but removed
            state = (root / name).lstat()
            if stat.S_ISLNK(state.st_mode):
                links[name] = _link_target(root, name)
            elif stat.S_ISREG(state.st_mode):
                sizes[name] = state.st_size
    code = {name: num_bytes for name, num_bytes in sizes.items() if name not in named}
    if sum(code.values()) > max_bytes:
        raise UsageError(
            f"{root} holds {format_bytes(sum(code.values()))} of code, more than {format_bytes(max_bytes)}: "
            f"{summarize_largest(code)}",
            hint="list in .gitignore what the program does not need; --data sends a corpus",
        )
    hashed = _hash_files({name: root / name for name in sizes}, keep_executable=True)
    return FileTree(hashed, links, withheld=sorted(withheld))


def ignored_file_sizes(folder: str | os.PathLike[str], tree: FileTree) -> dict[str, int]:
    """Return the sizes, in bytes, of the files that are not in a project's tree because git ignores them."""
    root = _existing_folder(folder)
    if not _git_files(root):
        return {}
    names = _git_list(root, "--others", "--ignored", "--exclude-standard")
    return {name: (root / name).stat().st_size for name in names
            if not _is_excluded(root, name) and name not in tree.files and name not in tree.withheld
            and (root / name).is_file()}  # fmt: skip


def describe_data(folder: str | os.PathLike[str]) -> FileTree:
    """Return the tree of a data folder of any size; a link's content is sent. Withheld: hidden files and secrets."""
    root = _existing_folder(folder)
    files = {name: root / name for name in sorted(_visible_files(root))}
    if not_files := [path for path in files.values() if not path.is_file()]:
        raise UsageError(f"{not_files[0]} is a link to what is not a file", hint="replace it by its content")
    withheld = [name for name, path in files.items() if is_secret_file(name, path)]
    sent = {name: path for name, path in files.items() if name not in withheld}
    return msgspec.structs.replace(describe_files(sent), withheld=sorted([*withheld, *_hidden_entries(root)]))


def describe_files(files: dict[str, Path]) -> FileTree:
    """Return a tree of files from anywhere, by their name in the tree, such as wheels."""
    return FileTree(_hash_files(files, keep_executable=False), is_hard_linked=True)


def _existing_folder(folder: str | os.PathLike[str]) -> Path:
    root = Path(folder).expanduser().absolute()
    if not root.is_dir():
        raise UsageError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}")
    return root


def _included_files(root: Path, path: str) -> list[str]:
    """Return the paths in the tree of a file of the project, or of the files in a folder of it."""
    full = (root / path).resolve()
    if not full.exists() or not full.is_relative_to(root.resolve()):
        raise UsageError(f"--include {path}: {'not in' if full.exists() else 'no such file or folder in'} {root}")
    name = full.relative_to(root.resolve()).as_posix()
    if full.is_file():
        return [name]
    return [below if name == "." else f"{name}/{below}" for below in _visible_files(full)]


def _unsent_secrets(root: Path, *, has_git: bool) -> list[str]:
    """Return the files that may hold secrets, by their names, among those that are hidden or that git ignores."""
    if has_git:
        names = [name for which in ((), ("--ignored",)) for name in
                 _git_list(root, "--others", *which, "--exclude-standard")]  # fmt: skip
    else:
        names = _files_below(root)
    return [name for name in names
            if has_secret_name(name) and not _is_generated(root, name) and (root / name).is_file()]  # fmt: skip


def _git_files(root: Path) -> list[str]:
    """Return the project's files according to git; empty without git, or if it ignores the whole folder."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)) or shutil.which("git") is None:
        return []
    tracked = _git_list(root, "--cached")
    new = [name for name in _git_list(root, "--others", "--exclude-standard") if not _is_excluded(root, name)]
    files = []
    for name in dict.fromkeys(tracked + new):
        if (root / name).is_dir() and not (root / name).is_symlink():  # a nested repository: a submodule
            inside = root / name
            files += [f"{name.rstrip('/')}/{below}" for below in _git_files(inside) or _visible_files(inside)]
        else:
            files.append(name)
    return files


def _git_list(root: Path, *which: str) -> list[str]:
    argv = ["git", "-C", str(root), "ls-files", "-z", *which]
    result = subprocess.run(argv, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if result.returncode:
        stderr_lines = result.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        hint = next((line.strip() for line in stderr_lines if line.strip().startswith("git config")), "run: git status")
        raise UsageError(f"{root}: git does not list its files: {stderr_lines[0]}", hint=hint)
    return [os.fsdecode(name) for name in result.stdout.split(b"\0") if name]


def _visible_files(root: Path) -> list[str]:
    """Return every file and link below `root` that is not excluded; do not follow links."""
    return [name for name in _files_below(root) if not _is_hidden(name)]


def _files_below(root: Path) -> list[str]:
    """Return every file and link below `root`, hidden ones too, that was not generated; do not follow links."""
    found = []
    for folder, folders, names in os.walk(root):
        inside = os.path.relpath(folder, root)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        paths = {name: name if inside == "." else f"{inside}/{name}" for name in (*names, *folders)}
        found += [paths[name] for name in (*names, *links) if not _is_generated(root, paths[name])]
        folders[:] = [name for name in folders if name not in links and not _is_generated(root, f"{paths[name]}/")]
    return [name for name in found if (root / name).is_symlink() or (root / name).is_file()]


def _hidden_entries(root: Path) -> list[str]:
    """Return every hidden file below `root`, and every hidden folder as a whole."""
    hidden = []
    for folder, folders, names in os.walk(root):
        inside = os.path.relpath(folder, root)
        entries = [*names, *(f"{name}/" for name in folders)]
        hidden += [os.path.normpath(f"{inside}/{name}") + "/" * name.endswith("/")
                   for name in entries if name.startswith(".")]  # fmt: skip
        folders[:] = [name for name in folders if not name.startswith(".")]
    return hidden


def _is_excluded(root: Path, name: str) -> bool:
    """Return whether a path is hidden, compiled, in a virtual environment or in `runs/`."""
    return _is_hidden(name) or _is_generated(root, name)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.rstrip("/").split("/"))


def _is_generated(root: Path, name: str) -> bool:
    """Return whether a path is compiled, in a virtual environment, in `runs/` or in a hidden folder of a program."""
    folders = name.split("/")[:-1]
    return (
        "__pycache__" in folders
        or name.startswith("runs/")
        or any(folder.startswith(".") and folder not in SECRET_FOLDERS for folder in folders)
        or any((root / "/".join(folders[: depth + 1]) / "pyvenv.cfg").exists() for depth in range(len(folders)))
    )


def _link_target(root: Path, name: str) -> str:
    """Return the target of a link inside the project, as it is stored in the tree."""
    link = root / name
    target = os.readlink(link)
    real_root, real = os.path.realpath(root), os.path.realpath(link)
    if real != real_root and not real.startswith(real_root + os.sep):
        raise UsageError(
            f"{link} is a link that leads out of the project, to {target}",
            hint="replace it by its content, or list it in .gitignore; --data sends a corpus",
        )
    lexical = os.path.normpath(os.path.join(os.path.dirname(name), target))
    if os.path.isabs(target) or lexical.split("/")[0] == "..":
        return os.path.relpath(real, os.path.realpath(link.parent))
    return target


def summarize_largest(sizes: Mapping[str, int], num: int = 3) -> str:
    """Summarize the largest files by top-level entry: `checkpoints/ 2.1 GB, model.bin 503.3 MB`."""
    by_top: dict[str, int] = {}
    for name, num_bytes in sizes.items():
        top, slash, _ = name.partition("/")
        by_top[top + slash] = by_top.get(top + slash, 0) + num_bytes
    largest = sorted(by_top.items(), key=lambda entry: -entry[1])[:num]
    entries = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in largest]
    return ", ".join(entries + ([f"and {len(by_top) - num} more"] if len(by_top) > num else []))


def _hash_files(files: Mapping[str, Path], *, keep_executable: bool) -> dict[str, TreeFile]:
    hashed = {}
    with DigestCache() as digests:
        for name, path in files.items():
            try:
                state, digest = path.stat(), digests.digest_file(path)
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}", hint="fix it, or list it in .gitignore") from None
            is_executable = keep_executable and bool(state.st_mode & stat.S_IXUSR)
            hashed[name] = TreeFile(path, digest, state.st_size, is_executable)
    return hashed


class DigestCache:
    """Caches hashes of large files, by path, size, times and inode, so that a launch does not read the whole corpus."""

    def __enter__(self) -> DigestCache:
        try:
            self._digests: dict[str, list[Any]] = json.loads(self._path().read_bytes())
        except (OSError, ValueError):
            self._digests = {}
        self._is_dirty = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_dirty:
            with contextlib.suppress(OSError):
                write_atomic(self._path(), json.dumps(self._digests).encode())

    def digest_file(self, path: Path) -> str:
        """Return the blake2b of the content, as hex."""
        state = path.stat()
        key = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        name = os.path.realpath(path)
        cached = self._digests.get(name)
        if cached is not None and cached[:-1] == key:
            return str(cached[-1])
        now = time.time()
        digest = file_digest(path)
        if state.st_size >= MIN_CACHED_BYTES and now - state.st_ctime > MTIME_SETTLE_S:
            self._digests[name] = [*key, digest]
            self._is_dirty = True
        return digest

    @classmethod
    def invalidate(cls, path: Path) -> None:
        """Remove a file's entry, as its content no longer matches."""
        with cls() as cache:
            cache._is_dirty = cache._digests.pop(os.path.realpath(path), None) is not None

    @staticmethod
    def _path() -> Path:
        return cache_folder() / "digests.json"


def cache_folder() -> Path:
    """Return the folder for files on this machine that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evener"
