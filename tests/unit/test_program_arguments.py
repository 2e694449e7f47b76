"""Find the program in what people type after `evener launch --`."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.core.base.errors import UsageError
from evener.launch.script.program_arguments import parse_program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.py").write_text("print(1)\n")
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\nprint(1)\n")
    (tmp_path / "run.sh").write_text("set -e  # torchrun x.py is not called\npython x.py\n")
    (tmp_path / "job").write_text("#!/usr/bin/env bash\npython x.py\n")
    (tmp_path / "ranks.sh").write_text("cd .\n\nOMP_NUM_THREADS=1 torchrun --nproc-per-node 2 x.py --lr 1\n")
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
        ("bash run.sh --lr 1", "--no-python bash run.sh --lr 1", None),
        ("./run.sh", "--no-python bash run.sh", None),
        ("./job a", "--no-python bash job a", None),
        ("tool a", "tool a", None),
    ],
)
def test_program_is_taken_out_of_what_people_type(folder: Path, typed: str, argv: str, ranks: int | None) -> None:
    program = parse_program(typed.split(), folder)
    assert (" ".join(program.argv), program.ranks) == (argv, ranks)
    assert program.project == folder


def test_translation_is_a_command(folder: Path) -> None:
    described = parse_program(["torchrun", "--nproc-per-node", "2", "x.py", "--lr", "1"], folder).describe()
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


def test_script_elsewhere_is_its_own_project(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = parse_program([str(folder / "x.py"), "a"], tmp_path_factory.mktemp("elsewhere"))
    assert (program.project, program.argv) == (folder, ["x.py", "a"])
