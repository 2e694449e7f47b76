"""Instrument the program of a rank that `evener launch` started, before its first line runs.

    evener.worker.torchrun          puts `startup` on PYTHONPATH
    Python, below a rank            imports startup/sitecustomize.py, which calls `install`
    the program imports torch       its modules are changed as soon as each has been executed, before anybody has them

Nothing of torch is imported that the program does not import. Processes that the rank starts (data loader workers,
mp.spawn) come here too: they are recognized by EVENER_RANK_PID.

A program may also name its strategy and shares itself (evener.integrations), whoever launched it: see `choose`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from evener.core.base.errors import UsageError
from evener.core.run.membership_epoch import has_dynamic_membership
from evener.core.run.roster import DDP, check_number_of_shares, parse_sync, parse_sync_and_shares
from evener.core.script.call_ring import CALLS_FOLDER, CallRing
from evener.core.script.variables import OPTIONS_VARIABLE
from evener.worker.record.heartbeat import start_heartbeat
from evener.worker.script.collective_calls import COLLECTIVES, ProgramSync, record_collectives
from evener.worker.script.gloo_completion import PairwiseExchanges, complete_gloo
from evener.worker.script.group_checks import RANK_PID_VARIABLE, GroupChecks
from evener.worker.script.module_changer import ModuleChanger
from evener.worker.script.report import launched_rank, run_folder

if TYPE_CHECKING:
    from evener.worker.script.batch_shares import BatchShares
    from evener.worker.script.step_exchange import StepExchange


@dataclass
class Instruments:
    """The objects that synchronize the models of this process and divide its batches."""

    changer: ModuleChanger
    program_sync: ProgramSync
    exchange: StepExchange | None = None  # None: not measured
    shares: str = "equal"
    batch_shares: BatchShares | None = None  # None: equal shares
    choice: tuple[str, str] | None = None  # (sync, shares), as the program has named them


_instruments: Instruments | None = None  # of this process


def choose(sync: str, shares: str, rank: int, world_size: int) -> BatchShares | None:
    """Synchronize this program's DDP models, and divide its batches, as its own code says: "int8", "2:1".

    A strategy or shares other than the defaults, given to `evener launch`, take precedence. Call it before the first
    DDP model is made. Return what divides the batches; None if shares are equal. Raise UsageError if the program cannot
    have both, or has chosen something else before.
    """
    global _instruments
    used = _instruments
    if used is not None and used.choice is not None:
        if used.choice != (sync, shares):
            raise UsageError(
                f"sync={sync!r}, shares={shares!r}: this process has begun with sync={used.choice[0]!r}, "
                f"shares={used.choice[1]!r}",
                hint="one strategy and one division a process: name them once",
            )
        return used.batch_shares
    chosen_sync = sync if used is None or used.program_sync.sync == DDP else str(used.program_sync.sync)
    chosen_shares = shares if used is None or used.batch_shares is None else used.shares
    spec, weights = parse_sync_and_shares(chosen_sync, chosen_shares)
    if weights is not None and has_dynamic_membership():
        raise UsageError(
            f"shares={shares!r} is for these ranks, and --membership restart goes on with fewer", hint="one of them"
        )
    check_number_of_shares(chosen_shares, world_size)
    if used is None:  # not launched by evener
        used = _instruments = Instruments(ModuleChanger(), ProgramSync(DDP, None))
        for name, change in used.program_sync.changes().items():
            used.changer.add(name, change)
        used.changer.add("torch.nn.parallel.distributed", used.program_sync.change_ddp)
        sys.meta_path.insert(0, used.changer)
        atexit.register(used.program_sync.close, is_finished=True)
    used.choice = sync, shares
    used.program_sync.sync = spec
    if used.exchange is not None:
        used.exchange.sync = spec
    if weights is not None and used.batch_shares is None:
        used.shares, used.batch_shares = shares, _divide(used.changer, weights, rank, world_size)
    return used.batch_shares


def install() -> None:
    """Instrument this process."""
    options = os.environ[OPTIONS_VARIABLE].split(",")
    is_rank = os.environ.setdefault(RANK_PID_VARIABLE, str(os.getpid())) == str(os.getpid())
    changer = ModuleChanger()
    chosen = dict(option.split("=", 1) for option in options if "=" in option)
    exchanges = PairwiseExchanges(chosen.get("sync", "ddp"))
    if "no-compat" not in options:
        replaces_nccl = "no-gpu" in options
        changer.add(
            "torch.distributed.distributed_c10d",
            lambda c10d: complete_gloo(c10d, exchanges, replaces_nccl=replaces_nccl),
        )

        def count_calls(optimizer: Any) -> None:
            optimizer.register_optimizer_step_pre_hook(exchanges.begin_update)
            optimizer.register_optimizer_step_post_hook(exchanges.end_update)

        changer.add("torch.optim.optimizer", count_calls)
    checks = GroupChecks() if "independent" not in options else None
    if checks is not None:
        changer.add("torch.distributed.distributed_c10d", checks.check_groups)
        if is_rank:
            changer.add(
                "torch.optim.optimizer",
                lambda optimizer: optimizer.register_optimizer_step_post_hook(checks.after_optimizer_step),
            )
    if is_rank:
        global _instruments
        start_heartbeat()
        sync, shares = chosen.get("sync", "ddp"), chosen.get("shares", "equal")
        batch_shares = None
        if shares != "equal":
            weights = [float(weight) for weight in shares.split(":")]
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            batch_shares = _divide(changer, weights, launched_rank(), world_size)
        measures = "no-measure" not in options and "independent" not in options
        _instruments = _record(changer, sync, checks, exchanges, measures=measures)
        _instruments.shares, _instruments.batch_shares = shares, batch_shares
    sys.meta_path.insert(0, changer)


def _divide(changer: ModuleChanger, weights: Sequence[float], rank: int, world_size: int) -> BatchShares:
    """Divide the batches of this process."""
    from evener.worker.script.batch_shares import BatchShares, divide_batches

    shares = BatchShares(weights, rank, world_size)
    for name, change in divide_batches(shares).items():
        changer.add(name, change)
    return shares


def _record(
    changer: ModuleChanger, sync: str, checks: GroupChecks | None, exchanges: PairwiseExchanges, *, measures: bool
) -> Instruments:
    """Record the collectives of this rank, measure its steps, and synchronize DDP models by the strategy `sync`.

    Without room for the record they are synchronized alone, as on the other ranks.
    """
    folder, ring = run_folder(), None
    if folder is not None:
        with contextlib.suppress(OSError):
            ring = CallRing(folder / CALLS_FOLDER / os.environ.get("LOCAL_RANK", "0"))
    if checks is not None and ring is not None:
        checks.num_recorded = lambda: ring.num_calls
    measurement = training = exchange = None
    if measures and folder is not None and ring is not None:
        from evener.core.run.runwriter import RunWriter
        from evener.worker.script.program_log import take_losses
        from evener.worker.script.step_exchange import StepExchange
        from evener.worker.script.step_measurement import StepMeasurement, measure_modules
        from evener.worker.script.training_checks import TrainingChecks, check_training

        training = TrainingChecks()
        for name, changes in check_training(training).items():
            for change in changes:
                changer.add(name, change)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        exchange = StepExchange(RunWriter(folder), launched_rank(), world_size, sync, training)
        measurement = StepMeasurement(exchange, RunWriter(folder), training.models)
    program_sync = ProgramSync(parse_sync(sync), measurement)
    for name, change in program_sync.changes().items():  # before the measurement takes an update for ended
        changer.add(name, change)
    if measurement is not None and training is not None:
        training.are_replicas_equal = program_sync.are_replicas_equal
        exchanges.timed = measurement.blocked
        for name, change in (measure_modules(measurement, COLLECTIVES) | take_losses(measurement.log)).items():
            changer.add(name, change)

    exit_codes: list[object] = []
    python_exit = sys.exit

    def noting_exit(code: Any = None, /) -> NoReturn:
        exit_codes.append(code)
        python_exit(code)

    sys.exit = noting_exit
    pid = os.getpid()

    def close() -> None:
        if os.getpid() != pid:  # a process that the program forked
            return
        # An uncaught exception leaves `last_value`, and SystemExit does not.
        has_failed = hasattr(sys, "last_value") or (exit_codes and exit_codes[-1] not in (None, 0))
        if ring is not None and not has_failed:
            ring.close()
        program_sync.close(is_finished=not has_failed)
        if measurement is not None and exchange is not None:
            measurement.close()
            exchange.close(is_finished=not has_failed)

    atexit.register(close)
    if ring is not None:
        changer.add(
            "torch.distributed.distributed_c10d",
            lambda c10d: record_collectives(c10d, ring, measurement, training, exchanges),
        )
    changer.add("torch.nn.parallel.distributed", program_sync.change_ddp)
    return Instruments(changer, program_sync, exchange)
