"""How is a run directory written so that its readers, at any moment, find whole files and whole lines?"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import Any

import msgspec

from evener.core.files import write_atomic
from evener.core.rundir import Manifest, RunDir

REMOVED = ".removed"  # ends the name of a checkpoint that is on its way out


class RunWriter(RunDir):
    """The files of one run, for those who make it: its ranks, and who started them."""

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest in one step."""
        write_atomic(self.manifest_path, msgspec.json.format(msgspec.json.encode(manifest), indent=2))

    def add_event(self, event: str, **facts: Any) -> None:
        """Append one line; safe from several processes, each line being one write. One that a full disk cut short is
        ended first.
        """
        line = msgspec.json.encode({"event": event, "time": time.time()} | facts) + b"\n"
        with self.events_path.open("a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line
            file.write(line)

    def prune_checkpoints(self, keep: int, best: int | None) -> None:
        """Remove all complete checkpoints but the newest `keep` and the best one.

        Each gets another name first: killed in the middle, a removal leaves nothing that looks like a checkpoint.
        """
        for step in self.checkpoint_steps()[:-keep]:
            if step != best:
                self.drop_checkpoint(step)
        for path in self.checkpoints_path.glob(f".*{REMOVED}"):
            shutil.rmtree(path, ignore_errors=True)

    def drop_checkpoint(self, step: int) -> None:
        """Take its name from a checkpoint, if it is there and can be; the next `prune_checkpoints` removes it."""
        with contextlib.suppress(OSError):
            path = self.checkpoint_path(step)
            path.rename(path.with_name(f".{path.name}{REMOVED}"))

    def keep_records_before(self, rank: int, step: int) -> None:
        """Drop the records and spans of `step` and later, which a resumed run is about to make again."""
        kept = [record for record in self.records(rank) if record.step < step]
        write_atomic(self.steps_path(rank), b"".join(msgspec.json.encode(record) + b"\n" for record in kept))
        spans = [one for one in self.spans(rank) if one.step < step]
        if spans or self.spans_path(rank).exists():
            write_atomic(self.spans_path(rank), b"".join(msgspec.json.encode(one) + b"\n" for one in spans))
