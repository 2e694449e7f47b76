"""Check what a program trains with: mistakes that torch allows, that change or waste what is learned, and show nowhere.

What one rank can see is looked at on rank 0, since the others do the same:

    shuffling      a DistributedSampler whose epoch is never set gives the same order in each
    averaging      gradients that DDP has averaged are all-reduced again
    accumulation   micro-batches of different size, each a mean, that count the same

What only all ranks together show is collected in the first steps as `RankFacts`, and compared on rank 0: the same
samples, optimizers that hold other tensors than the model. Elements of the parameters of DDP models are compared now
and then, as replicas have to stay equal, and batch normalization when the ranks first evaluate: some programs average
its statistics before. Each rank notes the files it saves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from evener.core.base.file_io import open_for_append
from evener.core.script.training_facts import BatchNormFacts, OptimizerFacts, RankFacts, ReplicaSample, TensorFacts
from evener.worker.record.heartbeat import current_line
from evener.worker.script.loss_graph import Reduction, find_reduction
from evener.worker.script.module_changer import ModuleChange, collect_instances
from evener.worker.script.report import launched_rank, run_folder, run_rank, warn

CHECKED_STEPS = 20  # of each optimizer, whose gradients are looked at
MIN_STEPS = 4  # in which a shorter program must have updated a model, for its facts to say anything
REPLICAS_EVERY = 200  # updates, after one of which replicas are compared
MAX_REPLICA_TENSORS = 200
HASHED_BATCHES = 16
HASHED_ELEMENTS = 1024  # of each tensor
HASHED_TENSORS = 4  # of each batch
AVERAGED_TWICE_STEPS = 2  # an all-reduce of gradients in a single step may be an initialization
MAX_LOSSES = 256  # that are kept of a step
MIN_GRADIENTS = 100  # elements, before an all-reduce of as many is compared with the gradients
MIN_COSINE = 0.999  # of tensors and gradients that are the same but for a factor and rounding
MAX_SAVES = 1000  # files that are noted
MAX_DEPTH = 8  # of nested inputs
SAVES_FILE = "host/saves.jsonl"  # of the run: the files that the ranks of a host saved


class _OptimizerUse:
    """An optimizer that the program has made, and which of its tensors have had gradients."""

    def __init__(self, line: str) -> None:
        self.line, self.num_steps = line, 0
        self.num_rows: list[int] | None = None  # of the losses of its newest update
        self.updated: set[int] = set()  # ids of the tensors that have had a gradient at an update


class TrainingChecks:
    """The checks of one rank."""

    def __init__(self) -> None:
        self.facts: RankFacts | None = None  # None until the first steps have been taken
        self.batch_norms: BatchNormFacts | None = None  # None until batch normalization has been trained and evaluates
        self.replicas: deque[ReplicaSample] = deque()  # to be compared with those of the other ranks
        self.are_replicas_equal: Callable[[], bool] = lambda: True  # whether they have to be, at this moment
        self._is_first = launched_rank() == 0
        self._is_off = False  # something of the program's is not as these checks expect
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._optimizers: weakref.WeakKeyDictionary[Any, _OptimizerUse] = weakref.WeakKeyDictionary()
        # DDP models that train without being compiled, and whether the gradients of the newest pass are averaged
        self.models: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.ddp_models: weakref.WeakSet[Any] = weakref.WeakSet()
        # Layers that exist, by __init__: forward stays as it is for compilers.
        self.batch_norm_layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_evaluated = False  # since the first steps
        self._with_gradient: set[int] = set()  # ids of parameters of DDP models
        self._inputs: list[int] = []
        # of samplers: the seed of the first whole pass in training, or None once the program has set the epoch
        self._seeds: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._num_passes = 0  # forward passes in training
        self._is_sample_due = False  # of replicas, before the next pass
        self._num_steps = 0
        self._reported: set[str] = set()
        self._averaged_in: set[int] = set()  # steps in which averaged gradients were all-reduced
        self._losses: deque[Reduction] = deque(maxlen=MAX_LOSSES)  # of this step
        self._is_in_trainer = False  # in a training_step of transformers' Trainer
        self._pid, self._num_saves = os.getpid(), 0
        self._saved_by: dict[str, int] = {}  # the rank that first saved a file, as far as the list was read
        self._saves_read = 0  # bytes of the list

    def close(self) -> None:
        """Conclude from fewer steps, as the program ends."""
        if self.facts is None and self._num_steps >= MIN_STEPS and not self._is_off:
            with contextlib.suppress(Exception):
                self._conclude()

    def _report_once(self, kind: str, error: str, hint: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            warn(error, hint)

    # --- updates ----------------------------------------------------------------------------------------------------

    def see_optimizer(self, init: Callable[..., None]) -> Callable[..., None]:
        """Return Optimizer.__init__ that notes the line."""

        @functools.wraps(init)
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.setdefault(optimizer, _OptimizerUse(current_line(sys._getframe(1))))

        return noted

    def before_update(self, optimizer: Any, *_: Any) -> None:
        """Look at the gradients for an update, which may delete them."""
        self._look(self._note_gradients, optimizer)

    def after_update(self, optimizer: Any, *_: Any) -> None:
        """Look at the gradients of an update, which a closure may have made, and at the losses of its step."""
        self._look(self._look_at_update, optimizer)

    def _look(self, look: Callable[[Any], None], optimizer: Any) -> None:
        """Look at an optimizer. The program goes on, whatever is odd."""
        if not self._is_off:
            try:
                look(optimizer)
            except Exception:
                self._is_off = True

    def _look_at_update(self, optimizer: Any) -> None:
        if (use := self._optimizers.get(optimizer)) is None:
            return
        self._check_accumulation(use)
        use.num_steps += 1
        is_new_step = use.num_steps > self._num_steps
        self._num_steps = max(self._num_steps, use.num_steps)
        if is_new_step and self._num_steps % REPLICAS_EVERY == CHECKED_STEPS:
            self._is_sample_due = True  # an optimizer may be part of another, which then sends what it has updated
        self._note_gradients(optimizer)
        if self.facts is None and self._num_steps == CHECKED_STEPS:
            self._conclude()

    def _note_gradients(self, optimizer: Any) -> None:
        if self.facts is not None or (use := self._optimizers.get(optimizer)) is None:
            return
        for group in optimizer.param_groups:
            use.updated |= {id(tensor) for tensor in group["params"] if tensor.grad is not None}
        for model in list(self.models):
            self._with_gradient |= {id(one) for one in model.parameters() if one.grad is not None}

    def _conclude(self) -> None:
        """State the facts of the steps so far."""
        names: dict[int, str] = {}
        for model in list(self.models):
            names |= {id(one): name.removeprefix("module.") for name, one in model.named_parameters()}
        held: set[int] = set()
        optimizers = []
        for optimizer, use in list(self._optimizers.items()):
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            held |= {id(tensor) for tensor in tensors}
            if use.num_steps < MIN_STEPS:
                continue
            idle = [
                TensorFacts(
                    name=names.get(id(tensor), f"tensor {i} of shape {tuple(tensor.shape)}"),
                    is_trainable=tensor.requires_grad,
                )
                for i, tensor in enumerate(tensors)
                if id(tensor) not in use.updated
            ]
            optimizers.append(OptimizerFacts(line=use.line, num_tensors=len(tensors), idle=idle))
        self.facts = RankFacts(
            num_steps=self._num_steps,
            inputs=self._inputs,
            optimizers=optimizers,
            not_optimized=[names[one] for one in self._with_gradient if one in names and one not in held],
        )

    def _sample_replicas(self) -> None:
        """Take elements of the parameters of the DDP models that all ranks have, as the newest update left them."""
        self._is_sample_due = False
        named = [
            (name.removeprefix("module."), parameter.detach())
            for model, is_averaged in list(self.models.items())
            if is_averaged and model.process_group.size() == self._world_size and _is_averaged_by_us(model)
            for name, parameter in model.named_parameters()
            if name not in model.parameters_to_ignore
        ]
        named = named[:: 1 + len(named) // MAX_REPLICA_TENSORS]
        if named and self._world_size > 1:
            samples = [_elements(parameter) for _, parameter in named]
            self.replicas.append(
                ReplicaSample(
                    step=self._num_steps,
                    names=[name for name, _ in named],
                    digests=[zlib.crc32(_bytes(sample)) for sample in samples],
                    sizes=[size if math.isfinite(size := float(sample.double().abs().mean())) else -1.0
                           for sample in samples],
                )
            )  # fmt: skip

    # --- models -----------------------------------------------------------------------------------------------------

    def see_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return DistributedDataParallel.forward that notes its model and what it was given."""

        @functools.wraps(forward)
        def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not sys.modules["torch"].compiler.is_compiling() and model.training:
                with contextlib.suppress(Exception):  # inputs may be anything
                    self._note_forward(model, args, kwargs)
            return forward(model, *args, **kwargs)

        return noted

    def _note_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        import torch

        if not torch.is_grad_enabled():
            return
        self._num_passes += 1
        if self._is_sample_due and self.are_replicas_equal():
            self._sample_replicas()
        self.models[model] = bool(model.require_backward_grad_sync)
        is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if (
            len(self._inputs) < HASHED_BATCHES
            and self.facts is None
            and model.process_group.size() == self._world_size
            and not is_capturing
        ):
            self._inputs.append(_hash(_tensors([args, kwargs])))

    def see_mode(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `train` of batch normalization that takes the statistics when a model first evaluates."""

        @functools.wraps(train)
        def noted(layer: Any, mode: bool = True) -> Any:
            if layer.training and not mode and not self._has_evaluated and self._num_steps >= MIN_STEPS:
                self._has_evaluated = True
                with contextlib.suppress(Exception):
                    self.batch_norms = self._batch_norm_facts()
            return train(layer, mode)

        return noted

    def _batch_norm_facts(self) -> BatchNormFacts | None:
        from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

        copied = {id(one) for model in list(self.ddp_models) if model.broadcast_buffers for one in model.modules()}
        updated = {one for use in list(self._optimizers.values()) for one in use.updated}
        layers = [
            layer
            for layer in list(self.batch_norm_layers)
            if isinstance(layer, _BatchNorm)
            and not isinstance(layer, SyncBatchNorm)
            and id(layer) not in copied
            and id(layer.weight) in updated  # else the copy of a model, or frozen
            and layer.num_batches_tracked is not None
            and layer.num_batches_tracked > 0
        ]
        if not layers:
            return None
        return BatchNormFacts(
            num_layers=len(layers),
            weights=sum(_hash(_tensors([layer.weight, layer.bias])) for layer in layers),  # in any order
            statistics=sum(_hash(_tensors([layer.running_mean, layer.running_var])) for layer in layers),
        )

    # --- what rank 0 sees -------------------------------------------------------------------------------------------

    def see_epoch(self, iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return DistributedSampler.__iter__ that compares a pass over the data with the one before."""

        @functools.wraps(iterate)
        def noted(sampler: Any) -> Iterator[Any]:
            line, num_passes = current_line(sys._getframe(1)), self._num_passes
            seed = sampler.seed + sampler.epoch if sampler.shuffle else None
            yield from iterate(sampler)
            if seed is None or self._num_passes == num_passes:  # it evaluates, or a wrapper takes all at once
                return
            if self._seeds.get(sampler) == seed:
                self._report_once(
                    "epoch",
                    f"the DistributedSampler shuffles each pass over the data alike, at {line}: nothing sets its epoch",
                    "call sampler.set_epoch(epoch) before each epoch",
                )
            self._seeds.setdefault(sampler, seed)

        return noted

    def see_set_epoch(self, set_epoch: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """Return DistributedSampler.set_epoch that notes the call."""

        @functools.wraps(set_epoch)
        def noted(sampler: Any, epoch: int) -> None:
            self._seeds[sampler] = None
            set_epoch(sampler, epoch)

        return noted

    def see_all_reduce(self, tensors: Iterable[Any], group: Any, frame: FrameType) -> None:
        """Look whether the tensors of an all-reduce of the program's are gradients that DDP has averaged."""
        if self.facts is None and self._is_first and not self._is_off:
            with contextlib.suppress(Exception):  # gradients may be sparse
                self._look_at_all_reduce(tensors, group, frame)

    def _look_at_all_reduce(self, tensors: Iterable[Any], group: Any, frame: FrameType) -> None:
        import torch

        if torch._C._current_graph_task_id() != -1:  # in backward: a hook of the program's, which averages for DDP
            return
        gradients = [
            parameter.grad
            for model, is_averaged in list(self.models.items())
            if is_averaged and model.process_group == (group or torch.distributed.group.WORLD)
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        places = {gradient.data_ptr() for gradient in gradients}
        tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        if any(tensor.data_ptr() in places for tensor in tensors) or _are_proportional(tensors, gradients):
            self._averaged_in.add(self._num_steps)
            if len(self._averaged_in) >= AVERAGED_TWICE_STEPS:
                self._report_once(
                    "averaged",
                    f"gradients are averaged twice: by DistributedDataParallel, and by the all_reduce at "
                    f"{current_line(frame)}",
                    f"remove the all_reduce: it costs the same time again, and as a sum makes gradients "
                    f"{self._world_size} times too large",
                )

    def see_loss(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch.autograd.backward that notes over how many elements a loss is a mean."""

        @functools.wraps(backward)
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_in_trainer or "accumulation" not in self._reported:
                with contextlib.suppress(Exception):  # a graph of another kind
                    loss = tensors if hasattr(tensors, "grad_fn") else tensors[0]
                    if (reduction := find_reduction(loss)) is not None:
                        self._losses.append(reduction)
                        self._check_trainer(reduction)
            return backward(tensors, *args, **kwargs)

        return noted

    def see_trainer(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return transformers' Trainer.training_step that notes that backward is called by it."""

        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._is_in_trainer = True
            try:
                return step(*args, **kwargs)
            finally:
                self._is_in_trainer = False

        return noted

    def _check_trainer(self, loss: Reduction) -> None:
        """Report a loss that is a mean although the Trainer takes it for a sum over the tokens of all ranks."""
        if self._is_in_trainer and loss.is_mean and loss.factor == self._world_size > 1:
            self._report_once(
                "trainer",
                f"transformers' Trainer multiplies the loss by {self._world_size}, the number of ranks, because the "
                f"model's forward takes num_items_in_batch; the model ignores it, so gradients are {self._world_size} "
                "times those of one process",
                "set model.accepts_loss_kwargs = False before you make the Trainer, or use EvenerTrainer of "
                "evener.integrations.transformers",
            )

    def _check_accumulation(self, use: _OptimizerUse) -> None:
        """Compare the losses of an update's backward passes: the same sizes in each update are meant."""
        losses, self._losses = self._losses, deque(maxlen=MAX_LOSSES)
        before, use.num_rows = use.num_rows, [loss.num_rows for loss in losses]
        sizes, kinds = set(use.num_rows), {loss.kind for loss in losses}
        if (
            len(sizes) > 1
            and before not in (None, use.num_rows)
            and len(kinds) == 1
            and all(loss.is_mean and loss.kind[1] for loss in losses)  # of batches, not of single numbers
            and len({loss.factor for loss in losses}) == 1
        ):
            self._report_once(
                "accumulation",
                f"micro-batches of {min(sizes)} and of {max(sizes)} rows count the same in one step's gradient: each "
                "loss is a mean over its own rows",
                "use reduction='sum' and divide by the rows of the whole step, or drop_last=True",
            )

    # --- files ------------------------------------------------------------------------------------------------------

    def see_save(self, save: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Return a function that saves a file, whose path is the argument at this position, and notes it."""

        @functools.wraps(save)
        def noted(*args: Any, **kwargs: Any) -> Any:
            path = args[position] if position < len(args) else kwargs.get("f", kwargs.get("filename"))
            if isinstance(path, str | os.PathLike):
                with contextlib.suppress(OSError, ValueError):
                    self._note_save(os.path.abspath(os.fspath(path)), current_line(sys._getframe(1)))
            return save(*args, **kwargs)

        return noted

    def _note_save(self, path: str, line: str) -> None:
        """Note a file in a list that the ranks of this host share, and report one that another rank saved."""
        folder, rank = run_folder(), run_rank()
        if folder is None or self._num_saves >= MAX_SAVES or "saved" in self._reported or os.getpid() != self._pid:
            return
        if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/null
            return
        self._num_saves += 1
        with open_for_append(folder / SAVES_FILE) as file:
            file.write(json.dumps([rank, path]).encode() + b"\n")
            file.seek(self._saves_read)
            new = file.readall()
        self._saves_read += len(new)
        for by, saved in (json.loads(text) for text in new.splitlines()):
            self._saved_by.setdefault(saved, by)
        first = self._saved_by[path]
        if first != rank:
            self._report_once(
                "saved",
                f"ranks {first} and {rank} both write {os.path.basename(path)}, at {line}: what one wrote is lost, or "
                "both are mixed up",
                "save behind `if rank == 0`, or with the rank in the file's name",
            )


def check_training(checks: TrainingChecks) -> dict[str, list[ModuleChange]]:
    """Return what to change in the modules when each is imported."""

    def change(owner: str | None, name: str, make: Callable[[Any], Any]) -> ModuleChange:
        def replace(module: ModuleType) -> None:
            where = module if owner is None else getattr(module, owner)
            setattr(where, name, make(getattr(where, name)))

        return replace

    changes: dict[str, list[ModuleChange]] = {
        "torch.optim.optimizer": [
            change("Optimizer", "__init__", checks.see_optimizer),
            lambda module: module.register_optimizer_step_pre_hook(checks.before_update),
            lambda module: module.register_optimizer_step_post_hook(checks.after_update),
        ],
        "torch.nn.parallel.distributed": [
            change("DistributedDataParallel", "__init__", lambda init: collect_instances(init, checks.ddp_models)),
            change("DistributedDataParallel", "forward", checks.see_forward),
        ],
        "torch.nn.modules.batchnorm": [
            change("_NormBase", "__init__", lambda init: collect_instances(init, checks.batch_norm_layers)),
            change("_NormBase", "train", checks.see_mode),
        ],
        "torch.serialization": [change(None, "save", lambda save: checks.see_save(save, 1))],
        "safetensors.torch": [change(None, "save_file", lambda save: checks.see_save(save, 1))],
    }
    if launched_rank() == 0:
        changes["torch.autograd"] = [change(None, "backward", checks.see_loss)]
        changes["transformers.trainer"] = [change("Trainer", "training_step", checks.see_trainer)]
        changes["torch.utils.data.distributed"] = [
            change("DistributedSampler", "__iter__", checks.see_epoch),
            change("DistributedSampler", "set_epoch", checks.see_set_epoch),
        ]
    return changes


def _tensors(values: Any, depth: int = 0) -> list[Any]:
    """Return the first tensors in nested lists and dicts."""
    if hasattr(values, "data_ptr"):
        return [values]
    inside = values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else ()
    found: list[Any] = []
    for one in inside if depth < MAX_DEPTH else ():
        found += _tensors(one, depth + 1)
        if len(found) >= HASHED_TENSORS:
            break
    return found[:HASHED_TENSORS]


def _are_proportional(tensors: Sequence[Any], gradients: Sequence[Any]) -> bool:
    """Return whether tensors, laid end to end, are the gradients times a number."""
    import torch

    num_elements = sum(gradient.numel() for gradient in gradients)
    if num_elements < MIN_GRADIENTS or sum(tensor.numel() for tensor in tensors) != num_elements:
        return False
    step = 1 + num_elements // HASHED_ELEMENTS
    both = _every(tensors, step), _every(gradients, step)
    return bool(torch.cosine_similarity(*both, dim=0) > MIN_COSINE)


def _every(tensors: Iterable[Any], step: int) -> Any:
    """Return each `step`th element of tensors that are laid end to end."""
    import torch

    parts, start = [], 0
    for tensor in tensors:
        parts.append(tensor.detach().reshape(-1)[start::step].float())
        start = (start - tensor.numel()) % step
    return torch.cat(parts)


def _hash(tensors: Iterable[Any]) -> int:
    """Return a hash of the shapes of tensors and of elements spread over each."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), value)
        value = zlib.crc32(_bytes(_elements(tensor)), value)
    return value


def _elements(tensor: Any) -> Any:
    """Return elements spread over a tensor, on the CPU; of a distributed one, of this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().reshape(-1)
    return flat[:: 1 + flat.numel() // HASHED_ELEMENTS].cpu().contiguous()


def _bytes(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.view(torch.uint8).numpy().tobytes())


def _is_averaged_by_us(model: Any) -> bool:
    """Return whether a DDP model has no hook of the program's own, which may average now and then only."""
    return all("evener" in str(hook) or "allreduce_hook" in str(hook) for hook, _ in model._comm_hooks)
