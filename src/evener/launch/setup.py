"""Install the same evener and torch on every host: inspect, compare, and change only what differs.

The interpreter of a host's ranks is, in this order:

    [hosts.X] python = "…"    the user's: changed only if it is a virtual environment
    WORKDIR/venv              evener's own: created if missing, with an installed python 3.11 or newer
    on this machine           the environment that runs this program, as long as there is no WORKDIR/venv

Packages come from the registry of the host's own pip, or, if that reaches none, as wheels sent from here by content
hash (`launch/file_transfer.py`). Hosts without a GPU get PyTorch's CPU build if its index can be reached. An
interrupted setup leaves a mark in the environment, and the next one completes it.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.core.errors import EvenerError, HostError
from evener.core.fleet import Fleet, Host
from evener.core.units import size
from evener.hosts.session import RemoteError, Session, Sessions, for_each
from evener.launch.ship import send_to
from evener.launch.tree import pack
from evener.launch.wheels import (
    CPU_INDEX,
    Target,
    closure,
    content_hash,
    evener_wheel,
    fetch_wheels,
    lacking,
    pinned,
    resolve_wheels,
)

CPU_BYTES = 1_300_000_000  # measured (2026-11): a venv with evener, torch 2.13.0+cpu and their dependencies, 1.1 GB
CUDA_BYTES = 9_000_000_000  # assumption
SILENT_S = 60.0  # a busy host sends a line at least every 5 s
# Measured (2026-11, 2 cores): 20 s instead of 54 s, as pip compiles all of torch; the import that ends a setup compiles
# what a worker imports.
QUICK = ("--no-compile", "--progress-bar=off")
SMALL_PACKAGE = "msgspec"  # small, and on every registry that has evener's dependencies

OTHER_VERSIONS = "{} conflicts with the versions that evener needs on all hosts: try other versions"

Tell = Callable[[str, str, bool], None]  # host, message, whether a new step begins


class HostSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the setup of one host."""

    host: str
    python: str  # the interpreter of the ranks
    actions: list[str]  # what changed; empty if nothing had to
    torch: str
    evener: str
    evener_hash: str
    packages: int  # number installed by this setup, without evener
    source: Literal["registry", "carried", "none"]
    sent_bytes: int
    took_s: float

    @property
    def line(self) -> str:
        """Return a one-line summary for the user."""
        if self.actions:
            return f"{self.host}: {', '.join(self.actions)}"
        return f"{self.host}: nothing to do: torch {self.torch}, evener {self.evener} ({self.evener_hash[:8]})"


class Ours(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel of the evener that runs here."""

    wheel: Path
    version: str
    hash: str


def set_up(fleet: Fleet, sessions: Sessions, tell: Tell, more: Sequence[str] = (), *,
           carry: bool = False) -> dict[str, HostSetup | EvenerError]:  # fmt: skip
    """Set up all hosts concurrently; return each one's result or error, as a failure on one does not stop the others.

    `extra_packages` are pip requirements besides evener's own. With `sends_wheels`, all wheels are sent from here.
    """
    with tempfile.TemporaryDirectory(prefix="evener-setup-") as folder:
        wheel = evener_wheel(Path(folder))
        ours = Ours(wheel=wheel, version=wheel.name.split("-")[1], hash=content_hash(wheel))

        def set_up_one(name: str) -> HostSetup | EvenerError:
            try:
                return _Setup(sessions[name], fleet.hosts[name], ours, tell, more, carry).run()
            except RemoteError as error:
                return _told(name, error)
            except EvenerError as error:
                return error

        return for_each(sessions, set_up_one)


class _Setup:
    """The setup of one host."""

    def __init__(self, session: Session, host: Host, ours: Ours, tell: Tell, more: Sequence[str], carry: bool) -> None:
        self._session, self._host, self._ours, self._more, self._carry = session, host, ours, more, carry
        self._name, self._tell = session.name, tell
        self._actions: list[str] = []
        self._packages, self._sent_bytes = 0, 0
        self._source: Literal["registry", "carried", "none"] = "none"

    def run(self) -> HostSetup:
        began = time.monotonic()
        self._step("looking")
        state = self._look()
        if self._todo(state) is not None:
            state = self._change(state)
        if self._more:
            state = self._add(state)
        now = state["now"]
        return HostSetup(
            host=self._name, python=state["python"], actions=self._actions, torch=now["packages"]["torch"],
            evener=now["packages"]["evener"], evener_hash=now["evener_hash"], packages=self._packages,
            source=self._source, sent_bytes=self._sent_bytes, took_s=time.monotonic() - began,
        )  # fmt: skip

    def _change(self, state: dict[str, Any]) -> dict[str, Any]:
        self._check_may_change(state)
        if lock_holder := self._call("begin", workdir=self._host.workdir):
            raise self._error("setup.busy", f"another setup is running there: {lock_holder}", "wait until it is done")
        try:
            state = self._look()  # another setup may have just done it
            if state["now"] is None or not state["now"]["is_venv"]:
                state = self._make_venv(state)
            prefix, python = state["now"]["prefix"], state["python"]
            todo = self._todo(state)
            if todo is None:
                return state
            self._call("mark", prefix=prefix, what="packages" if todo else "evener")
            if todo:
                self._install(state, todo)
            if state["now"]["evener_hash"] != self._ours.hash or "evener" not in state["now"]["packages"]:
                self._install_evener(python)
            return self._checked(prefix, imports=bool(todo))
        finally:
            self._let_go()

    def _add(self, state: dict[str, Any]) -> dict[str, Any]:
        """Install the extra packages without changing any of evener's own dependencies."""
        python, before = state["python"], state["now"]["packages"]
        if not state["now"]["is_venv"]:
            fix = f"on {self._name}: {python} -m pip install {shlex.join(self._more)}"
            raise self._error("setup.python", f"{python} is not a virtual environment: setup does not change it", fix)
        if "pip" not in before:
            fix = f"uv pip install --python {python} {shlex.join(self._more)}"
            raise self._error("setup.pip", f"{python} has no pip to install it", fix)
        if lock_holder := self._call("begin", workdir=self._host.workdir):
            raise self._error("setup.busy", f"another setup is running there: {lock_holder}", "wait until it is done")
        index = ["--extra-index-url", CPU_INDEX] if before.get("torch", "").endswith("+cpu") else []
        try:
            pins = pinned({name: before[name] for name in self._wanted(state) if name in before})
            if self._carry or not self._reaches_registry(python):
                self._source = "carried"
                target = Target.of(state["now"], wants_cuda=self._wants_cuda(state))
                with self._sent(self._wheels_of(target, pins, before, index)) as folder:
                    self._install_more(state, ["--no-index", f"--find-links={folder}"], pins)
            else:
                has_index = index and self._call("opens", url=f"{CPU_INDEX}/torch/")
                self._source = "registry"
                self._install_more(state, ["--prefer-binary", *(index if has_index else [])], pins)
            self._run("import", "try_import", python=python)
            state = self._look()
        finally:
            self._let_go()
        after = state["now"]["packages"]
        if changed := [name for name, version in after.items() if before.get(name) != version]:
            self._packages += len(changed)
            self._actions.append(self._told_packages(before, after, changed))
        return state

    def _install_more(self, state: dict[str, Any], arguments: list[str], pins: list[str]) -> None:
        self._step(f"installing {', '.join(self._more)}")
        self._pip(state["python"], ["install", *QUICK, *arguments, *self._more, *pins], state["now"]["half"])

    @contextlib.contextmanager
    def _sent(self, wheels: dict[str, Path]) -> Iterator[str]:
        """Send wheels to the host; yield their folder there, which is removed afterwards."""
        tree = pack(wheels)
        self._step(f"sending {len(wheels)} wheels, {size(tree.size)}")
        arrived = send_to(self._session, self._host.workdir, tree, self._sending)
        self._sent_bytes += arrived.sent_bytes
        yield arrived.path
        self._session.call("files", "discard", workdir=self._host.workdir, tree=tree.digest)

    def _wheels_of(self, target: Target, pins: list[str], present: dict[str, str], index: list[str]) -> dict[str, Path]:
        try:
            return resolve_wheels(target, self._more, pins, present, index, self._step)
        except EvenerError as error:
            raise self._error("setup.registry", str(error), error.hint, error.output) from error

    def _checked(self, prefix: str, *, imports: bool) -> dict[str, Any]:
        """Check that the required packages are installed and work. HostError otherwise."""
        self._step("checking")
        state = self._look()
        missing = lacking(self._wanted(state), state["now"]["packages"])
        if missing or state["now"]["evener_hash"] != self._ours.hash:
            what = ", ".join(pinned(missing)) or "this evener"
            fix = f"on {self._name}, look: {state['python']} -m pip check"
            raise self._error("setup.pip", f"pip succeeded, but {what} is not installed", fix)
        if imports:
            works = self._run("import", "try_import", python=state["python"])
            if self._wants_cuda(state) and not works["cuda"]:
                raise self._error(
                    "setup.cuda",
                    f"torch {works['torch']} cannot use the GPU there",
                    "install a newer driver, or a torch for its CUDA version, which nvidia-smi shows",
                )
        self._call("end", prefix=prefix)
        return state

    def _todo(self, state: dict[str, Any]) -> dict[str, str] | None:
        """Return the packages to install: empty if only evener is, None if nothing is."""
        if state["now"] is None:
            return {}
        wanted = self._wanted(state)
        todo = lacking(wanted, state["now"]["packages"])
        if state["unfinished"] == "packages":
            todo = wanted
        if self._wants_cuda(state) and state["now"]["torch_cuda"] is None:
            todo["torch"] = wanted["torch"]
        is_ours = state["now"]["evener_hash"] == self._ours.hash and "evener" in state["now"]["packages"]
        return None if is_ours and not todo and not state["unfinished"] else todo

    def _wanted(self, state: dict[str, Any]) -> dict[str, str]:
        return closure(self._ours.wheel, Target.of(state["now"], wants_cuda=self._wants_cuda(state)))

    def _wants_cuda(self, state: dict[str, Any]) -> bool:
        return bool(state["has_gpu"]) and self._host.devices != "cpu"

    def _check_may_change(self, state: dict[str, Any]) -> None:
        now = state["now"]
        if now is None and not state["is_own"]:
            fix = f'name another: [hosts.{self._name}] python = "…"'
            raise self._error("version.python", f"{state['python']} does not start there", fix)
        if now is not None:
            lacks = self._lacks(state)
            if tuple(int(part) for part in now["markers"]["python_version"].split(".")) < (3, 11):
                version = now["markers"]["python_full_version"]
                raise self._error("version.python", f"{state['python']} is python {version}", "3.11 or newer is needed")
            if now["editable"] is not None and now["evener_hash"] != self._ours.hash:
                raise self._error(
                    "setup.evener",
                    f"evener there is a source tree with other code than here: {now['editable'].removeprefix('file://')}",
                    f"update it to the same code, or remove [hosts.{self._name}] python",
                )
            if now["is_venv"] and "pip" not in now["packages"]:
                fix = f"uv pip install --python {state['python']} pip"
                raise self._error("setup.pip", f"{state['python']} lacks {lacks}, and has no pip to install it", fix)
        needed = CUDA_BYTES if self._wants_cuda(state) else CPU_BYTES
        has_torch = now is not None and "torch" in now["packages"]
        if state["free_bytes"] < needed and not has_torch:
            raise self._error(
                "disk.full",
                f"{self._host.workdir} has {size(state['free_bytes'])} free; a venv with torch takes {size(needed)}",
                f'make room there, or name another disk: [hosts.{self._name}] workdir = "…"',
            )

    def _lacks(self, state: dict[str, Any]) -> str:
        todo = dict(self._todo(state) or {})
        parts = [f"torch {todo.pop('torch')}"] if "torch" in todo else []
        parts += pinned(todo) if len(todo) <= 3 else [f"{len(todo)} packages"]
        return " and ".join(parts) or "this evener"

    def _make_venv(self, state: dict[str, Any]) -> dict[str, Any]:
        base = state["base"]
        if base["python"] is None and "lacks_venv" in base:
            version = ".".join(base["version"].split(".")[:2])
            raise self._error(
                "setup.venv",
                f"{base['lacks_venv']} cannot make a virtual environment: ensurepip is missing",
                f"on {self._name}, run: sudo apt install python{version}-venv",
            )
        if base["python"] is None:
            raise self._error(
                "version.python",
                f"no python 3.11 or newer is installed: {', '.join(base['seen']) or 'none at all'}",
                f"on {self._name}, install one (sudo apt install python3.11-venv, or: uv python install 3.12), "
                f'or name it: [hosts.{self._name}] python = "…"',
            )
        self._step(f"creating a venv with python {base['version']}")
        self._run("venv", "make_venv", workdir=self._host.workdir, base=base["python"], named=self._host.python)
        self._actions.append(f"venv created with python {base['version']}")
        new_state = self._look()
        if new_state["now"] is None or not new_state["now"]["is_venv"]:
            raise self._error("setup.venv", f"the venv created by {base['python']} does not start", "")
        return new_state

    def _install(self, state: dict[str, Any], todo: dict[str, str]) -> None:
        python, now = state["python"], state["now"]
        target = Target.of(now, wants_cuda=self._wants_cuda(state))
        if target.wants_cuda and now["torch_cuda"] is None and "torch" in now["packages"]:
            self._pip(python, ["uninstall", "--yes", "torch"], now["half"])  # to pip, its two builds are equal
        before = now["packages"]
        if self._carry or not self._reaches_registry(python):
            self._source = "carried"
            wheels = self._wheels(target, todo, self._wanted(state))
            with self._sent(wheels) as folder:
                self._step(f"installing {len(wheels)} packages")
                paths = [f"{folder}/{name}" for name in wheels]
                self._pip(python, ["install", *QUICK, "--no-index", "--no-deps", *paths], now["half"])
        else:
            self._source = "registry"
            wants_cpu = target.is_linux and not target.wants_cuda and "torch" in todo
            has_cpu = wants_cpu and self._call("opens", url=f"{CPU_INDEX}/torch/")
            index = ["--extra-index-url", CPU_INDEX] if has_cpu else []
            self._step(f"installing {len(todo)} packages from the registry")
            self._pip(python, ["install", *QUICK, "--prefer-binary", *index, *pinned(todo)], now["half"])
        after = self._look()["now"]["packages"]
        changed = [name for name, version in after.items() if before.get(name) != version and name != "evener"]
        self._packages = len(changed)
        self._actions.append(self._told_packages(before, after, changed))

    def _wheels(self, target: Target, todo: dict[str, str], wanted: dict[str, str]) -> dict[str, Path]:
        try:
            return fetch_wheels(target, todo, wanted, self._step)
        except EvenerError as error:
            prefix = "" if self._carry else "it reaches no registry; "
            raise self._error("setup.registry", f"{prefix}{error}", error.hint, error.output) from error

    def _told_packages(self, before: dict[str, str], after: dict[str, str], changed: list[str]) -> str:
        num_others = len(changed) - ("torch" in changed)
        parts = [f"torch {after['torch']}"] * ("torch" in changed)
        if num_others:
            names = ", ".join(sorted(name for name in changed if name != "torch")) if num_others <= 3 else ""
            parts.append(f"{names or num_others}{'' if names else ' packages'}")
        sent = size(self._sent_bytes) if self._sent_bytes else "earlier"
        source = "the registry" if self._source == "registry" else f"wheels sent from here ({sent})"
        return f"{' and '.join(parts) or 'nothing'} installed from {source}"

    def _install_evener(self, python: str) -> None:
        self._step("installing evener")
        tree = pack({self._ours.wheel.name: self._ours.wheel})
        arrived = send_to(self._session, self._host.workdir, tree)
        self._sent_bytes += arrived.sent_bytes
        wheel = f"{arrived.path}/{self._ours.wheel.name}"
        self._pip(python, ["install", *QUICK, "--no-index", "--no-deps", "--force-reinstall", wheel], [])
        self._session.call("files", "discard", workdir=self._host.workdir, tree=tree.digest)
        self._actions.append(f"evener {self._ours.version} ({self._ours.hash[:8]}) installed")

    def _reaches_registry(self, python: str) -> bool:
        """Return whether the host's pip reaches a registry, as configured there (mirror, proxy, folder)."""
        self._step("checking for a package registry")
        arguments = ["--retries=0", "--timeout=5", "index", "versions", SMALL_PACKAGE]
        items = self._session.stream("setup", "pip", python=python, arguments=arguments, timeout_s=SILENT_S)
        return next((item["status"] for item in items if "status" in item), 1) == 0

    def _pip(self, python: str, arguments: list[str], half: list[str]) -> None:
        self._run("pip", "pip", python=python, arguments=arguments, forget=half)

    def _run(self, what: str, function: str, **args: Any) -> Any:
        """Run a program on the host to its end and return its result, if any. HostError with its output if it fails."""
        lines: list[str] = []
        status, value = None, None
        for item in self._session.stream("setup", function, timeout_s=SILENT_S, **args):
            if "line" in item:
                lines = [*lines, item["line"]][-40:]
                self._tell(self._name, item["line"].strip(), False)
            elif "alive" in item:
                self._tell(self._name, f"{what}: {item['alive']} s", False)
            status, value = item.get("status", status), item.get("works", value)
        if status != 0:
            raise self._failed(what, status, lines)
        return value

    def _failed(self, what: str, status: int | None, lines: list[str]) -> HostError:
        text = "\n".join(lines)
        if any(sign in text for sign in ("No space left on device", "Errno 28", "Errno 122")):
            fix = "make room there and run it again"
            return self._error("disk.full", f"its disk is full: {self._host.workdir}", fix, text)
        errors = [line for line in lines if line.startswith(("ERROR:", "Error:"))] or lines[-1:] or ["no output"]
        hint = {
            "venv": f"on {self._name}, run: sudo apt install python3-venv",
            "import": f"the lines above name what is missing on {self._name}",
            "pip": OTHER_VERSIONS.format(", ".join(self._more)) if "ResolutionImpossible" in text else None,
        }.get(what) or "run it again: completed steps are kept; --carry sends wheels from here"
        check = {"venv": "setup.venv", "import": "setup.import"}.get(what, "setup.pip")
        message = errors[-1].removeprefix("ERROR: ")
        return self._error(check, f"{what} failed (exit status {status}): {message}", hint, "\n".join(lines[-15:]))

    def _look(self) -> dict[str, Any]:
        state: dict[str, Any] = self._call(
            "look", workdir=self._host.workdir, python=self._host.python,
            here=sys.executable if self._host.is_local else None,
            preferred=[f"python3.{sys.version_info.minor}"],
        )  # fmt: skip
        return state

    def _let_go(self) -> None:
        try:
            self._call("end")
        except (HostError, RemoteError):  # the connection is lost, which releases the lock
            return

    def _call(self, function: str, **args: Any) -> Any:
        return self._session.call("setup", function, timeout_s=2 * SILENT_S, **args)

    def _step(self, text: str) -> None:
        self._tell(self._name, text, True)

    def _sending(self, host: str, done: int, total: int) -> None:
        self._tell(host, f"sent {size(done)} of {size(total)}", False)

    def _error(self, check: str, text: str, hint: str, output: str = "") -> HostError:
        return HostError(f"{self._name}: {text}", check=check, host=self._name, hint=hint, output=output)


def _told(name: str, error: RemoteError) -> HostError:
    is_full = "[Errno 28]" in error.message or "[Errno 122]" in error.message
    return HostError(
        f"{name}: {'its disk is full: ' if is_full else ''}{error.message}",
        check="disk.full" if is_full else "setup.failed",
        host=name,
        hint="make room there and run it again" if is_full else f"can its user write to [hosts.{name}] workdir?",
        output="" if is_full else error.traceback,
    )
