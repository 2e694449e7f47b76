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
from evener.core.errors import EvenerError
from evener.core.finding import Finding
from evener.core.rundir import RunDir
from evener.lab.drill import POLL_S, Drill, Heard, Raw, Seen, Stage, Step, lab_step, on
from evener.lab.drills_hosts import needs_root
from evener.lab.drills_network import HALF_AN_HOUR, PLAIN, TEN_MINUTES, torchrun
from evener.lab.faults import write
from evener.lab.scripts import ALL_REDUCE, CUT, DIE, EAT, FILL, STOP, STOP_BOTH, TRAIN, UNKEPT, UNPLUG
from evener.lab.spec import HostSpec

WITHIN_S = 60.0
FLAGS = "--data data --model tiny --batch 2 --steps 2 --dtype fp32 --threads 1 --eval-tokens 256 --device cpu"
SAME: dict[str, float] = {"width": 4, "shift": 0, "lr": 0.1}
NOT_A_WORD = "no message: it continues to the last step, whatever it learns"


def workers(stage: Stage) -> Seen:
    """Start evener's worker by hand on both hosts, as Slurm or a user would; return the mismatches it reports."""
    commands = {}
    for rank, host in enumerate("ab"):
        variables = f"RANK={rank} LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=29500"
        commands[host] = f"PYTHONPATH=~/code {variables} python -m evener.worker {FLAGS} $(cat more-flags) --out run"
    raw = Raw(commands={host: f"rm -rf run; touch more-flags; {text}" for host, text in commands.items()}, quiet_s=30,
              within_s=WITHIN_S)  # fmt: skip
    return _seen(stage.by_hand(raw), commands)


def agents(stage: Stage) -> Seen:
    """Start evener's launcher by hand on three hosts, each with the node rank in its file `node-rank`."""
    agent = "python -m evener.worker.torchrun --nnodes 3 --rdzv-backend evener --rdzv-endpoint 10.77.0.1:29500"
    command = f"{agent} --rdzv-conf rank=$(cat node-rank) allreduce.py"
    commands = {host: f"EVENER_HOST={host} GLOO_SOCKET_IFNAME=eth0 {command}" for host in "abc"}
    raw = Raw(commands=commands, files={"allreduce.py": ALL_REDUCE}, quiet_s=15, within_s=WITHIN_S)
    return _seen(stage.by_hand(raw), commands)


def launch(stage: Stage) -> Seen:
    """Run `evener launch`; return the failures that it wrote to events.jsonl."""
    shutil.rmtree(stage.folder / "run", ignore_errors=True)
    began = time.monotonic()
    result = stage.evener("launch", "--fleet", "fleet.toml", "--out", "run", "--", "train.py", timeout_s=WITHIN_S)
    took_s = time.monotonic() - began
    hints = [line.removeprefix("hint:").strip() for line in result.stderr.splitlines() if line.startswith("hint:")]
    findings = [
        Finding(
            check=match[1] if (match := re.match(r"([a-z]+\.[a-z-]+): ", event["error"])) else "run.peer-exit",
            severity="error", host=event["host"], evidence=event["error"], fix=hints[-1] if hints else "",
        )
        for event in RunDir(stage.folder / "run").events() if event["event"] == "failure"
    ]  # fmt: skip
    return Seen(
        command="evener launch --fleet fleet.toml --out run -- train.py",
        findings=findings,
        took_s=took_s,
        lines=(result.stdout + result.stderr).splitlines(),
    )


def follow(stage: Stage) -> Seen:
    """Start `evener launch`, wait until it reports a hang, cut-off or lost supervisor, then stop the run."""
    shutil.rmtree(stage.folder / "run", ignore_errors=True)
    began = time.monotonic()
    process = stage.start("launch", "--fleet", "fleet.toml", "--out", "run", "--", "train.py")
    events: list[dict[str, Any]] = []
    while process.poll() is None and not events and time.monotonic() - began < WITHIN_S:
        time.sleep(POLL_S)
        recorded = RunDir(stage.folder / "run").events() if (stage.folder / "run/events.jsonl").exists() else []
        events = [event for event in recorded if event["event"] in ("run.hang", "run.cut-off", "supervisor.lost")]
    fault_times = [
        float((host.home / "fault").read_text()) for host in stage.lab.hosts if (host.home / "fault").exists()
    ]
    took_s = events[0]["time"] - fault_times[0] if events and fault_times else time.monotonic() - began
    stage.evener("stop", "run", "--now")
    findings = [Finding(check=event["event"], severity="error", host=event["host"], peer=event.get("peer"),
                        evidence=event["error"], fix=event["hint"]) for event in events]  # fmt: skip
    return Seen(command="evener launch --fleet fleet.toml --out run -- train.py", findings=findings, took_s=took_s)


def resume(stage: Stage) -> Seen:
    """Run `evener train --resume`; return the damaged checkpoints that it reports."""
    run, began = RunDir(stage.folder / "run"), time.time()
    steps = run.checkpoint_steps()[-1] + 2
    result = stage.evener("train", "--resume", "run", "--fleet", "fleet.toml", "--steps", str(steps))
    took_s = time.time() - began
    findings = [
        Finding(check=event["event"], severity="error", host=event["host"], evidence=event["error"], fix="")
        for event in run.events() if event["event"] == "checkpoint.damaged" and event["time"] >= began
    ]  # fmt: skip
    if run.checkpoint_steps()[-1] != steps:
        raise EvenerError("the run did not continue", output=result.stderr)
    return Seen(command=f"evener train --resume run --steps {steps}", findings=findings, took_s=took_s,
                lines=(result.stdout + result.stderr).splitlines())  # fmt: skip


def _train(text: str, program: str) -> Step:
    """Return the step that writes train.py, which a launch copies to the hosts."""
    return lab_step(f"train.py: {text}", lambda stage: (stage.folder / "train.py").write_text(program))


def _seen(heard: dict[str, Heard], commands: dict[str, str]) -> Seen:
    """Parse the ranks' messages `error: ID: what: rank 1 on b and rank 0 on a differ` into findings."""
    findings: dict[str, Finding] = {}
    for host, output in heard.items():
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
    return Seen(
        command=next(iter(commands.values())),
        findings=list(findings.values()),
        took_s=max(output.took_s for output in heard.values()),
        lines=[f"{host} │ {line}" for host, output in heard.items() for line in output.lines],
    )


# --- faults ------------------------------------------------------------------------------------------------------


def corpus(host: str, seed: int = 0) -> Step:
    """Return the step that writes a small corpus to ~/data."""

    def do(stage: Stage) -> None:
        folder = stage.folder / f"corpus-{seed}"
        if not folder.exists():
            result = stage.evener(
                "data", "verbs", "--sentences", "400", "--seed", str(seed), "--tokenizer", "char", "--out", str(folder)
            )
            if result.returncode:
                raise EvenerError("evener data could not write a corpus", output=result.stderr)
        shutil.rmtree(stage.host(host).home / "data", ignore_errors=True)
        shutil.copytree(folder, stage.host(host).home / "data")

    return Step(f"on {host}: evener data verbs --sentences 400 --seed {seed} --out data", do)


def other_tokenizer(stage: Stage) -> None:
    """Reverse the characters of b's tokenizer, so that the same ids stand for other characters."""
    data = stage.host("b").home / "data"
    record = json.loads((data / "tokenizer.json").read_text())
    record["chars"] = record["chars"][::-1]
    content = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    (data / "tokenizer.json").write_bytes(content)
    meta = json.loads((data / "meta.json").read_text())
    meta["tokenizer_hash"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    (data / "meta.json").write_text(json.dumps(meta))


def other_code(stage: Stage) -> None:
    """Copy evener to b and append one line."""
    copy = stage.host("b").home / "code" / "evener"
    shutil.copytree(Path(evener.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "worker" / "optim.py").open("a") as file:
        file.write("# to be tried: another learning rate\n")


def no_other_code(stage: Stage) -> None:
    """Remove the modified copy from b."""
    shutil.rmtree(stage.host("b").home / "code")


def by_hand(**different: float) -> Raw:
    """Return the manual reproduction with a small DDP program whose settings differ on b."""
    setup = {host: f"echo '{json.dumps(SAME | (different if host == 'b' else {}))}' > settings.json; " for host in "ab"}
    commands = torchrun(script="train.py")
    return Raw(commands={host: setup[host] + command for host, command in commands.items()}, files={"train.py": TRAIN})


def trained(stage: Stage) -> None:
    """Train two steps on both hosts and save a checkpoint."""
    corpus("a").do(stage)
    flags = FLAGS.replace("--data data", "--data corpus-0").split()
    result = stage.evener("train", "--fleet", "fleet.toml", "--out", "run", *flags)
    if result.returncode:
        raise EvenerError("the run did not finish", output=result.stderr)


def flip(stage: Stage) -> None:
    """Flip one bit of a's checkpoint."""
    [path] = stage.host("a").home.glob(".evener/runs/*/checkpoints/*/weights.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


CORPORA = (corpus("a"), corpus("b"))

DRILLS = [
    Drill(
        name="data.mismatch", check="data.mismatch", host="b", peer="a",
        says="b's corpus was generated with another seed",
        why="Shards that overlap or belong to another data set never cause an error. They produce another model.",
        fault=[corpus("a"), corpus("b", seed=1)], mend=[corpus("b")],
        raw=by_hand(shift=3.0), silence=NOT_A_WORD, look=workers, hosts=PLAIN,
    ),
    Drill(
        name="tokenizer.mismatch", check="tokenizer.mismatch", host="b", peer="a",
        says="b's tokenizer gives the same ids to other characters",
        why="The loss falls as expected, but text sampled later is nonsense.",
        fault=[*CORPORA, lab_step("on b: reverse the characters in data/tokenizer.json", other_tokenizer)],
        mend=[corpus("b")],
        raw=by_hand(shift=-3.0), silence=NOT_A_WORD, look=workers, hosts=PLAIN,
    ),
    Drill(
        name="code.mismatch", check="code.mismatch", host="b", peer="a",
        says="another learning rate was tried on b and left in the code",
        why="The gradients are averaged, the steps are not: the replicas drift apart from the first step on.",
        fault=[*CORPORA, lab_step("on b: a copy of evener with one additional line", other_code)],
        mend=[lab_step("on b: rm -r ~/code", no_other_code)],
        raw=by_hand(lr=0.5), silence=NOT_A_WORD, look=workers, hosts=PLAIN,
    ),
    Drill(
        name="spec.mismatch", check="spec.mismatch", host="b", peer="a",
        says="b was started with another model size",
        why="The only mismatch that plain torch reports: DDP compares shapes, but not learning rates.",
        fault=[*CORPORA, write("b", "more-flags", "--num-layers 1")],
        mend=[write("b", "more-flags", "")],
        raw=by_hand(width=6), look=workers, hosts=PLAIN,
    ),
    Drill(
        name="rank.duplicate-node", check="rank.duplicate", host="b", peer="c", is_pair=True,
        says="b and c were both started as node 1",
        why="A command was copied and not changed. Both start rank 1, rank 2 never joins, and all wait for it.",
        fault=[write(host, "node-rank", rank) for host, rank in (("a", "0"), ("b", "1"), ("c", "1"))],
        mend=[write("c", "node-rank", "2")],
        raw=Raw(
            commands={host: f"torchrun --nnodes 3 --node_rank {rank} --master_addr a --master_port 29500 allreduce.py"
                      for host, rank in (("a", 0), ("b", 1), ("c", 1))},
            files={"allreduce.py": ALL_REDUCE}, waits=TEN_MINUTES,
        ),
        look=agents, hosts=dict.fromkeys("abc", HostSpec()),
    ),
    Drill(
        name="run.peer-exit", check="run.peer-exit", host="b",
        says="rank 1 on b is killed during training",
        why="The dead rank prints nothing; the healthy one prints errors. Exit codes show which failed first.",
        fault=[_train("rank 1 gets SIGKILL", DIE)], mend=[_train("without that", ALL_REDUCE)],
        raw=Raw(commands=torchrun(script="train.py"), files={"train.py": DIE}), look=launch, hosts=PLAIN,
    ),
    Drill(
        name="run.oom", check="run.oom", host="b",
        says="rank 1 takes 4 GB on b, which has 1.5 GB",
        why="The kernel kills the largest program, and SIGKILL leaves no message. The cgroup's counter shows it.",
        fault=[_train("rank 1 takes 4 GB at step 20", EAT)], mend=[_train("without that", ALL_REDUCE)],
        raw=Raw(commands=torchrun(script="train.py"), files={"train.py": EAT}), look=launch,
        hosts={"a": HostSpec(), "b": HostSpec(memory="1500MB")}, lacks=needs_root,
    ),
    Drill(
        name="disk.space-run", check="disk.space", host="b",
        says="rank 1 writes 600 MB on b, which has 400",
        why="The writing program fails, not what filled the disk. Checkpoints fail next.",
        fault=[on("b", "mkdir -p ~/.evener && mount -t tmpfs -o size=400M tmpfs ~/.evener"),
               _train("rank 1 writes 600 MB at step 20", FILL)],
        mend=[on("b", "umount -l ~/.evener"), _train("without that", ALL_REDUCE)],
        silence="the same traceback, if there was space to write it", look=launch, hosts=PLAIN,
    ),
    Drill(
        name="supervisor.lost", check="supervisor.lost", host="b",
        says="evener's supervisor on b and its guard are killed at the same moment",
        why="A supervisor can die like any program. The training run must survive it.",
        fault=[_train("at step 20 both are killed on b", UNKEPT)], mend=[_train("without that", ALL_REDUCE)],
        silence="a run started by torchrun ends with its ssh session", look=follow, hosts=PLAIN,
    ),
    Drill(
        name="checkpoint.damaged", check="checkpoint.damaged", host="a",
        says="one bit of a's checkpoint is flipped",
        why="A failing disk, a bad cable, a truncated copy. Weights are numbers: any bits can be trained on.",
        fault=[lab_step("$ evener train --fleet fleet.toml --out run …", trained),
               lab_step("on a: flip the last bit of weights.safetensors", flip)],
        mend=[lab_step("nothing is left to do: the run has continued", lambda stage: None)],
        silence="nothing: torch.load checks its archive's table, not the bits of a tensor", look=resume, hosts=PLAIN,
    ),
    Drill(
        name="run.hang", check="run.hang", host="b",
        says="rank 1 on b is stopped by a signal, as by Ctrl-Z or a debugger",
        why="It keeps its connections open, so none fails: all wait, and no collective ever reports for which rank.",
        fault=[_train("rank 1 stops itself at step 20", STOP)], mend=[_train("without that", ALL_REDUCE)],
        raw=Raw(commands=torchrun(script="train.py"), files={"train.py": STOP}, waits=HALF_AN_HOUR),
        look=follow, hosts=PLAIN,
    ),
    Drill(
        name="run.hang-launcher", check="run.hang", host="b",
        says="rank 1 on b and its launcher are stopped, as when a whole session is stopped",
        why="Launchers talk to each other, too. The healthy one gives up after two minutes and reports a lost store.",
        fault=[_train("rank 1 stops its parent and itself at step 20", STOP_BOTH)],
        mend=[_train("without that", ALL_REDUCE)],
        raw=Raw(commands=torchrun(script="train.py"), files={"train.py": STOP_BOTH},
                waits="torchrun would wait for minutes"),
        look=follow, hosts=PLAIN,
    ),
    Drill(
        name="run.cut-off", check="run.cut-off", host="a", peer="b", is_pair=True,
        says="b drops all packets from a, including those of open connections",
        why="A router lost its connection table, or a firewall was reloaded: both ends send, and wait.",
        fault=[_train("from step 20 on b drops packets from a", CUT)], mend=[_train("without that", ALL_REDUCE)],
        raw=Raw(commands=torchrun(script="train.py"), files={"train.py": CUT}, waits=HALF_AN_HOUR),
        look=follow, hosts=PLAIN,
    ),
    Drill(
        name="run.cut-off-link", check="run.cut-off", host="a", peer="b",
        says="b's link goes down permanently",
        why="Linux retries for 15 minutes before a connection fails: until then there is no error and no progress.",
        fault=[_train("at step 20 b sets its interface down", UNPLUG)], mend=[_train("without that", ALL_REDUCE)],
        raw=Raw(commands=torchrun(script="train.py"), files={"train.py": UNPLUG}, waits=HALF_AN_HOUR),
        look=follow, hosts=PLAIN,
    ),
]  # fmt: skip
