"""Write measured links and rates into the fleet file; the user's own lines and comments are preserved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.file_io import write_atomic
from evener.core.cluster.fleet_file import HostLink, Rates
from evener.core.cluster.link import parse_link


def update_fleet_file(path: str | Path, *, links: dict[str, dict[str, HostLink]] | None = None,
                 rates: dict[str, dict[str, Rates]] | None = None) -> None:  # fmt: skip
    """Write links and rates into the fleet file, replacing those of the same hosts and devices."""
    import tomlkit

    file = Path(path)
    try:
        document = tomlkit.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    for source, targets in (links or {}).items():
        for target, link in targets.items():
            updated = msgspec.structs.replace(link, is_shared=_is_shared(document, source, target))
            _table(document, "links", source)[target] = msgspec.to_builtins(updated)
    for name, devices in (rates or {}).items():
        host = _table(document, "rates", name)
        for device, rate in devices.items():
            if device not in host:
                host[device] = tomlkit.table()
            for field, value in msgspec.to_builtins(rate).items():
                if isinstance(value, dict) and field in host[device]:
                    host[device][field].update(value)
                else:
                    host[device][field] = value
    try:
        write_atomic(file, tomlkit.dumps(document).encode())
    except OSError as error:
        raise UsageError(f"{file}: cannot write the measured figures: {error.strerror}") from None


def _is_shared(document: Any, source: str, target: str) -> bool:
    """Return whether the file declares this link as a shared medium, which no measurement of two hosts can show."""
    links = document.get("links", {})
    known = links.get(source, {}).get(target, links.get(target, {}).get(source, document.get("link")))
    return parse_link(known).wire.is_shared if isinstance(known, str) else bool(known and known.get("is_shared"))


def _table(document: Any, section: str, name: str) -> Any:
    import tomlkit

    if section not in document:
        document[section] = tomlkit.table(is_super_table=True)
    if name not in document[section]:
        document[section][name] = tomlkit.table()
    return document[section][name]
