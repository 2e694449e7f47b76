"""The run spec: what to train and how, one tree of frozen structs that is read from flags or from a TOML file.

Every leaf has one name, the same in the file (`[train] steps = 100`) and as a flag (`--steps 100`); leaf names are
unique over the tree. Help, reference page and error messages are generated from the annotations below.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from evener.core.base.decoding import from_builtins, from_toml
from evener.core.base.errors import UsageError, did_you_mean
from evener.core.base.file_io import read_file
from evener.core.base.units import parse_count
from evener.core.model.pretrained import model_name

Count = Annotated[int, Meta(ge=1, le=2**31)]
ProcessCount = Annotated[int, Meta(ge=1, le=1024)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
NonNegative = Annotated[float, Meta(ge=0)]
PRETRAINED_PREFIX = "hf:"  # of --model


class SpecSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the TOML file."""


class DataSpec(SpecSection, frozen=True, kw_only=True):
    """The corpus."""

    data: Annotated[str, Meta(description="folder that `evener data` or nanoGPT prepared")] = "data/verbs"


class ModelSpec(SpecSection, frozen=True, kw_only=True):
    """The model and its arithmetic."""

    model: Annotated[
        str,
        Meta(description="preset: tiny, char, g1 to g12, gpt2, gpt2-medium, -large, -760m, -xl, d4 to d20; or "
                         "hf:FOLDER, or hf:ORG/NAME of the Hugging Face hub: fine-tune a causal language model"),
    ] = "char"  # fmt: skip
    lora: Annotated[
        Count | None,
        Meta(description="with hf:FOLDER: rank of LoRA adapters, which alone are trained [all weights are]"),
    ] = None
    dora: Annotated[
        bool, Meta(description="with --lora: DoRA: the magnitude of each adapted row is trained as well, apart from it")
    ] = False
    quantize: Annotated[
        Literal["off", "nf4", "int8"],
        Meta(description="with --lora: frozen weights in 4 bits (nf4, as QLoRA) or 8 (int8), by bitsandbytes"),
    ] = "off"
    block_size: Annotated[Count | None, Meta(description="tokens of context [preset's]")] = None
    num_layers: Annotated[Count | None, Meta(description="transformer blocks [preset's]")] = None
    num_heads: Annotated[Count | None, Meta(description="attention heads [preset's]")] = None
    width: Annotated[Count | None, Meta(description="of the residual stream [preset's]")] = None
    dropout: Annotated[Fraction | None, Meta(description="share of activations dropped [preset's]")] = None
    init_from: Annotated[
        str | None,
        Meta(description="weights to start from: a run, a checkpoint, a transformers folder, GPT-2's file"),
    ] = None
    recompute: Annotated[bool, Meta(description="activation checkpointing: less memory, more time")] = False
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Meta(description="auto: on each rank bf16 if its device has it in hardware, else fp32"),
    ] = "auto"
    compile: Annotated[
        Literal["auto", "on", "off"], Meta(description="torch.compile; auto: if the run is long enough to repay it")
    ] = "auto"

    @property
    def pretrained(self) -> Path | None:
        """The folder of a pretrained model; None for a preset."""
        return Path(self.model.removeprefix(PRETRAINED_PREFIX)) if self.model.startswith(PRETRAINED_PREFIX) else None

    @property
    def name(self) -> str:
        """The name of the preset, or of the pretrained model's folder."""
        return self.model if self.pretrained is None else model_name(self.pretrained)


class TrainSpec(SpecSection, frozen=True, kw_only=True):
    """The training settings. AdamW's are those of nanoGPT's character model."""

    steps: Annotated[Count, Meta(description="optimizer steps")] = 200
    batch: Annotated[Count, Meta(description="sequences in one global batch, over all ranks")] = 16
    sampling: Annotated[
        Literal["epochs", "uniform"], Meta(description="epochs: every block once per epoch; uniform: drawn at random")
    ] = "epochs"
    packing: Annotated[
        bool, Meta(description="with hf:FOLDER: several samples in one sequence, which do not attend to each other")
    ] = False
    micro_batch: Annotated[Count | None, Meta(description="sequences in one backward [16384 tokens at most]")] = None
    sync: Annotated[
        str,
        Meta(description="sync strategy: ddp, packed, bf16, int8, int4, powersgd:4, each also with +sparse; "
                         "fsdp or zero1: weights and optimizer state divided among the ranks; "
                         "hsdp: among those of each host; "
                         "diloco:10, diloco:10:int8:streamed; auto: the fastest within --loss-budget"),
    ] = "auto"  # fmt: skip
    loss_budget: Annotated[
        float,
        Meta(ge=0, le=100, description="percent of loss at equal tokens that --sync auto may cost; 0: exact ones only"),
    ] = 1.0
    lr: Annotated[NonNegative | None, Meta(description="peak learning rate [0.5 / width; less with a small batch]")] = (
        None
    )
    min_lr: Annotated[NonNegative | None, Meta(description="learning rate at the end [lr / 10]")] = None
    warmup: Annotated[
        CountOrZero | None,
        Meta(description="steps of linear warmup [steps / 20; at least 100, but no more than steps / 4]"),
    ] = None
    weight_decay: Annotated[NonNegative, Meta(description="of AdamW, on matrices")] = 0.1
    beta1: Annotated[Fraction, Meta(description="AdamW's decay rate of the mean gradient")] = 0.9
    beta2: Annotated[Fraction, Meta(description="AdamW's decay rate of the mean squared gradient")] = 0.99
    clip: Annotated[NonNegative, Meta(description="global gradient norm to clip at; 0: no clipping")] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, description="of weights, sampling and dropout")] = 1337
    max_s: Annotated[NonNegative | None, Meta(description="save and stop after this many seconds")] = None

    @property
    def peak_lr(self) -> float:
        """Return the peak learning rate. `resolve` sets it where the user does not, as it depends on the model."""
        assert self.lr is not None
        return self.lr


class EvalSpec(SpecSection, frozen=True, kw_only=True):
    """Evaluation during training."""

    eval_every: Annotated[CountOrZero, Meta(description="steps between evaluations; 0: only at the end")] = 100
    eval_tokens: Annotated[Count, Meta(description="tokens of the validation split in one evaluation")] = 16384


class CheckpointSpec(SpecSection, frozen=True, kw_only=True):
    """Checkpoints and replica checks."""

    checkpoint_every: Annotated[CountOrZero, Meta(description="steps between checkpoints; 0: only at the end")] = 100
    keep: Annotated[Count, Meta(description="newest checkpoints to keep, in addition to the best one")] = 2
    verify_every: Annotated[CountOrZero, Meta(description="steps between replica checks; 0: only at the end")] = 100


class MachineSpec(SpecSection, frozen=True, kw_only=True):
    """Processes, devices, shares and membership."""

    ranks: Annotated[ProcessCount, Meta(description="processes on this machine")] = 1
    threads: Annotated[ProcessCount | None, Meta(description="processor threads per rank [cores / ranks]")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda if every rank has one")] = "auto"
    backend: Annotated[
        Literal["auto", "gloo", "nccl"], Meta(description="auto: nccl if every rank has its own GPU")
    ] = "auto"
    shares: Annotated[
        str, Meta(description="shares of a batch by rank: auto: by measured speed; equal; or such as 3:1, 0: none")
    ] = "auto"
    membership: Annotated[
        Literal["auto", "fixed", "restart", "live"],
        Meta(
            description="if a host is lost: live: the other ranks continue; restart: they restart from the checkpoint; "
            "fixed: the run ends; auto: live on CPUs, else restart, as with fsdp, hsdp and zero1"
        ),
    ] = "auto"
    private: Annotated[bool, Meta(description="start only if a firewall admits only the run's hosts to its ports")] = (
        False
    )
    contention: Annotated[bool, Meta(description="before training, time every rank alone and then all at once")] = False
    profile: Annotated[
        int, Meta(ge=0, le=1000, description="steps to record with torch's profiler, for evener trace; they are slower")
    ] = 0
    profile_ranks: Annotated[str, Meta(description="ranks to profile: such as 0,2; or all")] = "0"

    def is_profiled(self, rank: int) -> bool:
        """Return whether torch's profiler records steps of this rank."""
        return self.profile > 0 and (self.profile_ranks == "all" or str(rank) in self.profile_ranks.split(","))

    @property
    def has_explicit_shares(self) -> bool:
        """Return whether `--shares` gives each rank a weight."""
        return self.shares not in ("auto", "equal")


class RunSpec(SpecSection, frozen=True, kw_only=True):
    """A whole run. `RunSpec()` trains nanoGPT's character model on the verb corpus."""

    out: Annotated[str | None, Meta(description="run directory [runs/DATE-MODEL-DATA]")] = None
    data: DataSpec = DataSpec()
    model: ModelSpec = ModelSpec()
    train: TrainSpec = TrainSpec()
    eval: EvalSpec = EvalSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    machine: MachineSpec = MachineSpec()

    def check(self) -> None:
        """Raise UsageError for values that are valid one by one but not together."""
        train, machine = self.train, self.machine
        for flag in FLAGS.values():
            value = flag.value(self)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag.name} {value}: expected a finite number")
            if isinstance(value, str) and ("\0" in value or not value.strip()):
                raise UsageError(f"{flag.name} {value!r}: expected a name")
        if machine.ranks > train.batch and not machine.has_explicit_shares:
            raise UsageError(
                f"--ranks {machine.ranks}: more ranks than the {train.batch} sequences of one batch",
                hint=f"--batch {machine.ranks} or more gives every rank something to do",
            )
        if train.min_lr is not None and train.lr is not None and train.min_lr > train.lr:
            raise UsageError(f"--min-lr {train.min_lr:g}: greater than --lr {train.lr:g}")
        if train.warmup is not None and train.warmup > train.steps:
            raise UsageError(f"--warmup {train.warmup}: longer than --steps {train.steps}")
        if machine.profile_ranks != "all" and not re.fullmatch(r"\d+(,\d+)*", machine.profile_ranks):
            raise UsageError(f"--profile-ranks {machine.profile_ranks}: expected ranks such as 0,2; or all")
        if self.model.pretrained is None and (self.model.lora or train.packing):
            what = f"--lora {self.model.lora}" if self.model.lora else "--packing"
            raise UsageError(f"{what}: --model {self.model.model} is not pretrained", hint="--model hf:FOLDER")
        if self.model.quantize != "off" and not self.model.lora:
            raise UsageError(
                f"--quantize {self.model.quantize}: quantized weights cannot be trained",
                hint=f"--lora 16 --quantize {self.model.quantize}",
            )
        if self.model.quantize == "int8" and self.model.dora:
            raise UsageError("--dora --quantize int8: peft has no DoRA of 8-bit layers", hint="--dora --quantize nf4")
        if self.model.dora and not self.model.lora:
            raise UsageError("--dora: it needs the rank of its adapters", hint="--lora 16 --dora")
        if machine.backend == "nccl" and machine.device == "cpu":
            raise UsageError("--backend nccl: NCCL moves GPU memory only, and --device is cpu", hint="--backend gloo")


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf of the tree as the command line sees it."""

    name: str  # "--micro-batch"
    field: str  # "micro_batch"
    section: str  # "train"; "" for the root
    kind: str  # "whole number", "number", "text", "yes or no", "auto|on|off"
    default: Any
    help: str

    def value(self, spec: RunSpec) -> Any:
        """Return this leaf's value in a spec."""
        return getattr(getattr(spec, self.section) if self.section else spec, self.field)


def _kind(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    options = [option for option in get_args(hint) if option is not type(None)]
    if options:
        return _kind(options[0])
    return {int: "whole number", float: "number", bool: "yes or no", str: "text"}[hint]


def _description(hint: Any) -> str:
    described = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, Meta) and meta.description]
    return described[0] if described else ""


def _flags() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    sections = {"": RunSpec} | {
        name: kind for name, kind in get_type_hints(RunSpec).items() if isinstance(kind, type) and name != "out"
    }
    for section, struct in sections.items():
        for field, hint in get_type_hints(struct, include_extras=True).items():
            if section == "" and field in sections:
                continue
            assert field not in flags, f"two leaves of RunSpec are called {field}"
            flags[field] = Flag(
                name="--" + field.replace("_", "-"),
                field=field,
                section=section,
                kind=_kind(hint),
                default=getattr(struct(), field),
                help=_description(hint),
            )
    return flags


FLAGS: dict[str, Flag] = _flags()


def parse_args(args: Sequence[str]) -> RunSpec:
    """Parse `[SPEC.toml] [--name value | --name=value | --switch | --no-switch]…` into a checked RunSpec.

    >>> parse_args(["--steps", "20", "--ranks=2"]).train.steps
    20
    """
    file: Path | None = None
    texts: dict[str, str] = {}
    remaining = iter(args)
    for arg in remaining:
        if not arg.startswith("--"):
            if file is not None or texts:
                raise UsageError(f"{arg}: expected a flag; at most one TOML file comes first")
            file = Path(arg)
            continue
        name, _, value = arg[2:].partition("=")
        field, switched_on = name.replace("-", "_"), True
        if field.startswith("no_") and field[3:] in FLAGS:
            field, switched_on = field[3:], False
        if field not in FLAGS:
            raise UsageError(
                f"--{name}: no such flag", hint=did_you_mean(f"--{name}", [f.name for f in FLAGS.values()])
            )
        if "=" not in arg:
            if FLAGS[field].kind == "yes or no":
                value = "true" if switched_on else "false"
            elif (value := next(remaining, None)) is None:  # type: ignore[assignment]
                raise UsageError(f"--{name}: expected a value after it: {FLAGS[field].kind}")
        texts[field] = value
    return make_spec(file, texts)


def make_spec(file: Path | None, texts: Mapping[str, str], base: RunSpec | None = None) -> RunSpec:
    """Return the checked RunSpec of `base`, overridden by a TOML file and then by flags whose values are still text."""
    base = base or RunSpec()
    spec = _read_toml(file, base) if file else base
    tree: dict[str, Any] = msgspec.to_builtins(spec)
    for field, text in texts.items():
        flag = FLAGS[field]
        table = tree[flag.section] if flag.section else tree
        table[field] = None if text == "" and flag.default is None else text
        choices = ["true", "false"] if flag.kind == "yes or no" else flag.kind.split("|") if "|" in flag.kind else []
        if choices and text not in choices:
            raise UsageError(f"{flag.name} {text!r}: expected {' or '.join(choices)}")
        if flag.kind == "whole number" and (count := parse_count(text)) is not None and count == int(count):
            table[field] = int(count)  # 5k
        if text.lower() == "null" and "number" in flag.kind:  # which msgspec takes for None
            raise UsageError(f"{flag.name} {text!r}: expected a {flag.kind}")
        try:
            spec = from_builtins(tree, RunSpec, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"{flag.name} {text!r}: {_expected(error)}") from None
        tree = msgspec.to_builtins(spec)
    spec.check()
    return spec


def given_fields(file: Path | None, texts: Mapping[str, str]) -> set[str]:
    """Return the names of the leaves that a TOML file or flags give a value."""
    tables = [value for value in _toml_tree(file).values() if isinstance(value, dict)] if file else []
    return set(texts).union(*tables)


def to_flags(spec: RunSpec) -> list[str]:
    """Return the shortest argument list that `parse_args` reads back as `spec`.

    >>> to_flags(parse_args(["--steps=20", "--model", "tiny", "--recompute"]))
    ['--model=tiny', '--recompute=true', '--steps=20']
    """
    changed = [flag for flag in FLAGS.values() if flag.value(spec) != flag.default]
    return [f"{flag.name}={_as_text(flag.value(spec))}" for flag in changed]


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _toml_tree(file: Path) -> dict[str, Any]:
    """Read a TOML file. Raise UsageError if it cannot be read or is not TOML."""
    try:
        return from_toml(read_file(file).decode())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", hint="flags begin with --") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not TOML: {error}") from None


def _read_toml(file: Path, base: RunSpec) -> RunSpec:
    tree = _toml_tree(file)
    sections = {flag.section for flag in FLAGS.values()} - {""}
    for key, value in tree.items():
        fields = [f.field for f in FLAGS.values() if f.section == key]
        if key in sections and isinstance(value, dict):
            for field in value:
                if field not in fields:
                    raise UsageError(f"{file}: no key {field} in [{key}]", hint=_section_hint(field, fields))
        elif key not in sections and key != "out":
            raise UsageError(f"{file}: no key {key}", hint=_section_hint(key, [*sections, "out"]))
    whole: dict[str, Any] = msgspec.to_builtins(base)
    for key, value in tree.items():
        whole[key] = whole[key] | value if key in sections and isinstance(value, dict) else value
    try:
        return from_builtins(whole, RunSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {_expected(error)}{_at(error)}") from None


def _section_hint(field: str, known: Sequence[str]) -> str:
    if field in FLAGS and FLAGS[field].section:
        return f"{field} belongs in [{FLAGS[field].section}]"
    return did_you_mean(field, known)


def _expected(error: msgspec.ValidationError) -> str:
    text = str(error).partition(" - at ")[0].replace("`", "")
    text = text[0].lower() + text[1:]
    for ours, theirs in (("a whole number", r"\bint\b"), ("a number", r"\bfloat\b"), ("text", r"\bstr\b")):
        text = re.sub(theirs, ours, text)
    return re.sub(r"\| null", "or nothing", text).replace("null", "nothing").replace(" bool", " true or false")


def _at(error: msgspec.ValidationError) -> str:
    path = str(error).partition(" - at `$.")[2].rstrip("`")
    return f", at {path}" if path else ""
