"""Find the program in what people type after `evener launch --`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evener.core.base.errors import UsageError
from evener.launch.script.program_arguments import parse_program
from evener.launch.script.script_options import script_options, script_resume_args


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.py").write_text("print(1)\n")
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\nprint(1)\n")
    (tmp_path / "run.sh").write_text("set -e  # torchrun x.py is not called\npython x.py\n")
    (tmp_path / "job").write_text("#!/usr/bin/env bash\npython x.py\n")
    (tmp_path / "ranks.sh").write_text("cd .\n\nOMP_NUM_THREADS=1 torchrun --nproc-per-node 2 x.py --lr 1\n")
    (tmp_path / "strict").write_text("#!/usr/bin/env -S bash -e\npython x.py\n")
    (tmp_path / "prog").write_bytes(b"\x7fELF")
    (tmp_path / "mentions.sh").write_text(
        "conda activate deepspeed && python x.py --strategy deepspeed\npip install deepspeed\n"
        "command -v torchrun >/dev/null\necho starting torchrun now\nexport BACKEND=deepspeed ; python x.py\n"
    )
    (tmp_path / "given.sh").write_text('torchrun --nproc-per-node ${NUM} x.py "$@"\n')
    (tmp_path / "later.sh").write_text("echo '#1'; torchrun \\\n  --nproc-per-node 2 x.py | tee log\n")
    (tmp_path / "mpi.sh").write_text("mpirun -np 2 python x.py\n")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "argv", "ranks"),
    [
        ("x.py --lr 1", "x.py --lr 1", None),
        ("-m package.module --lr 1", "-m package.module --lr 1", None),
        ("python x.py -m 3", "x.py -m 3", None),
        ("python3.11 -u -W ignore -m package.module a", "-m package.module a", None),
        ("/usr/bin/python3 -X dev x.py", "x.py", None),
        ("uv run python x.py", "x.py", None),
        ("uv run torchrun --standalone --nproc-per-node=2 x.py --nproc-per-node 9", "x.py --nproc-per-node 9", 2),
        ("torchrun --nproc_per_node 4 --nnodes 2 --rdzv-id=1 x.py a", "x.py a", 4),
        ("torchrun --nproc-per-node gpu x.py", "x.py", None),
        ("torchrun --nproc-per-node 2 -m package.module a", "-m package.module a", 2),
        ("torchrun --no-python --nproc-per-node 2 bash run.sh a", "--no-python bash run.sh a", 2),
        ("python -m torch.distributed.run --nproc-per-node 2 x.py", "x.py", 2),
        ("accelerate launch --cpu --num_processes 4 --mixed_precision bf16 x.py --cpu", "x.py --cpu", None),
        ("accelerate launch -m package.module", "-m package.module", None),
        ("deepspeed --num_gpus 2 --hostfile hosts x.py --deepspeed ds.json", "x.py --deepspeed ds.json", 2),
        ("trl sft --num_processes 2 --lr 1", "-m trl.scripts.sft --lr 1", None),
        ("trl dpo --accelerate_config=zero2 --lr 1", "-m trl.scripts.dpo --lr 1", None),
        ("pytest -q", "--no-python pytest -q", None),
        ("bash run.sh --lr 1", "--no-python bash run.sh --lr 1", None),
        ("./run.sh", "--no-python bash run.sh", None),
        ("./job a", "--no-python bash job a", None),
        ("tool a", "tool a", None),
        ("python -m torch.distributed.launch --nproc_per_node 2 --use_env x.py run.sh", "x.py run.sh", 2),
        ("torchrun -t3 x.py", "x.py", None),
        ("/bin/bash run.sh", "--no-python /bin/bash run.sh", None),
        ("bash -e run.sh a", "--no-python bash -e run.sh a", None),
        ("/usr/bin/env python3 x.py", "x.py", None),
        ("accelerate-launch x.py", "x.py", None),
        ("torchrun --no-python --nproc-per-node 2 ./prog a", "--no-python ./prog a", 2),
        ("strict", "--no-python bash -e strict", None),
        ("mentions.sh", "--no-python bash mentions.sh", None),
    ],
)
def test_program_is_taken_out_of_what_people_type(folder: Path, typed: str, argv: str, ranks: int | None) -> None:
    program = parse_program(typed.split(), folder)
    assert (" ".join(program.argv), program.ranks) == (argv, ranks)
    assert program.project == folder


def test_translation_is_a_command(folder: Path) -> None:
    described = parse_program(["torchrun", "--nproc-per-node", "2", "x.py", "--lr", "1"], folder).describe(2)
    assert described.endswith("without torchrun --nproc-per-node 2: evener launch --ranks 2 -- x.py --lr 1")
    assert not parse_program(["x.py"], folder).is_translated


@pytest.mark.parametrize(
    ("typed", "error", "hint"),
    [
        ("y.py", "y.py: no such script", "evener launch -- x.py ARGS"),
        ("-m", "-m: expected a module after it", "package.module"),
        ("python -c print(1)", "python -c: evener launch starts files and modules", "SCRIPT.py"),
        ("python --fast x.py", "python --fast: an unknown option of Python", "SCRIPT.py"),
        ("torchrun --nproc-per-node 2", "which program?", "SCRIPT.py"),
        ("bash -c x", "bash -c x: expected a shell script", "bash run.sh"),
        ("bash ranks.sh", "ranks.sh, line 3: torchrun starts ranks of its own", "-- torchrun --nproc-per-node 2 x.py"),
        ("./later.sh", "later.sh, line 1: torchrun starts", "evener launch -- torchrun --nproc-per-node 2 x.py"),
        ("bash given.sh", "given.sh, line 1: torchrun starts", "with the script's variables filled in"),
        ("LR=1 python x.py", "LR=…: not a program", "evener launch --env LR=VALUE"),
        ("./mpi.sh", "mpi.sh, line 1: mpirun starts ranks of its own", "evener launch -- mpirun"),
        ("mpirun -np 2 python x.py a", "mpirun starts ranks of its own", "evener launch -- x.py a"),
        ("srun --ntasks 2 tool", "srun starts ranks of its own", "evener launch -- SCRIPT.py ARGS"),
    ],
)
def test_what_starts_no_program_is_refused_with_the_next_command(
    folder: Path, typed: str, error: str, hint: str
) -> None:
    with pytest.raises(UsageError) as raised:
        parse_program(typed.split(), folder)
    assert error in str(raised.value)
    assert hint in raised.value.hint


def test_processes_of_accelerate_are_those_of_all_hosts(folder: Path) -> None:
    program = parse_program(["accelerate", "launch", "--num_processes=4", "x.py"], folder)
    assert (program.ranks, program.total_ranks) == (None, 4)


def test_settings_of_a_launcher_are_followed_or_named(folder: Path) -> None:
    program = parse_program(["accelerate", "launch", "--mixed_precision", "bf16", "--use_fsdp", "x.py"], folder)
    described = program.describe(None)
    assert "--use_fsdp: not followed" in described
    assert ": evener launch --env ACCELERATE_MIXED_PRECISION=bf16 -- x.py" in described


def test_script_elsewhere_is_its_own_project(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = parse_program([str(folder / "x.py"), "a"], tmp_path_factory.mktemp("elsewhere"))
    assert (program.project, program.argv) == (folder, ["x.py", "a"])


MEASURED = {"independent": False, "no_compat": False, "no_measure": False}


@pytest.mark.parametrize(
    ("sync", "options"),
    [
        ("ddp", []),
        ("int8", ["sync=int8"]),
        ("powersgd:4", ["sync=powersgd:4"]),
        ("diloco:10:int8", ["sync=diloco:10:int8"]),
    ],
)
def test_strategies_of_ddp_are_for_programs(sync: str, options: list[str]) -> None:
    assert script_options(sync, "equal", **MEASURED) == options


@pytest.mark.parametrize("sync", ["diloco:4", "diloco:10:streamed", "int8+sparse", "fsdp", "none", "in8"])
def test_other_strategies_are_refused_for_programs(sync: str) -> None:
    with pytest.raises(UsageError, match=f"--sync {re.escape(sync)}"):
        script_options(sync, "equal", **MEASURED)


def test_shares_and_local_steps_are_refused_together() -> None:
    with pytest.raises(
        UsageError, match="--shares 2:1 weights gradients, and with --sync diloco:10 ranks exchange none"
    ):
        script_options("diloco:10", "2:1", **MEASURED)


@pytest.mark.parametrize("shares", ["auto", "1:0", "a:b", ""])
def test_shares_of_programs_are_numbers_above_zero(shares: str) -> None:
    with pytest.raises(UsageError, match=f"--shares {re.escape(shares)}"):
        script_options("ddp", shares, **MEASURED)


@pytest.mark.parametrize(
    ("membership", "words", "shares", "no_measure"),
    [
        ("live", "", "equal", False),
        ("fixed", "--resume", "equal", False),
        ("restart", "'", "equal", False),
        ("restart", "", "2:1", False),
        ("restart", "", "equal", True),
    ],
)
def test_restarts_that_are_refused(membership: str, words: str, shares: str, no_measure: bool) -> None:
    with pytest.raises(UsageError):
        script_resume_args(membership, words, shares, no_measure=no_measure)
