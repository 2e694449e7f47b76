"""Fault drills that only a run detects: before its first step, or when a rank dies or hangs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import evener
from evener.core.base.errors import EvenerError
from evener.core.cluster.finding import Finding
from evener.core.run.membership_epoch import make_run_key
from evener.core.run.rundir import RunDir
from evener.lab.drills.drill_runner import (
    POLL_S,
    Drill,
    DrillContext,
    DrillDiagnosis,
    DrillStep,
    ManualOutput,
    ManualReproduction,
    make_lab_step,
    on_host,
)
from evener.lab.drills.drill_scripts import (
    ALL_REDUCE,
    ALLOCATE_4_GB,
    DROP_FROM_PEER,
    FILL_DISK,
    KILL_RANK,
    KILL_SUPERVISOR,
    LINK_DOWN,
    STOP_RANK,
    STOP_RANK_AND_LAUNCHER,
    TRAIN_DDP,
)
from evener.lab.drills.drill_steps import write_file
from evener.lab.drills.drills_hosts import needs_root
from evener.lab.drills.drills_network import GLOO_HANG, TORCHRUN_HANG, TWO_HOSTS, torchrun_commands
from evener.lab.lab_spec import HostSpec

RUN_TIMEOUT_S = 120.0  # of a run that should end or report a fault; a busy machine needs a minute to load torch
TRAIN_FLAGS = "--data data --model tiny --batch 2 --steps 2 --dtype fp32 --threads 1 --eval-tokens 256 --device cpu"
SAME_SETTINGS: dict[str, float] = {"width": 4, "shift": 0, "lr": 0.1}
SILENT_DIVERGENCE = "no message: it continues to the last step, whatever it learns"


def diagnose_workers(stage: DrillContext) -> DrillDiagnosis:
    """Start evener's worker by hand on both hosts, as Slurm or a user would; return the mismatches it reports."""
    commands = {}
    for rank, host in enumerate("ab"):
        variables = f"RANK={rank} LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=29500"
        commands[host] = (
            f"PYTHONPATH=~/code {variables} python -m evener.worker {TRAIN_FLAGS} $(cat more-flags) --out run"
        )
    raw = ManualReproduction(
        commands={host: f"rm -rf run; touch more-flags; {text}" for host, text in commands.items()},
        idle_timeout_s=RUN_TIMEOUT_S,  # torch prints nothing while it is loaded
        timeout_s=RUN_TIMEOUT_S,
    )
    return _diagnose_output(stage.run_manually(raw), commands)


def diagnose_agents(stage: DrillContext) -> DrillDiagnosis:
    """Start evener's launcher by hand on three hosts, each with the node rank in its file `node-rank`."""
    agent = "python -m evener.worker.torchrun --nnodes 3 --rdzv-backend evener --rdzv-endpoint 10.77.0.1:29500"
    command = f"{agent} --rdzv-conf rank=$(cat node-rank) allreduce.py"
    env = "EVENER_KEY_FILE=key GLOO_SOCKET_IFNAME=eth0"
    commands = {host: f"EVENER_HOST={host} {env} {command}" for host in "abc"}
    raw = ManualReproduction(
        commands=commands,
        files={"allreduce.py": ALL_REDUCE, "key": make_run_key()},
        idle_timeout_s=RUN_TIMEOUT_S,
        timeout_s=RUN_TIMEOUT_S,
    )
    return _diagnose_output(stage.run_manually(raw), commands)


def diagnose_launch(stage: DrillContext) -> DrillDiagnosis:
    """Run `evener launch`; return the failures that it wrote to events.jsonl."""
    shutil.rmtree(stage.folder / "run", ignore_errors=True)
    began = time.monotonic()
    result = stage.run_evener(
        "launch", "--fleet", "fleet.toml", "--out", "run", "--", "train.py", timeout_s=RUN_TIMEOUT_S
    )
    took_s = time.monotonic() - began
    hints = [line.removeprefix("hint:").strip() for line in result.stderr.splitlines() if line.startswith("hint:")]
    findings = [
        Finding(
            check=match[1] if (match := re.match(r"([a-z]+\.[a-z-]+): ", event["error"])) else "run.peer-exit",
            severity="error", host=event["host"], evidence=event["error"], fix=hints[-1] if hints else "",
        )
        for event in RunDir(stage.folder / "run").events() if event["event"] == "failure"
    ]  # fmt: skip
    return DrillDiagnosis(
        command="evener launch --fleet fleet.toml --out run -- train.py",
        findings=findings,
        took_s=took_s,
        lines=(result.stdout + result.stderr).splitlines(),
    )


def diagnose_hang(stage: DrillContext) -> DrillDiagnosis:
    """Start `evener launch`, wait until it reports a hang, cut-off or lost supervisor, then stop the run."""
    shutil.rmtree(stage.folder / "run", ignore_errors=True)
    began = time.monotonic()
    process = stage.start_evener("launch", "--fleet", "fleet.toml", "--out", "run", "--", "train.py")
    events: list[dict[str, Any]] = []
    while process.poll() is None and not events and time.monotonic() - began < RUN_TIMEOUT_S:
        time.sleep(POLL_S)
        recorded = RunDir(stage.folder / "run").events() if (stage.folder / "run/events.jsonl").exists() else []
        events = [event for event in recorded if event["event"] in ("run.hang", "run.cut-off", "supervisor.lost")]
    fault_times = [
        float((host.home / "fault").read_text()) for host in stage.lab.hosts if (host.home / "fault").exists()
    ]
    took_s = events[0]["time"] - fault_times[0] if events and fault_times else time.monotonic() - began
    stage.run_evener("stop", "run", "--now")
    findings = [Finding(check=event["event"], severity="error", host=event["host"], peer=event.get("peer"),
                        evidence=event["error"], fix=event["hint"]) for event in events]  # fmt: skip
    return DrillDiagnosis(
        command="evener launch --fleet fleet.toml --out run -- train.py", findings=findings, took_s=took_s
    )


def diagnose_resume(stage: DrillContext) -> DrillDiagnosis:
    """Run `evener train --resume`; return the damaged checkpoints that it reports."""
    run, began = RunDir(stage.folder / "run"), time.time()
    steps = run.checkpoint_steps()[-1] + 2
    result = stage.run_evener("train", "--resume", "run", "--fleet", "fleet.toml", "--steps", str(steps))
    took_s = time.time() - began
    findings = [
        Finding(check=event["event"], severity="error", host=event["host"], evidence=event["error"], fix="")
        for event in run.events() if event["event"] == "checkpoint.damaged" and event["time"] >= began
    ]  # fmt: skip
    if run.checkpoint_steps()[-1] != steps:
        raise EvenerError("the run did not continue", output=result.stderr)
    return DrillDiagnosis(command=f"evener train --resume run --steps {steps}", findings=findings, took_s=took_s,
                lines=(result.stdout + result.stderr).splitlines())  # fmt: skip


def _write_train_script(text: str, program: str) -> DrillStep:
    """Return the step that writes train.py, which a launch copies to the hosts."""
    return make_lab_step(f"train.py: {text}", lambda stage: (stage.folder / "train.py").write_text(program))


def _diagnose_output(outputs: dict[str, ManualOutput], commands: dict[str, str]) -> DrillDiagnosis:
    """Parse the ranks' messages `error: ID: what: rank 1 on b and rank 0 on a differ` into findings."""
    findings: dict[str, Finding] = {}
    for host, output in outputs.items():
        hint = next((line.removeprefix("hint:").strip() for line in output.lines if line.startswith("hint:")), "")
        for line in output.lines:
            match = re.match(r"error: ([a-z]+\.[a-z-]+): (.*)", line)
            if match:
                hosts = re.findall(r"\bon (\w+)\b", line) or re.findall(r"^(\w+) and (\w+) were", match[2])
                pair = list(hosts[0]) if hosts and isinstance(hosts[0], tuple) else hosts or [host]
                findings[match[0]] = Finding(
                    check=match[1], severity="error", host=pair[0], peer=pair[1] if len(pair) > 1 else None,
                    evidence=match[2], fix=hint,
                )  # fmt: skip
    return DrillDiagnosis(
        command=next(iter(commands.values())),
        findings=list(findings.values()),
        took_s=max(output.took_s for output in outputs.values()),
        lines=[f"{host} │ {line}" for host, output in outputs.items() for line in output.lines],
    )


# --- faults ------------------------------------------------------------------------------------------------------


def prepare_corpus(host: str, seed: int = 0) -> DrillStep:
    """Return the step that writes a small corpus to ~/data."""

    def do(stage: DrillContext) -> None:
        folder = stage.folder / f"corpus-{seed}"
        if not folder.exists():
            result = stage.run_evener(
                "data", "verbs", "--sentences", "400", "--seed", str(seed), "--tokenizer", "char", "--out", str(folder)
            )
            if result.returncode:
                raise EvenerError("evener data could not write a corpus", output=result.stderr)
        shutil.rmtree(stage.host(host).home / "data", ignore_errors=True)
        shutil.copytree(folder, stage.host(host).home / "data")

    return DrillStep(f"on {host}: evener data verbs --sentences 400 --seed {seed} --out data", do)


def permute_tokenizer(stage: DrillContext) -> None:
    """Reverse the characters of b's tokenizer, so that the same ids stand for other characters."""
    data = stage.host("b").home / "data"
    record = json.loads((data / "tokenizer.json").read_text())
    record["chars"] = record["chars"][::-1]
    content = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    (data / "tokenizer.json").write_bytes(content)
    meta = json.loads((data / "meta.json").read_text())
    meta["tokenizer_hash"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    (data / "meta.json").write_text(json.dumps(meta))


def modify_code(stage: DrillContext) -> None:
    """Copy evener to b and append one line."""
    copy = stage.host("b").home / "code" / "evener"
    shutil.copytree(Path(evener.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "worker" / "optim.py").open("a") as file:
        file.write("# to be tried: another learning rate\n")


def remove_modified_code(stage: DrillContext) -> None:
    """Remove the modified copy from b."""
    shutil.rmtree(stage.host("b").home / "code")


def manual_ddp(**different: float) -> ManualReproduction:
    """Return the manual reproduction with a small DDP program whose settings differ on b."""
    setup = {
        host: f"echo '{json.dumps(SAME_SETTINGS | (different if host == 'b' else {}))}' > settings.json; "
        for host in "ab"
    }
    commands = torchrun_commands(script="train.py")
    return ManualReproduction(
        commands={host: setup[host] + command for host, command in commands.items()}, files={"train.py": TRAIN_DDP}
    )


def train_and_save(stage: DrillContext) -> None:
    """Train two steps on both hosts and save a checkpoint."""
    prepare_corpus("a").apply(stage)
    flags = TRAIN_FLAGS.replace("--data data", "--data corpus-0").split()
    result = stage.run_evener("train", "--fleet", "fleet.toml", "--out", "run", *flags)
    if result.returncode:
        raise EvenerError("the run did not finish", output=result.stderr)


def flip_checkpoint_bit(stage: DrillContext) -> None:
    """Flip one bit of a's checkpoint."""
    [path] = stage.host("a").home.glob(".evener/runs/*/checkpoints/*/weights.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


PREPARE_CORPORA = (prepare_corpus("a"), prepare_corpus("b"))

RUN_DRILLS = [
    Drill(
        name="data.mismatch",
        check="data.mismatch",
        host="b",
        peer="a",
        description="b's corpus was generated with another seed",
        lesson="Shards that overlap or belong to another data set never cause an error. They produce another model.",
        fault=[prepare_corpus("a"), prepare_corpus("b", seed=1)],
        fix=[prepare_corpus("b")],
        manual=manual_ddp(shift=3.0),
        silence_reason=SILENT_DIVERGENCE,
        diagnose=diagnose_workers,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="tokenizer.mismatch",
        check="tokenizer.mismatch",
        host="b",
        peer="a",
        description="b's tokenizer gives the same ids to other characters",
        lesson="The loss falls as expected, but text sampled later is nonsense.",
        fault=[
            *PREPARE_CORPORA,
            make_lab_step("on b: reverse the characters in data/tokenizer.json", permute_tokenizer),
        ],
        fix=[prepare_corpus("b")],
        manual=manual_ddp(shift=-3.0),
        silence_reason=SILENT_DIVERGENCE,
        diagnose=diagnose_workers,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="code.mismatch",
        check="code.mismatch",
        host="b",
        peer="a",
        description="another learning rate was tried on b and left in the code",
        lesson="The gradients are averaged, the steps are not: the replicas drift apart from the first step on.",
        fault=[*PREPARE_CORPORA, make_lab_step("on b: a copy of evener with one additional line", modify_code)],
        fix=[make_lab_step("on b: rm -r ~/code", remove_modified_code)],
        manual=manual_ddp(lr=0.5),
        silence_reason=SILENT_DIVERGENCE,
        diagnose=diagnose_workers,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="spec.mismatch",
        check="spec.mismatch",
        host="b",
        peer="a",
        description="b was started with another model size",
        lesson="The only mismatch that plain torch reports: DDP compares shapes, but not learning rates.",
        fault=[*PREPARE_CORPORA, write_file("b", "more-flags", "--num-layers 1")],
        fix=[write_file("b", "more-flags", "")],
        manual=manual_ddp(width=6),
        diagnose=diagnose_workers,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="rank.duplicate-node",
        check="rank.duplicate",
        host="b",
        peer="c",
        is_symmetric=True,
        description="b and c were both started as node 1",
        lesson="A command was copied and not changed. Both start rank 1, rank 2 never joins, and all wait for it.",
        fault=[write_file(host, "node-rank", rank) for host, rank in (("a", "0"), ("b", "1"), ("c", "1"))],
        fix=[write_file("c", "node-rank", "2")],
        manual=ManualReproduction(
            commands={
                host: f"torchrun --nnodes 3 --node_rank {rank} --master_addr a --master_port 29500 allreduce.py"
                for host, rank in (("a", 0), ("b", 1), ("c", 1))
            },
            files={"allreduce.py": ALL_REDUCE},
            hang_description=TORCHRUN_HANG,
        ),
        diagnose=diagnose_agents,
        hosts=dict.fromkeys("abc", HostSpec()),
    ),
    Drill(
        name="run.peer-exit",
        check="run.peer-exit",
        host="b",
        description="rank 1 on b is killed during training",
        lesson="The dead rank prints nothing; the healthy one prints errors. Exit codes show which failed first.",
        fault=[_write_train_script("rank 1 gets SIGKILL", KILL_RANK)],
        fix=[_write_train_script("without that", ALL_REDUCE)],
        manual=ManualReproduction(commands=torchrun_commands(script="train.py"), files={"train.py": KILL_RANK}),
        diagnose=diagnose_launch,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="run.oom",
        check="run.oom",
        host="b",
        description="rank 1 takes 4 GB on b, which has 1.5 GB",
        lesson="The kernel kills the largest program, and SIGKILL leaves no message. The cgroup's counter shows it.",
        fault=[_write_train_script("rank 1 takes 4 GB at step 20", ALLOCATE_4_GB)],
        fix=[_write_train_script("without that", ALL_REDUCE)],
        manual=ManualReproduction(commands=torchrun_commands(script="train.py"), files={"train.py": ALLOCATE_4_GB}),
        diagnose=diagnose_launch,
        hosts={"a": HostSpec(), "b": HostSpec(memory="1500MB")},
        unsupported_reason=needs_root,
    ),
    Drill(
        name="disk.space-run",
        check="disk.space",
        host="b",
        description="rank 1 writes 600 MB on b, which has 400",
        lesson="The writing program fails, not what filled the disk. Checkpoints fail next.",
        fault=[
            on_host("b", "mkdir -p ~/.evener && mount -t tmpfs -o size=400M tmpfs ~/.evener"),
            _write_train_script("rank 1 writes 600 MB at step 20", FILL_DISK),
        ],
        fix=[on_host("b", "umount -l ~/.evener"), _write_train_script("without that", ALL_REDUCE)],
        silence_reason="the same traceback, if there was space to write it",
        diagnose=diagnose_launch,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="supervisor.lost",
        check="supervisor.lost",
        host="b",
        description="evener's supervisor on b and its guard are killed at the same moment",
        lesson="A supervisor can die like any program. The training run must survive it.",
        fault=[_write_train_script("at step 20 both are killed on b", KILL_SUPERVISOR)],
        fix=[_write_train_script("without that", ALL_REDUCE)],
        silence_reason="a run started by torchrun ends with its ssh session",
        diagnose=diagnose_hang,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="checkpoint.damaged",
        check="checkpoint.damaged",
        host="a",
        description="one bit of a's checkpoint is flipped",
        lesson="A failing disk, a bad cable, a truncated copy. Weights are numbers: any bits can be trained on.",
        fault=[
            make_lab_step("$ evener train --fleet fleet.toml --out run …", train_and_save),
            make_lab_step("on a: flip the last bit of weights.safetensors", flip_checkpoint_bit),
        ],
        fix=[make_lab_step("nothing is left to do: the run has continued", lambda stage: None)],
        silence_reason="nothing: torch.load checks its archive's table, not the bits of a tensor",
        diagnose=diagnose_resume,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="run.hang",
        check="run.hang",
        host="b",
        description="rank 1 on b is stopped by a signal, as by Ctrl-Z or a debugger",
        lesson="It keeps its connections open, so none fails: all wait, and no collective ever reports for which rank.",
        fault=[_write_train_script("rank 1 stops itself at step 20", STOP_RANK)],
        fix=[_write_train_script("without that", ALL_REDUCE)],
        manual=ManualReproduction(
            commands=torchrun_commands(script="train.py"), files={"train.py": STOP_RANK}, hang_description=GLOO_HANG
        ),
        diagnose=diagnose_hang,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="run.hang-launcher",
        check="run.hang",
        host="b",
        description="rank 1 on b and its launcher are stopped, as when a whole session is stopped",
        lesson="Launchers talk to each other, too. The healthy one gives up after two minutes and reports a "
        "lost store.",
        fault=[_write_train_script("rank 1 stops its parent and itself at step 20", STOP_RANK_AND_LAUNCHER)],
        fix=[_write_train_script("without that", ALL_REDUCE)],
        manual=ManualReproduction(
            commands=torchrun_commands(script="train.py"),
            files={"train.py": STOP_RANK_AND_LAUNCHER},
            hang_description="torchrun would wait for minutes",
        ),
        diagnose=diagnose_hang,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="run.cut-off",
        check="run.cut-off",
        host="a",
        peer="b",
        is_symmetric=True,
        description="b drops all packets from a, including those of open connections",
        lesson="A router lost its connection table, or a firewall was reloaded: both ends send, and wait.",
        fault=[_write_train_script("from step 20 on b drops packets from a", DROP_FROM_PEER)],
        fix=[_write_train_script("without that", ALL_REDUCE)],
        manual=ManualReproduction(
            commands=torchrun_commands(script="train.py"),
            files={"train.py": DROP_FROM_PEER},
            hang_description=GLOO_HANG,
        ),
        diagnose=diagnose_hang,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="run.cut-off-link",
        check="run.cut-off",
        host="a",
        peer="b",
        description="b's link goes down permanently",
        lesson="Linux retries for 15 minutes before a connection fails: until then there is no error and no progress.",
        fault=[_write_train_script("at step 20 b sets its interface down", LINK_DOWN)],
        fix=[_write_train_script("without that", ALL_REDUCE)],
        manual=ManualReproduction(
            commands=torchrun_commands(script="train.py"), files={"train.py": LINK_DOWN}, hang_description=GLOO_HANG
        ),
        diagnose=diagnose_hang,
        hosts=TWO_HOSTS,
    ),
]
