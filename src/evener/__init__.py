"""evener: train one PyTorch model across the machines you have, and understand what happened."""

from typing import TYPE_CHECKING, Any

from evener.core.base.version import __version__ as __version__

if TYPE_CHECKING:
    from evener.core.run.run_spec import parse_args as parse_args
    from evener.report.export.dataframes import read_run as read_run
    from evener.worker.script.program_log import log as log
    from evener.worker.train.run import join as join


def __getattr__(name: str) -> Any:
    if name == "join":  # only training imports torch
        from evener.worker.train.run import join

        return join
    if name == "log":
        from evener.worker.script.program_log import log

        return log
    if name == "parse_args":
        from evener.core.run.run_spec import parse_args

        return parse_args
    if name == "read_run":
        from evener.report.export.dataframes import read_run

        return read_run
    raise AttributeError(f"module 'evener' has no attribute {name!r}")
