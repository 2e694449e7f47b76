"""Checkpointing and replica verification: save and restore a run, and check by hashes that all replicas are equal.

With fixed membership rank 0 alone writes a checkpoint, with dynamic membership one rank on each host. It contains the
hashes that every rank took of its own replica.

Where replicas drift (DiLoCo), a checkpoint contains the last synchronized weights, and the optimizer states of the rank
that writes it or, where that rank has no share of the batch, of the first rank that has one. What each replica has
become since, optimizers included, it saves as per-rank state (see rank_state.py): the same ranks resume bit for bit,
any others resume from the synchronized weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from evener.core.decoding import from_json
from evener.core.errors import CheckpointError, DivergedError, NonFiniteError
from evener.core.machine import this_machine
from evener.core.rundir import Checkpoint, read_checkpoint
from evener.core.runwriter import RunWriter
from evener.core.spec import RunSpec
from evener.core.world import SAVE_FILE
from evener.worker import checkpoint as checkpoints
from evener.worker import rng
from evener.worker.arithmetic import rounding_of
from evener.worker.group import Group
from evener.worker.handover import hand_over
from evener.worker.own import forget_after, heirs, load_own, ranks_that_kept, save_own
from evener.worker.spans import Spans
from evener.worker.statetree import pack
from evener.worker.sync import Sync
from evener.worker.trained import Trained
from evener.worker.verify import differences, gather_hashes, hash_tensors, odd_ones, take_over

ROUNDING = 0.01  # relative to a tensor's largest number, since all were equal: a larger difference is another fault
Saved = tuple[int | None, float | None, int | None]  # step of the last checkpoint; loss and step of the best one


class Keeper:
    """One rank's side of checkpointing and of replica verification. Every method is collective: all ranks call it."""

    def __init__(self, rundir: RunWriter, spec: RunSpec, group: Group, trained: Trained, sync: Sync,
                 spans: Spans) -> None:  # fmt: skip
        self._dir, self._spec, self._group, self._trained, self._sync = rundir, spec, group, trained, sync
        self._spans = spans
        self._own_step: int | None = None  # of the newest per-rank state that this rank saved
        self._saved_step: int | None = None  # equal on all ranks, whatever is on their disks: rank 0 alone writes
        self._compared_step: int | None = None
        self._best: tuple[float, int] | None = None

    @property
    def saved(self) -> Saved:
        """The last checkpoint and the best one; equal on all ranks."""
        return self._saved_step, *(self._best or (None, None))

    def entered(self, saved: Saved) -> None:
        """Adopt the checkpoint history of a new epoch's ranks after a regroup.

        The per-rank state that this rank saved does not belong to the new group. Its replica counts as unverified: the
        regroup may have interrupted a verification.
        """
        self._own_step = self._compared_step = None
        self._saved_step, loss, step = saved
        self._best = None if loss is None or step is None else (loss, step)

    @property
    def folder(self) -> Path:
        """The run directory on this host."""
        return self._dir.path

    def restore(self, resume: Checkpoint | None) -> None:
        """Load a checkpoint, or nothing for a new run.

        Restore this rank's RNG states if the world size is the checkpoint's, else seed them anew.
        """
        step = resume.step if resume else 0
        if self._group.local_rank == 0:
            for rank in self._dir.recorded_ranks():
                self._dir.keep_records_before(rank, step)
        if resume is not None:
            folder = self._dir.checkpoint_path(step)
            self._trained.load(folder)
            self._saved_step = step
            losses = [(saved.val_loss, saved.step) for saved in self._saved() if saved.val_loss is not None]
            self._best = min(losses, default=None)
            if resume.world_size == self._group.world_size:
                rng.restore(rng.of_rank(folder / "rng.safetensors", self._group.rank), self._group.device)
                return
        rng.begin(self._spec.train.seed, step, self._group.number)

    def _saved(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints that can be read: a damaged older one must not end the run."""
        for step in self._dir.checkpoint_steps():
            with contextlib.suppress(CheckpointError):
                yield read_checkpoint(self._dir.checkpoint_path(step))

    def restore_own(self, resume: Checkpoint | None) -> None:
        """Load the per-rank state of this rank and of departed ranks; call it after the Sync has wrapped the model.

        Drifting replicas all load theirs or none does. Unsent gradients may be sent by any rank.
        """
        if resume is None:
            return
        group, step = self._group, resume.step
        if group.local_rank == 0:
            forget_after(self._dir, step)
        on_this_host = ranks_that_kept(self._dir, step)
        available = [from_json(text, list[int]) for text in group.gather(msgspec.json.encode(on_this_host))]
        mine = load_own(self._dir, group.number, step) if group.number in on_this_host else None
        if self._sync.replica == "drifting":
            strategy = self._sync.state_dict()["way"]
            has_state = group.gather(b"1" if mine and mine["sync"].get("way") == strategy else b"")
            if mine and all(has_state) and resume.world_size == group.world_size:
                self._trained.load_states(mine["states"])
                self._sync.load_own_state(mine["sync"], [])
            elif group.rank == 0:
                self._dir.add_event("own.dropped", step=step)
            return
        orphaned = [load_own(self._dir, number, step) for number in heirs(group.numbers, available)[group.rank]]
        others = [state["sync"] for state in orphaned if state]
        self._sync.load_own_state((mine or {}).get("sync", {}), others)
        drifted = any("states" in state for state in (mine, *orphaned) if state)
        if any(group.gather(b"1" if drifted else b"")) and group.rank == 0:
            self._dir.add_event("own.dropped", step=step)
        num_missing = resume.num_own - len({number for numbers in available for number in numbers})
        if group.rank == 0 and num_missing > 0:
            self._dir.add_event("own.missing", step=step, num=num_missing)

    def save(self, step: int, val_loss: float | None, concludes: bool = False) -> None:
        """Save the checkpoint of `step` unless it exists. Raise RunError on all ranks if it cannot be written.

        With dynamic membership any set of hosts can restart from it: all replicas are verified first. `finalize`: other
        ranks are about to restart from it, so merge drifting replicas first, or what each has learned would be lost.
        `val_loss` is measured on the replicas as they are; where they have drifted, the saved weights are others.
        """
        if step != self._saved_step:
            if concludes and self._sync.would_conclude():
                # Before the merge: afterwards nobody knows which rank was not finite.
                self._check_finite(step, self._sync.agreed(self._trained.weights()))
                self.conclude(step)
                val_loss = None
            with self._spans.during("checkpoint"):
                self._save(step, val_loss)
            self._spans.flush()  # so that it is not lost if the rank dies now

    def _save(self, step: int, val_loss: float | None) -> None:
        val_loss = val_loss if self._sync.is_agreed() else None
        weights = self._sync.agreed(self._trained.weights())
        self._check_finite(step, weights)
        if self._group.is_in_world and step != self._compared_step:
            self.compare(step)
        replica_hashes = gather_hashes(hash_tensors(weights.items()), self._group.world_size, self._group.control)
        generators = self._group.gather(safetensors.torch.save(rng.states(self._group.device)))
        own, states = self._own(), self._states()
        num_own = sum(map(bool, self._group.gather(b"1" if own else b"")))

        def write() -> None:
            self._save_own(step, own)
            if self._group.keeps:
                checkpoints.save(
                    self._dir,
                    weights,
                    states,
                    step=step,
                    val_loss=val_loss,
                    rng_states=[safetensors.torch.load(state) for state in generators],
                    replica_hashes=replica_hashes,
                    num_own=num_own,
                )

        self._group.all_or_none(write)  # also keeps all from timing the next step while one still writes
        self._saved_step = step
        if self._group.local_rank == 0:
            with contextlib.suppress(OSError):
                (self._dir.path / SAVE_FILE).unlink()
        if self._group.keeps:
            if val_loss is not None and (self._best is None or val_loss < self._best[0]):
                self._best = (val_loss, step)
            self._dir.prune_checkpoints(self._spec.checkpoint.keep, self._best[1] if self._best else None)
        if self._group.rank == 0:
            self._dir.add_event("checkpoint", step=step, val_loss=val_loss)

    def _check_finite(self, step: int, weights: dict[str, Tensor]) -> None:
        """Raise NonFiniteError on all ranks if any has a non-finite weight; the step before produced it."""
        local = {} if self._sync.is_agreed() else self._trained.weights()  # these go into the per-rank state
        bad = checkpoints.what_is_not_finite(weights) or checkpoints.what_is_not_finite(local)
        problems = [text.decode() for text in self._group.gather(bad.encode())]
        ranks = [rank for rank, text in zip(self._group.numbers, problems, strict=True) if text]
        if ranks:
            raise NonFiniteError(f"after step {step}: {next(filter(None, problems))}; it is not saved", step=step - 1,
                            ranks=ranks, hint="--resume goes on from the last checkpoint; ")  # fmt: skip

    def is_to_conclude(self, step: int) -> bool:
        """Return whether ending the run at `step` would change the replicas' weights."""
        return self._sync.would_conclude() and step != self._saved_step

    def conclude(self, step: int) -> None:
        """Merge drifting replicas into one model at the end of the run.

        Each replica is saved as per-rank state first, so that a stopped run resumes bit for bit. A run that has taken
        all its steps and is extended resumes from the merged model.
        """
        self._group.all_or_none(lambda: self._save_own(step, self._own()))
        self._sync.conclude()

    def compare(self, step: int) -> bool | None:
        """Return True if all replicas hold the same bits in what must be equal; None for a single rank.

        Raise ReplicaMismatchError if they do not; with fixed membership each rank first writes its weights to
        RUN/replicas for `evener verify`.
        """
        if self._group.world_size == 1:
            return None
        with self._spans.during("comparison"):
            return self._compare(step)

    def _compare(self, step: int) -> bool:
        self._compared_step = step
        weights = self._sync.agreed(self._trained.weights()) | pack(self._sync.state_dict(), "sync")[1]
        hashes = hash_tensors(weights.items())
        replica_hashes = gather_hashes(hashes, self._group.world_size, self._group.control)
        mismatches = differences(list(hashes), replica_hashes)
        if mismatches and self._round_unlike():
            return self._reconcile(step, weights)
        if mismatches:
            self._check_finite(step, weights)  # NaN has many bit patterns
            if not self._group.is_in_world:
                folder = self._dir.path / "replicas"
                folder.mkdir(exist_ok=True)
                checkpoints.write_tensors(folder / f"rank-{self._group.number}.safetensors", weights)
                self._group.barrier()
            numbers = self._group.numbers
            raise DivergedError(
                f"after step {step}: the replicas differ: rank {numbers[mismatches[0].rank]} in {mismatches[0].tensor}"
                + (f" and {len(mismatches) - 1} more tensors" if len(mismatches) > 1 else ""),
                hint=f"evener verify {self._dir} shows by how much; --resume goes back to the last checkpoint",
                step=step,
                odd=[numbers[rank] for rank in odd_ones(replica_hashes)],
                differences=[{"rank": numbers[one.rank], "tensor": one.tensor} for one in mismatches],
            )
        if self._group.rank == 0:
            self._dir.add_event("replicas.agree", step=step, tensors=len(hashes))
        return True

    def _round_unlike(self) -> bool:
        """Return whether ranks may round differently, by device or by the threads that split a sum."""
        cpu = f"{this_machine().cpu} {torch.get_num_threads()}" if self._sync.rounds_by_model else ""
        return len(set(self._group.gather(f"{rounding_of(self._group.device)} {cpu}".encode()))) > 1

    def _reconcile(self, step: int, weights: dict[str, Tensor]) -> bool:
        """Copy rank 0's weights to all ranks where unlike devices have made them differ by rounding alone.

        Raise ReplicaMismatchError if a rank differs by more than that.
        """
        at, difference = take_over(weights, self._group.control, is_first=self._group.rank == 0)
        by_rank = [float(text) for text in self._group.gather(str(difference).encode())]
        difference, rank = max((value, rank) for rank, value in enumerate(by_rank))
        if not difference < ROUNDING:
            where, numbers = self._group.gather(at.encode())[rank].decode(), self._group.numbers
            far = [number for number, diff in zip(numbers, by_rank, strict=True) if not diff < ROUNDING]  # from rank 0
            raise DivergedError(
                f"after step {step}: the replicas differ by more than rounding: rank {numbers[rank]} by "
                f"{difference:.1e} of the largest number of {where}",
                hint="--resume goes back to the last checkpoint",
                step=step,
                odd=far if 2 * len(far) < len(numbers) else [],
                differences=[{"rank": numbers[rank], "tensor": where}],
                relative=difference,
            )
        if self._group.rank == 0:
            self._dir.add_event("replicas.reconciled", step=step, tensors=len(weights), relative=difference)
        return True

    def _states(self) -> dict[str, Any]:
        """Return the states that the writer saves with the weights; it may receive them from another rank."""
        states, group = self._trained.state_dicts(), self._group
        if self._sync.replica != "drifting":
            return states
        messages = group.gather(msgspec.json.encode([self._trained.learns, group.keeps]))
        roles = [from_json(text, tuple[bool, bool]) for text in messages]
        learners = [rank for rank, (learns, _) in enumerate(roles) if learns]
        lacks = [rank for rank, (learns, keeps) in enumerate(roles) if keeps and not learns]
        return hand_over(states, group, source=learners[0], lacks=lacks) if learners and lacks else states

    def _own(self) -> dict[str, Any]:
        """Return the state that this rank alone has; empty if there is none."""
        rank_state: dict[str, Any] = {"sync": self._sync.own_state()}
        if self._sync.replica == "drifting":
            states = self._trained.state_dicts()
            rank_state["states"] = {name: state for name, state in states.items() if name != "sync"}
        return rank_state if any(rank_state.values()) else {}

    def _save_own(self, step: int, own: dict[str, Any]) -> None:
        """Save the per-rank state, at most once a step."""
        if own and step != self._own_step:
            save_own(self._dir, self._group.number, step, own)
        self._own_step = step
