"""Write a run directory so that its readers find whole files and whole lines at any moment."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import Any

import msgspec

from evener.core.base.file_io import open_for_append, remove_entry, write_atomic
from evener.core.run.rundir import Manifest, RunDir

REMOVED_SUFFIX = ".removed"  # suffix of a checkpoint that is being removed


class RunWriter(RunDir):
    """Writers of the files of one run, for its ranks and their launcher."""

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest atomically."""
        write_atomic(self.manifest_path, msgspec.json.format(msgspec.json.encode(manifest), indent=2))

    def add_event(self, event: str, **facts: Any) -> None:
        """Append one event. Safe from several processes, as each line is one write.

        A line that a full disk cut short is terminated first.
        """
        line = msgspec.json.encode({"event": event, "time": time.time()} | facts) + b"\n"
        with open_for_append(self.events_path) as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line
            file.write(line)

    def prune_checkpoints(self, keep: int, best: int | None) -> None:
        """Remove all complete checkpoints except the newest `keep` and the best one.

        Each is renamed first, so that an interrupted removal leaves nothing that looks like a checkpoint.
        """
        for step in self.checkpoint_steps()[:-keep]:
            if step != best:
                self.drop_checkpoint(step)
        for path in self.glob(f"checkpoints/.*{REMOVED_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)

    def remove_partial_checkpoints(self) -> None:
        """Remove the half-written checkpoints that killed writers left. Call it only while none is being written."""
        for path in self.checkpoints_path.glob(".step-*.tmp"):
            remove_entry(path)

    def drop_checkpoint(self, step: int) -> None:
        """Rename a checkpoint, if it exists and can be renamed, so that the next `prune_checkpoints` removes it."""
        with contextlib.suppress(OSError):
            path = self.checkpoint_path(step)
            path.rename(path.with_name(f".{path.name}{REMOVED_SUFFIX}"))

    def truncate_records(self, rank: int, step: int) -> None:
        """Drop a rank's records and spans from `step` on, which a resumed run is about to write again."""
        records = [record for record in self.records(rank) if record.step < step]
        write_atomic(self.steps_path(rank), b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        spans = [span for span in self.spans(rank) if span.step < step]
        if spans or self.spans_path(rank).exists():
            write_atomic(self.spans_path(rank), b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
