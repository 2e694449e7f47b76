"""When is a run saved, and what proves that its replicas are one model? Rank 0 writes a checkpoint, alone where nobody
comes or goes, else one rank on each host; hashes in it say whether all hold the same.

Of replicas that drift a checkpoint holds the weights that they agreed on last, and the optimizers of whoever writes it
or, where that one has no share, of the first that learns. What each has become since then, optimizers and all, it keeps
beside (see own.py): the same ranks go on bit for bit, and any others from the weights agreed on.
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

ROUNDING = 0.01  # of a tensor's largest number, in the steps since all were equal: more is another fault
Saved = tuple[int | None, float | None, int | None]  # step of the last checkpoint; loss and step of the best one


class Keeper:
    """One rank's part in saving and comparing. All ranks call every method together."""

    def __init__(self, rundir: RunWriter, spec: RunSpec, group: Group, trained: Trained, sync: Sync,
                 spans: Spans) -> None:  # fmt: skip
        self._dir, self._spec, self._group, self._trained, self._sync = rundir, spec, group, trained, sync
        self._spans = spans
        self._own_step: int | None = None  # of what this rank kept for itself last
        self._saved_step: int | None = None  # on every rank the same, whatever its disk says: rank 0 alone writes
        self._compared_step: int | None = None
        self._best: tuple[float, int] | None = None

    @property
    def saved(self) -> Saved:
        """As all ranks know it."""
        return self._saved_step, *(self._best or (None, None))

    def entered(self, saved: Saved) -> None:
        """The ranks are others, which know of these checkpoints: what this one kept for itself is not what it has in
        common with them. Nor have all compared what it has: they may have lost their world in the middle of it.
        """
        self._own_step = self._compared_step = None
        self._saved_step, loss, step = saved
        self._best = None if loss is None or step is None else (loss, step)

    @property
    def folder(self) -> Path:
        """Of the run here."""
        return self._dir.path

    def restore(self, resume: Checkpoint | None) -> None:
        """Become what a checkpoint holds, with this rank's random numbers as they were, or as they begin."""
        step = resume.step if resume else 0
        if self._group.local_rank == 0:
            for rank in self._dir.recorded_ranks():
                self._dir.keep_records_before(rank, step)
        if resume is not None:
            folder = self._dir.checkpoint_path(step)
            self._trained.load(folder)
            self._saved_step = step
            saved = [(one.val_loss, one.step) for one in self._saved() if one.val_loss is not None]
            self._best = min(saved, default=None)
            if resume.world_size == self._group.world_size:
                rng.restore(rng.of_rank(folder / "rng.safetensors", self._group.rank), self._group.device)
                return
        rng.begin(self._spec.train.seed, step, self._group.number)

    def _saved(self) -> Iterator[Checkpoint]:
        """Those that can be read: an older one that is damaged is nobody's reason to end."""
        for step in self._dir.checkpoint_steps():
            with contextlib.suppress(CheckpointError):
                yield read_checkpoint(self._dir.checkpoint_path(step))

    def restore_own(self, resume: Checkpoint | None) -> None:
        """Once the Sync is in place: what this rank alone remembered, and what ranks did that are no more.

        Ranks that drifted apart take it up together or not at all. Gradients that were not sent are any rank's to send.
        """
        if resume is None:
            return
        group, step = self._group, resume.step
        if group.local_rank == 0:
            forget_after(self._dir, step)
        here = ranks_that_kept(self._dir, step)
        seen = [from_json(text, list[int]) for text in group.gather(msgspec.json.encode(here))]
        mine = load_own(self._dir, group.number, step) if group.number in here else None
        if self._sync.replica == "drifting":
            way = self._sync.state_dict()["way"]
            told = group.gather(b"1" if mine and mine["sync"].get("way") == way else b"")
            if mine and all(told) and resume.world_size == group.world_size:
                self._trained.load_states(mine["states"])
                self._sync.load_own_state(mine["sync"], [])
            elif group.rank == 0:
                self._dir.add_event("own.dropped", step=step)
            return
        theirs = [load_own(self._dir, number, step) for number in heirs(group.numbers, seen)[group.rank]]
        others = [state["sync"] for state in theirs if state]
        self._sync.load_own_state((mine or {}).get("sync", {}), others)
        drifted = any("states" in state for state in (mine, *theirs) if state)
        if any(group.gather(b"1" if drifted else b"")) and group.rank == 0:
            self._dir.add_event("own.dropped", step=step)
        num_missing = resume.num_own - len({number for one in seen for number in one})
        if group.rank == 0 and num_missing > 0:
            self._dir.add_event("own.missing", step=step, num=num_missing)

    def save(self, step: int, val_loss: float | None, concludes: bool = False) -> None:
        """Write the checkpoint of `step`, unless it is there; RunError on all ranks where it cannot be.

        Where hosts come and go they begin again with it whatever happens: all replicas have agreed on it. Where other
        ranks are about to do so (`concludes`), replicas that drifted become one model first, or what each has learned
        would be lost.
        `val_loss` is that of the replicas as they are: where they have drifted, it is not that of what is saved.
        """
        if step != self._saved_step:
            if concludes and self._sync.would_conclude():
                self._check_finite(step, self._sync.agreed(self._trained.weights()))  # else nobody knows whose it was
                self.conclude(step)
                val_loss = None
            with self._spans.during("checkpoint"):
                self._save(step, val_loss)
            self._spans.flush()  # a rank that dies after this has told what came before

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

        self._group.all_or_none(write)  # nor does any begin the next step's clock while another writes
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
        """NonFiniteError on all ranks where any holds what is not: the step before has made it so."""
        own = {} if self._sync.is_agreed() else self._trained.weights()  # what it remembers would go on from them
        bad = checkpoints.what_is_not_finite(weights) or checkpoints.what_is_not_finite(own)
        told = [text.decode() for text in self._group.gather(bad.encode())]
        ranks = [rank for rank, text in zip(self._group.numbers, told, strict=True) if text]
        if ranks:
            raise NonFiniteError(f"after step {step}: {next(filter(None, told))}; it is not saved", step=step - 1,
                            ranks=ranks, hint="--resume goes on from the last checkpoint; ")  # fmt: skip

    def is_to_conclude(self, step: int) -> bool:
        """Do the replicas become another model where the run ends here?"""
        return self._sync.would_conclude() and step != self._saved_step

    def conclude(self, step: int) -> None:
        """The run ends here: replicas that drifted become one model.

        What each was is kept, so that a run that was stopped goes on as if it had not been. One that has taken all its
        steps, and shall take more, goes on from that model.
        """
        self._group.all_or_none(lambda: self._save_own(step, self._own()))
        self._sync.conclude()

    def compare(self, step: int) -> bool | None:
        """Do the replicas hold the same bits, in what they must agree on? None of one rank.

        DivergedError where they do not; where nobody comes or goes, each then leaves its weights in RUN/replicas for
        `evener verify`.
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
        found = differences(list(hashes), replica_hashes)
        if found and self._round_unlike():
            return self._reconcile(step, weights)
        if found:
            self._check_finite(step, weights)  # NaN is not always the same
            if not self._group.is_in_world:
                folder = self._dir.path / "replicas"
                folder.mkdir(exist_ok=True)
                checkpoints.write_tensors(folder / f"rank-{self._group.number}.safetensors", weights)
                self._group.barrier()
            numbers = self._group.numbers
            raise DivergedError(
                f"after step {step}: the replicas differ: rank {numbers[found[0].rank]} in {found[0].tensor}"
                + (f" and {len(found) - 1} more tensors" if len(found) > 1 else ""),
                hint=f"evener verify {self._dir} shows by how much; --resume goes back to the last checkpoint",
                step=step,
                odd=[numbers[rank] for rank in odd_ones(replica_hashes)],
                differences=[{"rank": numbers[one.rank], "tensor": one.tensor} for one in found],
            )
        if self._group.rank == 0:
            self._dir.add_event("replicas.agree", step=step, tensors=len(hashes))
        return True

    def _round_unlike(self) -> bool:
        """Do ranks compute on devices that round differently, or divide a sum among other numbers of threads?"""
        own = f"{this_machine().cpu} {torch.get_num_threads()}" if self._sync.rounds_by_model else ""
        return len(set(self._group.gather(f"{rounding_of(self._group.device)} {own}".encode()))) > 1

    def _reconcile(self, step: int, weights: dict[str, Tensor]) -> bool:
        """Replicas on unlike devices differ by what these round differently: a little, and then all take rank 0's.

        DivergedError where it is more than that.
        """
        at, apart = take_over(weights, self._group.control, is_first=self._group.rank == 0)
        told = [float(text) for text in self._group.gather(str(apart).encode())]
        apart, rank = max((one, rank) for rank, one in enumerate(told))
        if not apart < ROUNDING:
            where, numbers = self._group.gather(at.encode())[rank].decode(), self._group.numbers
            far = [number for number, one in zip(numbers, told, strict=True) if not one < ROUNDING]  # from rank 0
            raise DivergedError(
                f"after step {step}: the replicas differ by more than rounding: rank {numbers[rank]} by {apart:.1e} of "
                f"the largest number of {where}",
                hint="--resume goes back to the last checkpoint",
                step=step,
                odd=far if 2 * len(far) < len(numbers) else [],
                differences=[{"rank": numbers[rank], "tensor": where}],
                relative=apart,
            )
        if self._group.rank == 0:
            self._dir.add_event("replicas.reconciled", step=step, tensors=len(weights), relative=apart)
        return True

    def _states(self) -> dict[str, Any]:
        """What whoever writes saves beside the weights."""
        states, group = self._trained.state_dicts(), self._group
        if self._sync.replica != "drifting":
            return states
        told = group.gather(msgspec.json.encode([self._trained.learns, group.keeps]))
        known = [from_json(text, tuple[bool, bool]) for text in told]
        learners = [rank for rank, (learns, _) in enumerate(known) if learns]
        lacks = [rank for rank, (learns, keeps) in enumerate(known) if keeps and not learns]
        return hand_over(states, group, source=learners[0], lacks=lacks) if learners and lacks else states

    def _own(self) -> dict[str, Any]:
        """What this rank does not have in common with the others; empty where that is nothing."""
        own: dict[str, Any] = {"sync": self._sync.own_state()}
        if self._sync.replica == "drifting":
            own["states"] = {name: state for name, state in self._trained.state_dicts().items() if name != "sync"}
        return own if any(own.values()) else {}

    def _save_own(self, step: int, own: dict[str, Any]) -> None:
        """Keep it, once a step."""
        if own and step != self._own_step:
            save_own(self._dir, self._group.number, step, own)
        self._own_step = step
