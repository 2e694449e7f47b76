"""Other people's programs, with their own command lines, launched unchanged on two emulated hosts.

    python bench/programs.py --programs DIR [--only NAME,…]

DIR holds checkouts (nanochat, nanoGPT, torchtitan, pytorch/examples as `examples`); what is not there, and packages
that are not installed, are skipped and named. A program that trains prints its losses: those of two hosts must be
those of torchrun with two local ranks, within 1e-5. A program that cannot train here must end with a reason, by itself
or by evener.
Every program adds a line to bench/programs.jsonl. Needs Linux and root.

nanochat's base_train is run twice: as it is, and with the line that its README leaves to people without a GPU (a
process group on the CPU). Its data are made of Python's library, with its own tokenizer trainer. Its chat_sft begins
from a model of a few steps, and reads conversations, questions and sums made here in place of those of the hub.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec

RESULTS = Path(__file__).with_name("programs.jsonl")
EVENER_COMMAND = (sys.executable, "-c", "from evener.cli.main import main; main()")
TOLERANCE, TIMEOUT_S = 1e-5, 600.0
NANOCHAT_FLAGS = (
    "--device-type=cpu --depth=4 --max-seq-len=256 --device-batch-size=1 --total-batch-size=512 --num-iterations=12 "
    "--eval-every=-1 --core-metric-every=-1 --sample-every=-1 --window-pattern L"
)
NANOCHAT_SFT_FLAGS = (
    "--device-type=cpu --num-iterations=12 --load-optimizer=0 --eval-every=-1 --eval-tokens=1024 --chatcore-every=-1"
)
# reduce-scatter with a future, which Gloo lacks: for the reference, by torchrun alone
REFERENCE_NANOCHAT = """
import runpy, sys, torch, torch.distributed as dist
def reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    whole, future = input.clone(), torch.futures.Future()
    dist.all_reduce(whole, op=op)
    output.copy_(whole.view(dist.get_world_size(), *output.shape)[dist.get_rank()])
    future.set_result([output])
    class Done:
        get_future = staticmethod(lambda: future)
    return Done()
dist.reduce_scatter_tensor = reduce_scatter
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class ProgramCase:
    """A program, how it is started, and what must come of it."""

    name: str
    folder: str  # in --programs; "" for a script of a package
    argv: str  # after `evener launch --`, or torchrun's options before it
    losses: str = ""  # a pattern of the lines of rank 0, whose group is a loss; "": it does not train here
    reason: str = ""  # that must be printed if it does not train
    packages: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # variables that are passed
    reference: str = ""  # another argv for torchrun
    prepare: Callable[[Path], None] = field(default=lambda folder: None)  # changes a copy of the checkout


def add_gloo_group(folder: Path) -> None:
    """Have nanochat make a process group where there is no CUDA."""
    path = folder / "nanochat" / "common.py"
    text = path.read_text()
    before = "    else:\n        device = torch.device(device_type) # mps|cpu\n\n    if ddp_rank"
    assert text.count(before) == 1
    group = "    else:\n        if is_ddp_requested:\n            dist.init_process_group(backend='gloo')\n"
    path.write_text(text.replace(before, group + before.removeprefix("    else:\n")))
    (folder / "reference.py").write_text(REFERENCE_NANOCHAT)


def write_accelerate_script(folder: Path) -> None:
    (folder / "checks.py").write_text(
        "import os\nfrom accelerate.test_utils.scripts.test_sync import main\n"
        "main()\nif os.environ['RANK'] == '0':\n    print('loss 0', flush=True)\nos._exit(0)\n"
    )


def write_trainer_script(folder: Path) -> None:
    (folder / "trainer.py").write_text(
        """
import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
data = [{"input_ids": (x := torch.randint(0, 64, (32,))), "labels": x} for _ in range(128)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0,
                                   embd_pdrop=0.0, attn_pdrop=0.0))
args = TrainingArguments("out", max_steps=8, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                         logging_steps=1, save_strategy="no", disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry and trainer.args.process_index == 0:
        print("loss", entry["loss"], flush=True)
os._exit(0)
"""
    )


def write_lightning_script(folder: Path) -> None:
    (folder / "boring.py").write_text(
        """
import os, torch, lightning
from lightning.pytorch.demos.boring_classes import BoringModel
class Printing(BoringModel):
    def on_train_batch_end(self, outputs, batch, index):
        if self.global_rank == 0:
            print("loss", outputs["loss"].item(), flush=True)
lightning.seed_everything(0)
trainer = lightning.Trainer(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                            num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
                            strategy="ddp", max_steps=8, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, limit_val_batches=0)
trainer.fit(Printing())
os._exit(0)
"""
    )


def write_sft_inputs(folder: Path) -> None:
    """Write a small model, its tokenizer and some conversations, as TRL's own script reads them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    texts = [path.read_text(errors="ignore")[:2000] for path in sorted(Path(os.__file__).parent.glob("*.py"))[:64]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=512, special_tokens=["<end>", "<pad>"]))
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder / "tiny")
    shape = GPT2Config(vocab_size=512, n_positions=256, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=1)  # fmt: skip
    GPT2LMHeadModel(shape).save_pretrained(folder / "tiny")
    (folder / "data").mkdir()
    rows = [json.dumps({"prompt": text[:100], "completion": text[100:300]}) for text in texts]
    (folder / "data" / "train.jsonl").write_text("\n".join(rows) + "\n")


def write_deepspeed_script(folder: Path) -> None:
    (folder / "zero.py").write_text(
        """
import deepspeed, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 8, (64,)))
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
engine, _, loader, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), training_data=data,
                                            config=config)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print("loss", loss.item(), flush=True)
"""
    )


SFT_FLAGS = (
    "--model_name_or_path tiny --dataset_name data --dataset_train_split train --output_dir out --max_steps 8 "
    "--per_device_train_batch_size 2 --logging_steps 1 --use_cpu --bf16 False --report_to none --save_strategy no "
    "--disable_tqdm True --gradient_checkpointing False --learning_rate 1e-3 --dtype float32"
)
CASES = (
    ProgramCase("nanochat base_train", "nanochat", f"-m scripts.base_train {NANOCHAT_FLAGS}",
                reason="the 2 ranks have no process group", packages=("rustbpe", "wandb"), env=("NANOCHAT_BASE_DIR",)),
    ProgramCase("nanochat base_train, with a group", "nanochat", f"-m scripts.base_train {NANOCHAT_FLAGS}",
                losses=r"step \d+/\d+ .*\| loss: ([\d.]+)", packages=("rustbpe", "wandb"), env=("NANOCHAT_BASE_DIR",),
                reference=f"reference.py scripts.base_train {NANOCHAT_FLAGS}", prepare=add_gloo_group),
    ProgramCase("nanochat chat_sft, with a group", "nanochat", f"-m scripts.chat_sft {NANOCHAT_SFT_FLAGS}",
                losses=r"step \d+ \(.*\| loss: ([\d.]+)", packages=("rustbpe", "wandb"), env=("NANOCHAT_BASE_DIR",),
                reference=f"reference.py scripts.chat_sft {NANOCHAT_SFT_FLAGS}", prepare=add_gloo_group),
    ProgramCase("nanoGPT train", "nanoGPT", "torchrun --standalone --nproc_per_node=1 train.py "
                "config/train_shakespeare_char.py --device=cpu --backend=gloo --compile=False",
                reason="the script asks for a GPU"),
    ProgramCase("pytorch/examples ddp", "examples/distributed/ddp", "example.py", reason="sufficient 2 gpus"),
    ProgramCase("pytorch/examples minGPT-ddp", "examples/distributed/minGPT-ddp/mingpt", "main.py",
                reason="sufficient 2 gpus", packages=("hydra", "omegaconf")),
    ProgramCase("pytorch/examples FSDP2", "examples/distributed/FSDP2", "example.py", reason="sufficient 2 gpus"),
    ProgramCase("accelerate test_sync", "", "checks.py", losses=r"loss ([\d.]+)", packages=("accelerate",),
                prepare=write_accelerate_script),
    ProgramCase("transformers Trainer", "", "accelerate launch --cpu --num_processes 2 trainer.py",
                losses=r"loss ([\d.]+)", reference="trainer.py", packages=("transformers", "accelerate"),
                prepare=write_trainer_script),
    ProgramCase("DeepSpeed ZeRO-1", "", "deepspeed zero.py", losses=r"loss ([\d.]+)", reference="zero.py",
                packages=("deepspeed",), prepare=write_deepspeed_script),
    ProgramCase("TRL sft", "", f"-m trl.scripts.sft {SFT_FLAGS}", losses=r"'loss': '?([\d.]+)",
                packages=("trl", "datasets"), prepare=write_sft_inputs),
    ProgramCase("torchtitan debug model", "torchtitan",
                "-m torchtitan.train --module llama3 --config llama3_debugmodel",
                reason="CUDA", packages=("tyro", "spmd_types")),
    ProgramCase("torchtitan run_train.sh", "torchtitan", "bash run_train.sh",
                reason="torchrun starts ranks of its own"),
    ProgramCase("Lightning BoringModel", "", "python boring.py", losses=r"loss ([\d.]+)", reference="boring.py",
                packages=("lightning",), prepare=write_lightning_script),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of programs, or parts of them")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab is taken down
    wanted = [word for word in options.only.split(",") if word] or [""]
    cases = [case for case in CASES if any(word in case.name for word in wanted)]
    with tempfile.TemporaryDirectory(prefix="evener-programs-") as name:
        folder = Path(name)
        lab = EmulatedLab.up(LabSpec(name="programs", hosts={"a": HostSpec(), "b": HostSpec()}), out=folder / "f.toml")
        try:
            for case in cases:
                row = run_case(case, options.programs.absolute(), folder, len(list(folder.iterdir())))
                if "skipped" not in row:
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
        finally:
            lab.down()


def run_case(case: ProgramCase, programs: Path, folder: Path, number: int) -> dict[str, object]:
    """Launch a program and judge it, as a row of the results."""
    row: dict[str, object] = {"program": case.name, "date": time.strftime("%Y-%m-%d")}
    missing = [package for package in case.packages if importlib.util.find_spec(package) is None]
    if missing or not (programs / case.folder).is_dir():
        return row | {"skipped": f"not installed: {', '.join(missing)}" if missing else f"no {case.folder}"}
    project = folder / f"project-{number}"
    if case.folder:
        shutil.copytree(programs / case.folder, project, ignore=shutil.ignore_patterns(".git"))
    else:
        project.mkdir()
    case.prepare(project)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if "NANOCHAT_BASE_DIR" in case.env:  # in the project, which is sent
        shutil.copytree(prepare_nanochat(programs, folder), project / "base")
        env |= {"NANOCHAT_BASE_DIR": "base"}
    argv = [*EVENER_COMMAND, "launch", "--fleet", str(folder / "f.toml"), "--out", "runs/launched"]
    argv += [word for name in case.env for word in ("--env", name)] + [
        "--env",
        "OMP_NUM_THREADS",
        "--env",
        "HF_HUB_OFFLINE",
        "--",
    ]
    began = time.monotonic()
    done = subprocess.run([*argv, *case.argv.split()], cwd=project, env=env, capture_output=True, text=True,
                          timeout=TIMEOUT_S, check=False)  # fmt: skip
    row |= {"took_s": round(time.monotonic() - began, 1), "status": done.returncode}
    printed = done.stdout + done.stderr
    if not case.losses:
        reason = next((line for line in printed.splitlines() if case.reason in line), "")
        return row | {"refused": reason[:300], "is_right": bool(reason)}
    log = RunDir(project / "runs/launched").log_path("a", 0)
    losses = find_losses(case, log.read_text() if log.exists() else "")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        *(case.reference or case.argv).split(),
    ]
    reference = subprocess.run(torchrun, cwd=project, env=env | {"ACCELERATE_USE_CPU": "true"}, capture_output=True,
                               text=True, timeout=TIMEOUT_S, check=False)  # fmt: skip
    expected = find_losses(case, reference.stdout + reference.stderr)
    off = max((abs(a - b) for a, b in zip(losses, expected, strict=False)), default=None)
    is_right = done.returncode == 0 and off is not None and len(losses) == len(expected) and off <= TOLERANCE
    problem = (
        {} if is_right else {"printed": printed[-2000:], "reference": (reference.stdout + reference.stderr)[-500:]}
    )
    return row | {"losses": losses, "off": off, "is_right": is_right} | problem


def find_losses(case: ProgramCase, text: str) -> list[float]:
    return [float(match[1]) for match in re.finditer(case.losses, text)]


def prepare_nanochat(programs: Path, folder: Path) -> Path:
    """Return nanochat's base folder, with data of Python's library and a tokenizer trained on them."""
    base = folder / "nanochat-base"
    if base.exists():
        return base
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = base / "base_data_climbmix"
    data.mkdir(parents=True)
    texts = [path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    for shard, part in enumerate((texts[:60], texts[60:120], texts[120:])):
        pq.write_table(pa.table({"text": part}), data / f"shard_{shard:05d}.parquet", row_group_size=8)
    argv = [sys.executable, "-m", "scripts.tok_train", "--max-chars", "4000000", "--vocab-size", "4096"]
    env = os.environ | {"NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}
    base_train = [sys.executable, "-m", "scripts.base_train", *NANOCHAT_FLAGS.split()]  # what chat_sft begins from
    for command in (argv, base_train):
        subprocess.run(command, cwd=programs / "nanochat", env=env, check=True, capture_output=True)
    # chat_sft validates on 5,200 of the questions and on 420 of the sums
    words = sorted({word for text in texts[:20] for word in text.split() if word.isalpha()})
    talk = [{"messages": [{"role": "user", "content": f"What comes after {a}?"}, {"role": "assistant", "content": b}]}
            for a, b in pairwise(words[:400])]  # fmt: skip
    questions = [{"question": f"Which one is {word}?", "choices": ["no", word, "not", "none"], "answer": 1,
                  "subject": "anatomy"} for word in words[:200]] * 26  # fmt: skip
    sums = [{"question": f"{i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(500)]
    for dataset, splits, rows in (("HuggingFaceTB--smol-smoltalk/default", ("train", "test"), talk),
                                  ("cais--mmlu/all", ("auxiliary_train", "test"), questions),
                                  ("openai--gsm8k/main", ("train", "test"), sums)):  # fmt: skip
        for split in splits:  # as nanochat's load_hub_dataset leaves what it has downloaded
            shards = base / "task_data" / dataset / split
            shards.mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist(rows), shards / "00000.parquet")
            (shards / "manifest.json").write_text('["00000.parquet"]')
    return base


if __name__ == "__main__":
    main()
