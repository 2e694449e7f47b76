"""Live display of a running job: a progress bar, its metrics, and a line for each host while hosts are imbalanced.

━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━  step 3412/10000  left 1 h 07 min
loss 2.3451  validation 2.4407  12.3k tokens/s  communication 44%
laptop  ━━━━━━━━━━━━━━━━━━━━╍  works 1.90 s, sends 51 ms, the others wait
attic   ━━━━━━━━━━━╍·········  works 1.02 s, sends 51 ms, waits 880 ms
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.core.base.units import format_seconds
from evener.core.run.progress import HostStepTime, RunProgress

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

MIN_BAR_WIDTH, MAX_BAR_WIDTH = 10, 60  # columns
MIN_HOST_BAR_WIDTH, MAX_HOST_BAR_WIDTH = 6, 24  # columns of a host's bar
MAX_HOST_LINES = 6  # lines; of more hosts the slowest ones and the fastest
# The phases of a host's step: name, colour, and marks that distinguish them without colour.
PHASE_STYLES = (("works", "cyan", "━", "="), ("sends", "yellow", "╍", "~"), ("waits", "magenta", "·", "."))


@dataclass(frozen=True)
class ProgressSnapshot:
    """The progress of a run at one moment. Immutable: rich draws it in another thread."""

    fraction_done: float | None = None  # done; None: not begun
    status_text: str = "starting"
    metrics: tuple[tuple[str, str, str], ...] = ()  # (name, value, unit)

    @staticmethod
    def from_progress(progress: RunProgress, val_loss: float | None) -> ProgressSnapshot:
        """Make a snapshot of the progress."""
        if not progress.has_started:
            return ProgressSnapshot()
        left_s, share = progress.remaining_s, progress.communication_share
        rate, _, unit = progress.throughput_text.partition(" ")
        figures = [("loss", progress.loss_text, ""), ("", rate, unit)]
        if val_loss is not None:
            figures.insert(1, ("validation", f"{val_loss:.4f}", ""))
        if share is not None:
            figures.append(("communication", f"{share:.0%}", ""))
        ends = progress.step_text + (f"  left {format_seconds(left_s)}" if left_s else "")
        return ProgressSnapshot(progress.fraction_done, ends, tuple(figures))


class LiveDisplay:
    """The renderable that rich redraws periodically."""

    def __init__(self) -> None:
        self.snapshot = ProgressSnapshot()
        self.imbalanced_hosts: list[HostStepTime] = []  # slowest first; empty while hosts are balanced

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now, width = self.snapshot, options.max_width
        bar = min(MAX_BAR_WIDTH, max(MIN_BAR_WIDTH, width - len(now.status_text) - 2))
        top = Table.grid(padding=(0, 2, 0, 0))
        top.add_row(
            ProgressBar(
                total=1.0,
                completed=now.fraction_done or 0.0,
                width=bar,
                pulse=now.fraction_done is None,
                complete_style="cyan",
                finished_style="green",
                pulse_style="cyan",
            ),
            Text(now.status_text, no_wrap=True),
        )
        yield top
        if now.metrics:
            yield _metrics_line(now.metrics, width)
        yield from self._host_lines(width, ascii_only=options.ascii_only)

    def _host_lines(self, width: int, *, ascii_only: bool) -> Iterator[Text]:
        """Yield a line per host, slowest first: its phases as bars in proportion to the longest step, and in words."""
        from rich.text import Text

        shown = self.imbalanced_hosts
        if not shown:
            return
        if len(shown) > MAX_HOST_LINES:
            shown = [*shown[: MAX_HOST_LINES - 2], shown[-1]]
        names = max(len(host_time.host) for host_time in shown)
        longest_s = max(sum(_phase_values(host_time)) for host_time in shown) or 1.0
        words = [_format_phases(host_time, is_last=number == 0) for number, host_time in enumerate(shown)]
        room = width - names - 4 - max(text.cell_len for text in words)
        bar = min(MAX_HOST_BAR_WIDTH, room) if room >= MIN_HOST_BAR_WIDTH else 0
        for host_time, phases in zip(shown, words, strict=True):
            line, until_s, drawn = Text(f"{host_time.host:{names}}  ", no_wrap=True, overflow="ellipsis"), 0.0, 0
            for (_, colour, mark, plain), value_s in zip(PHASE_STYLES, _phase_values(host_time), strict=True):
                until_s += value_s
                num = round(bar * until_s / longest_s) - drawn
                line.append((plain if ascii_only else mark) * num, colour)
                drawn += num
            yield line.append(" " * (bar - drawn + 2 if bar else 0)).append_text(phases)
        if len(self.imbalanced_hosts) > len(shown):
            yield Text(f"and {len(self.imbalanced_hosts) - len(shown)} hosts between them", "dim")


def _metrics_line(figures: Sequence[tuple[str, str, str]], width: int) -> Text:
    """Return the metrics in one line; where they do not fit, without the validation loss, which has its own line."""
    from rich.text import Text

    def line(shown: Sequence[tuple[str, str, str]]) -> Text:
        styles = ("dim", "bold", "dim")
        each = [[Text(word, style) for word, style in zip(words, styles, strict=True) if word] for words in shown]
        return Text("  ").join(Text(" ").join(words) for words in each)

    whole = line(figures)
    return whole if whole.cell_len <= width else line([figure for figure in figures if figure[0] != "validation"])


def _format_phases(host_time: HostStepTime, *, is_last: bool) -> Text:
    """Return the phases of a host's step in words; `is_last`: the other hosts wait for this one."""
    from rich.text import Text

    known = [(f"{name} {format_seconds(value_s)}", colour) for (name, colour, *_), value_s in
             zip(PHASE_STYLES, _phase_values(host_time), strict=True) if value_s > 0]  # fmt: skip
    if is_last:
        known = [*known[:2], ("the others wait", "bold")]
    return Text(", ").join(Text(text, style) for text, style in known)


def _phase_values(host_time: HostStepTime) -> tuple[float, float, float]:
    return host_time.work_s, host_time.exposed_sync_s, host_time.wait_s
