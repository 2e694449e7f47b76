"""Install the same evener and torch on every host: inspect, compare, and change only what differs.

The interpreter of a host's ranks is, in this order:

    [hosts.X] python = "…"    the user's: changed only if it is a virtual environment
    WORKDIR/venv              evener's own: created if missing, with an installed python 3.11 or newer
    on this machine           the environment that runs this program, as long as there is no WORKDIR/venv

Packages come from the registry of the host's own pip, or, if that reaches none, as wheels sent from here by content
hash (`transfer/file_transfer.py`). Hosts without a GPU get PyTorch's CPU build if its index can be reached. An
interrupted setup leaves a mark in the environment, and the next one completes it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.core.base.errors import EvenerError, HostError
from evener.core.base.shell import quote_command, quote_word
from evener.core.base.units import format_bytes, pluralize
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.ssh.session import RemoteError, Session, Sessions, parallel_map
from evener.transfer.file_transfer import is_disk_full, send_to_host
from evener.transfer.file_tree import describe_files
from evener.transfer.wheels import (
    CPU_INDEX,
    WheelTarget,
    content_hash,
    dependency_closure,
    evener_wheel,
    fetch_wheels,
    missing_packages,
    pinned_specifiers,
    resolve_wheels,
)

CPU_BYTES = 1_300_000_000  # measured (2026-11): a venv with evener, torch 2.13.0+cpu and their dependencies, 1.1 GB
CUDA_BYTES = 9_000_000_000  # assumption
STREAM_TIMEOUT_S = 60.0  # a busy host sends a line at least every 5 s
# Measured (2026-11, 2 cores): 20 s instead of 54 s, as pip compiles all of torch; the import that ends a setup compiles
# what a worker imports.
FAST_PIP_FLAGS = ("--no-compile", "--progress-bar=off")
REGISTRY_PROBE_PACKAGE = "msgspec"  # small, and on every registry that has evener's dependencies

VERSION_CONFLICT_HINT = "{} conflicts with the versions that evener needs on all hosts: try other versions"

SetupProgress = Callable[[str, str, bool], None]  # host, message, whether a new step begins


class HostSetupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the setup of one host."""

    host: str
    python: str  # the interpreter of the ranks
    actions: list[str]  # what changed; empty if nothing had to change
    torch: str
    evener: str
    evener_hash: str
    packages: int  # number installed by this setup, without evener
    source: Literal["registry", "carried", "none"]
    sent_bytes: int
    took_s: float

    @property
    def summary(self) -> str:
        """Return a one-line summary for the user."""
        if self.actions:
            return f"{self.host}: {', '.join(self.actions)}"
        return f"{self.host}: nothing to do: torch {self.torch}, evener {self.evener} ({self.evener_hash[:8]})"


class EvenerWheel(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel of the evener that runs here."""

    wheel: Path
    version: str
    hash: str


def set_up_hosts(
    fleet: Fleet,
    sessions: Sessions,
    on_progress: SetupProgress,
    extra_packages: Sequence[str] = (),
    *,
    extras: Sequence[str] = (),
    sends_wheels: bool = False,
) -> dict[str, HostSetupResult | EvenerError]:
    """Set up all hosts concurrently; return each one's result or error, as a failure on one does not stop the others.

    `extras` are those of evener, whose packages have the same versions on all hosts; `extra_packages` are further pip
    requirements. With `sends_wheels`, all wheels are sent from here.
    """
    with tempfile.TemporaryDirectory(prefix="evener-setup-") as folder:
        wheel = evener_wheel(Path(folder))
        ours = EvenerWheel(wheel=wheel, version=wheel.name.split("-")[1], hash=content_hash(wheel))

        def set_up_one(name: str) -> HostSetupResult | EvenerError:
            try:
                return _HostInstaller(
                    sessions[name], fleet.hosts[name], ours, on_progress, extras, extra_packages, sends_wheels
                ).run()
            except RemoteError as error:
                return _to_setup_error(name, error)
            except EvenerError as error:
                return error

        return parallel_map(sessions, set_up_one)


class _HostInstaller:
    """The setup of one host."""

    def __init__(
        self,
        session: Session,
        host: HostConfig,
        evener_wheel: EvenerWheel,
        on_progress: SetupProgress,
        extras: Sequence[str],
        extra_packages: Sequence[str],
        sends_wheels: bool,
    ) -> None:
        self._session, self._name, self._host = session, session.name, host
        self._evener_wheel, self._on_progress = evener_wheel, on_progress
        self._extras, self._extra_packages, self._sends_wheels = extras, extra_packages, sends_wheels
        self._actions: list[str] = []
        self._packages, self._sent_bytes = 0, 0
        self._source: Literal["registry", "carried", "none"] = "none"

    def run(self) -> HostSetupResult:
        began = time.monotonic()
        self._step("looking")
        state = self._inspect()
        if self._packages_to_install(state) is not None:
            state = self._apply(state)
        if self._extra_packages:
            state = self._add_extra_packages(state)
        now = state["now"]
        return HostSetupResult(
            host=self._name, python=state["python"], actions=self._actions, torch=now["packages"]["torch"],
            evener=now["packages"]["evener"], evener_hash=now["evener_hash"], packages=self._packages,
            source=self._source, sent_bytes=self._sent_bytes, took_s=time.monotonic() - began,
        )  # fmt: skip

    def _apply(self, state: dict[str, Any]) -> dict[str, Any]:
        self._check_may_change(state)
        with self._locked():
            state = self._inspect()  # another setup may have just done it
            if state["now"] is None or not state["now"]["is_venv"]:
                state = self._make_venv(state)
            prefix = state["now"]["prefix"]
            todo = self._packages_to_install(state)
            if todo is None:
                return state
            self._call("mark_unfinished", prefix=prefix, what="packages" if todo else "evener")
            if todo:
                state = self._install_dependencies(state, todo)
            if not self._has_this_evener(state):
                self._install_evener(state)
            return self._verify(prefix, imports=bool(todo))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other setups of the host. HostError if one is running there."""
        if lock_holder := self._call("lock_setup", workdir=self._host.workdir):
            raise self._error("setup.busy", f"another setup is running there: {lock_holder}", "wait until it is done")
        try:
            yield
        finally:
            with contextlib.suppress(HostError, RemoteError):  # the connection is lost, which releases the lock
                self._call("finish_setup")

    def _install_dependencies(self, state: dict[str, Any], todo: dict[str, str]) -> dict[str, Any]:
        now, target = state["now"], self._target(state)
        if target.wants_cuda and now["torch_cuda"] is None and "torch" in now["packages"]:
            self._pip(state, "uninstall", "--yes", "torch")  # to pip, its two builds are equal
        wants_cpu_build = target.is_linux and not target.wants_cuda and "torch" in todo
        wanted = self._required_packages(state)
        with self._package_source(
            state, wants_cpu_build, lambda: fetch_wheels(target, todo, wanted, self._step)
        ) as flags:
            self._step(f"installing {pluralize(len(todo), 'package')}")
            self._pip_install(state, *flags, *pinned_specifiers(todo))
        return self._record_installed(state)

    def _add_extra_packages(self, state: dict[str, Any]) -> dict[str, Any]:
        """Install the extra packages without changing any of evener's own dependencies."""
        python, present, extra = state["python"], state["now"]["packages"], self._extra_packages
        if not state["now"]["is_venv"]:
            fix = f"on {self._name}: {quote_word(python)} -m pip install {quote_command(extra)}"
            raise self._error("setup.python", f"{python} is not a virtual environment: setup does not change it", fix)
        if "pip" not in present:
            fix = f"uv pip install --python {quote_word(python)} {quote_command(extra)}"
            raise self._error("setup.pip", f"{python} has no pip to install it", fix)
        target, wants_cpu_build = self._target(state), present.get("torch", "").endswith("+cpu")
        pins = pinned_specifiers({name: present[name] for name in self._required_packages(state) if name in present})
        with self._locked():
            with self._package_source(
                state, wants_cpu_build, lambda: resolve_wheels(target, extra, pins, present, self._step)
            ) as flags:
                self._step(f"installing {', '.join(extra)}")
                self._pip_install(state, *flags, *extra, *pins)
            self._run_remote("import", "try_worker_import", python=python)
            return self._record_installed(state)

    @contextlib.contextmanager
    def _package_source(
        self, state: dict[str, Any], wants_cpu_build: bool, find_wheels: Callable[[], dict[str, Path]]
    ) -> Iterator[list[str]]:
        """Yield pip's flags for the registry that the host's pip reaches or, without one, for wheels sent from here."""
        if not self._sends_wheels and self._reaches_registry(state["python"]):
            self._source = "registry"
            has_index = wants_cpu_build and self._call("can_open_url", url=f"{CPU_INDEX}/torch/")
            yield ["--prefer-binary", *(["--extra-index-url", CPU_INDEX] if has_index else [])]
            return
        self._source = "carried"
        try:
            wheels = find_wheels()
        except EvenerError as error:
            prefix = "" if self._sends_wheels else "it reaches no registry; "
            raise self._error("setup.registry", f"{prefix}{error}", error.hint, error.output) from error
        with self._staged_wheels(wheels) as folder:
            yield ["--no-index", f"--find-links={folder}"]

    @contextlib.contextmanager
    def _staged_wheels(self, wheels: dict[str, Path]) -> Iterator[str]:
        """Send wheels to the host; yield their folder there, which is removed afterwards."""
        tree = describe_files(wheels)
        self._step(f"sending {pluralize(len(wheels), 'wheel')}, {format_bytes(tree.size)}")
        arrived = send_to_host(self._session, self._host.workdir, tree, self._on_bytes_sent)
        self._sent_bytes += arrived.sent_bytes
        yield arrived.path
        self._session.call("content_store", "discard_tree", workdir=self._host.workdir, tree=tree.digest)

    def _verify(self, prefix: str, *, imports: bool) -> dict[str, Any]:
        """Check that the required packages are installed and work. HostError otherwise."""
        self._step("checking")
        state = self._inspect()
        missing = missing_packages(self._required_packages(state), state["now"]["packages"])
        if missing or state["now"]["evener_hash"] != self._evener_wheel.hash:
            what = ", ".join(pinned_specifiers(missing)) or "this evener"
            fix = f"on {self._name}, look: {state['python']} -m pip check"
            raise self._error("setup.pip", f"pip succeeded, but {what} is not installed", fix)
        if imports:
            works = self._run_remote("import", "try_worker_import", python=state["python"])
            if self._wants_cuda(state) and not works["cuda"]:
                raise self._error(
                    "setup.cuda",
                    f"torch {works['torch']} cannot use the GPU there",
                    "install a newer driver, or a torch for its CUDA version, which nvidia-smi shows",
                )
        self._call("finish_setup", prefix=prefix)
        return state

    def _packages_to_install(self, state: dict[str, Any]) -> dict[str, str] | None:
        """Return the packages to install besides evener ({} without an environment); None if not even evener is."""
        if state["now"] is None:
            return {}
        wanted = self._required_packages(state)
        todo = missing_packages(wanted, state["now"]["packages"])
        if state["unfinished"] == "packages":
            todo = wanted
        if self._wants_cuda(state) and state["now"]["torch_cuda"] is None:
            todo["torch"] = wanted["torch"]
        return None if self._has_this_evener(state) and not todo and not state["unfinished"] else todo

    def _has_this_evener(self, state: dict[str, Any]) -> bool:
        return state["now"]["evener_hash"] == self._evener_wheel.hash and "evener" in state["now"]["packages"]

    def _required_packages(self, state: dict[str, Any]) -> dict[str, str]:
        return dependency_closure(self._evener_wheel.wheel, self._target(state), self._extras)

    def _target(self, state: dict[str, Any]) -> WheelTarget:
        return WheelTarget.from_interpreter(state["now"], wants_cuda=self._wants_cuda(state))

    def _wants_cuda(self, state: dict[str, Any]) -> bool:
        return bool(state["has_gpu"]) and self._host.devices != "cpu"

    def _check_may_change(self, state: dict[str, Any]) -> None:
        now = state["now"]
        if now is None and not state["is_own"]:
            fix = f'name another: [hosts.{self._name}] python = "…"'
            raise self._error("version.python", f"{state['python']} does not start there", fix)
        if now is not None:
            lacks = self._describe_missing(state)
            if tuple(int(part) for part in now["markers"]["python_version"].split(".")) < (3, 11):
                version = now["markers"]["python_full_version"]
                raise self._error("version.python", f"{state['python']} is python {version}", "3.11 or newer is needed")
            if now["editable"] is not None and now["evener_hash"] != self._evener_wheel.hash:
                raise self._error(
                    "setup.evener",
                    f"evener there is a source tree with other code than here: {now['editable'].removeprefix('file://')}",
                    f"update it to the same code, or remove [hosts.{self._name}] python",
                )
            if now["is_venv"] and "pip" not in now["packages"]:
                fix = f"uv pip install --python {quote_word(state['python'])} pip"
                raise self._error("setup.pip", f"{state['python']} lacks {lacks}, and has no pip to install it", fix)
        needed = CUDA_BYTES if self._wants_cuda(state) else CPU_BYTES
        has_torch = now is not None and "torch" in now["packages"]
        if state["free_bytes"] < needed and not has_torch:
            raise self._error(
                "disk.full",
                f"{self._host.workdir} has {format_bytes(state['free_bytes'])} free; a venv with torch takes "
                f"{format_bytes(needed)}",
                f'make room there, or name another disk: [hosts.{self._name}] workdir = "…"',
            )

    def _describe_missing(self, state: dict[str, Any]) -> str:
        todo = dict(self._packages_to_install(state) or {})
        parts = [f"torch {todo.pop('torch')}"] if "torch" in todo else []
        parts += pinned_specifiers(todo) if len(todo) <= 3 else [f"{len(todo)} packages"]
        return " and ".join(parts) or "this evener"

    def _make_venv(self, state: dict[str, Any]) -> dict[str, Any]:
        base = state["base"]
        if base["python"] is None and "lacks_venv" in base:
            version = ".".join(base["version"].split(".")[:2])
            raise self._error(
                "setup.venv",
                f"{base['lacks_venv']} cannot make a virtual environment: ensurepip is missing",
                f"on {self._name}, run: sudo apt install {quote_word(f'python{version}-venv')}",
            )
        if base["python"] is None:
            raise self._error(
                "version.python",
                f"no python 3.11 or newer is installed: {', '.join(base['seen']) or 'none at all'}",
                f"on {self._name}, install one (sudo apt install python3.11-venv, or: uv python install 3.12), "
                f'or name it: [hosts.{self._name}] python = "…"',
            )
        self._step(f"creating a venv with python {base['version']}")
        self._run_remote("venv", "make_venv", workdir=self._host.workdir, base=base["python"], named=self._host.python)
        self._actions.append(f"venv created with python {base['version']}")
        new_state = self._inspect()
        if new_state["now"] is None or not new_state["now"]["is_venv"]:
            raise self._error("setup.venv", f"the venv created by {base['python']} does not start", "")
        return new_state

    def _record_installed(self, before: dict[str, Any]) -> dict[str, Any]:
        """Record what pip has changed besides evener itself; return the new state."""
        state = self._inspect()
        old, new = before["now"]["packages"], state["now"]["packages"]
        changed = sorted(name for name, version in new.items() if old.get(name) != version and name != "evener")
        if not changed:
            return state
        self._packages += len(changed)
        others = [name for name in changed if name != "torch"]
        parts = [f"torch {new['torch']}"] * ("torch" in changed)
        if others:
            parts.append(", ".join(others) if len(others) <= 3 else f"{len(others)} packages")
        sent = format_bytes(self._sent_bytes) if self._sent_bytes else "earlier"
        source = "the registry" if self._source == "registry" else f"wheels sent from here ({sent})"
        self._actions.append(f"{' and '.join(parts)} installed from {source}")
        return state

    def _install_evener(self, state: dict[str, Any]) -> None:
        wheel = self._evener_wheel.wheel
        with self._staged_wheels({wheel.name: wheel}) as folder:
            self._step("installing evener")
            self._pip_install(state, "--no-index", "--no-deps", "--force-reinstall", f"{folder}/{wheel.name}")
        self._actions.append(f"evener {self._evener_wheel.version} ({self._evener_wheel.hash[:8]}) installed")

    def _reaches_registry(self, python: str) -> bool:
        """Return whether the host's pip reaches a registry, as configured there (mirror, proxy, folder)."""
        self._step("checking for a package registry")
        arguments = ["--retries=0", "--timeout=5", "index", "versions", REGISTRY_PROBE_PACKAGE]
        items = self._session.stream(
            "venv_setup", "run_pip", python=python, arguments=arguments, timeout_s=STREAM_TIMEOUT_S
        )
        return next((item["status"] for item in items if "status" in item), 1) == 0

    def _pip_install(self, state: dict[str, Any], *arguments: str) -> None:
        self._pip(state, "install", *FAST_PIP_FLAGS, *arguments)

    def _pip(self, state: dict[str, Any], *arguments: str) -> None:
        """Run pip on the host, without what an interrupted pip has half installed."""
        self._run_remote("pip", "run_pip", python=state["python"], arguments=arguments, forget=state["now"]["half"])

    def _run_remote(self, what: str, function: str, **args: Any) -> Any:
        """Run a program on the host to its end and return its result, if any. HostError with its output if it fails."""
        lines: list[str] = []
        status, value = None, None
        for item in self._session.stream("venv_setup", function, timeout_s=STREAM_TIMEOUT_S, **args):
            if "line" in item:
                lines = [*lines, item["line"]][-40:]
                self._on_progress(self._name, item["line"].strip(), False)
            elif "alive" in item:
                self._on_progress(self._name, f"{what}: {item['alive']} s", False)
            status, value = item.get("status", status), item.get("works", value)
        if status != 0:
            raise self._program_error(what, status, lines)
        return value

    def _program_error(self, what: str, status: int | None, lines: list[str]) -> HostError:
        text = "\n".join(lines)
        if is_disk_full(text):
            fix = "make room there and run it again"
            return self._error("disk.full", f"its disk is full: {self._host.workdir}", fix, text)
        errors = [line for line in lines if line.startswith(("ERROR:", "Error:"))] or lines[-1:] or ["no output"]
        hint = {
            "venv": f"on {self._name}, run: sudo apt install python3-venv",
            "import": f"the lines above name what is missing on {self._name}",
            "pip": VERSION_CONFLICT_HINT.format(", ".join(self._extra_packages))
            if "ResolutionImpossible" in text
            else None,
        }.get(what) or "run it again: completed steps are kept; --carry sends wheels from here"
        check = {"venv": "setup.venv", "import": "setup.import"}.get(what, "setup.pip")
        message = errors[-1].removeprefix("ERROR: ")
        return self._error(check, f"{what} failed (exit status {status}): {message}", hint, "\n".join(lines[-15:]))

    def _inspect(self) -> dict[str, Any]:
        state: dict[str, Any] = self._call(
            "inspect_setup", workdir=self._host.workdir, python=self._host.python,
            default_python=sys.executable if self._host.is_local else None,
            preferred=[f"python3.{sys.version_info.minor}"],
        )  # fmt: skip
        return state

    def _call(self, function: str, **args: Any) -> Any:
        return self._session.call("venv_setup", function, timeout_s=2 * STREAM_TIMEOUT_S, **args)

    def _step(self, text: str) -> None:
        self._on_progress(self._name, text, True)

    def _on_bytes_sent(self, host: str, done: int, total: int) -> None:
        self._on_progress(host, f"sent {format_bytes(done)} of {format_bytes(total)}", False)

    def _error(self, check: str, text: str, hint: str, output: str = "") -> HostError:
        return HostError(f"{self._name}: {text}", check=check, host=self._name, hint=hint, output=output)


def _to_setup_error(name: str, error: RemoteError) -> HostError:
    if is_disk_full(error.message):
        return HostError(
            f"{name}: its disk is full: {error.message}", check="disk.full", host=name,
            hint="make room there and run it again",
        )  # fmt: skip
    return HostError(
        f"{name}: {error.message}", check="setup.failed", host=name,
        hint=f"can its user write to [hosts.{name}] workdir?", output=error.traceback,
    )  # fmt: skip
