"""evener plan: what will it cost, which way is best, is it worth it? Its flags are those of `train`, and a few more."""

from __future__ import annotations

from typing import Any

import typer

EXAMPLES = (
    "evener plan --model gpt2-760m --nodes 2 --link 1GbE --compute-tokens-per-s 500\n"
    "evener plan --scale 1,8,64 --link 10GbE --compute-tokens-per-s 9000\n"
    "evener plan --fleet fleet.toml --model char\n"
    "evener plan --from runs/mine --link 100Mbit"
)

SPEC_FILE = typer.Argument(None, metavar="SPEC.toml", help="a run as TOML, as for train; flags win over it")
FLEET = typer.Option(None, "--fleet", metavar="FILE", help="hosts, and what probe measured [fleet.toml if here]")
HOSTS = typer.Option(None, "--hosts", metavar="NAME,…", help="of the fleet, these hosts alone [all]")
NODES = typer.Option(None, "--nodes", min=1, max=256, help="no fleet: so many machines; --scale goes further")
RATE = typer.Option(None, "--compute-tokens-per-s", metavar="RATE,…",
                    help="no fleet: tokens/s that one rank (a GPU or a processor) trains alone; or a list")  # fmt: skip
LINK = typer.Option(None, "--link", metavar="LINK", help="between machines: 1GbE, 2.5Gbit, 400G, 117MB/s, wifi, wan")
PER_NODE = typer.Option(None, "--per-node", min=1, max=1024,
                        help="no fleet: ranks on each machine [1]; more are GPUs: NCCL, bf16")  # fmt: skip
NODE_LINK = typer.Option(
    None, "--node-link", metavar="LINK", help="no fleet: between them: nvlink, pcie, 50GB/s [nvlink]"
)
SCALE = typer.Option(None, "--scale", metavar="RANKS,…",
                     help="no fleet: simulate so many ranks: 1,2,4,…,4096; --batch is then of one rank")  # fmt: skip
STRONG = typer.Option(False, "--strong", help="--scale: --batch is shared by all ranks instead")
JITTER = typer.Option(None, "--jitter", min=0.0, max=300.0,
                      help="--scale: percent by which a rank's compute time varies from step to step [2]")  # fmt: skip
SLOW = typer.Option(None, "--slow", metavar="SHARE:FACTOR",
                    help="--scale: so many of the ranks are always slower: 0.01:1.5 [none]")  # fmt: skip
MTBF = typer.Option(None, "--mtbf-days", min=0.001, max=1e6, help="--scale: days between two failures of a node [300]")
DRAW = typer.Option(None, "--draw", metavar="FOLDER", help="--scale: two pictures of it")
FROM = typer.Option(None, "--from", metavar="RUN",
                    help="what a run measured instead of probes; with --fleet it is written there")  # fmt: skip
AS_JSON = typer.Option(False, "--json", help="print one JSON object")


def plan(spec_file: str | None, fleet: str | None, hosts: str | None, nodes: int | None, rate: str | None,
         link: str | None, per_node: int | None, node_link: str | None, scale: str | None, strong: bool,
         jitter: float | None, slow: str | None, mtbf_days: float | None, draw: str | None, source_run: str | None,
         as_json: bool, **flags: str | bool | None) -> int:  # fmt: skip
    """Say before a run what a step will cost, which way is best, and whether each machine earns its place.

    From what `evener probe` measured, or from a few words (--nodes, --link, --compute-tokens-per-s). Nothing is
    started and nobody is asked: it answers at once. The flags below are those of `train`: the same ones say the same.
    """
    import json
    from pathlib import Path

    from evener.cli import fleets, planned
    from evener.cli.flags import given
    from evener.core.errors import UsageError
    from evener.core.spec import make_spec
    from evener.plan.question import answer, of_words

    texts = given(flags)
    words = {"--nodes": nodes, "--compute-tokens-per-s": rate, "--per-node": per_node, "--node-link": node_link}
    said = [name for name, value in (*words.items(), ("--scale", scale)) if value is not None]
    if said and (fleet or hosts or source_run):
        raise UsageError(f"{said[0]} describes machines; so does --fleet, --hosts or --from", hint="one of them")
    of_scale = {
        "--strong": strong or None,
        "--jitter": jitter,
        "--slow": slow,
        "--mtbf-days": mtbf_days,
        "--draw": draw,
    }
    stray = [name for name, value in of_scale.items() if value is not None]
    if scale is None and stray:
        raise UsageError(f"{stray[0]}: only --scale has a use for it", hint="--scale 1,2,4,…,4096")
    if scale is not None and (nodes is not None or "sync" in texts):
        raise UsageError(
            f"--scale counts ranks of plain ddp: {'--nodes' if nodes is not None else '--sync'} has no place beside it",
            hint="--per-node says how many ranks a machine has",
        )
    if source_run is not None:
        asked = planned.of_run(source_run, texts, link, fleet)
    elif said:
        spec = make_spec(Path(spec_file) if spec_file else None, texts)
        vocab_size = planned.vocab_size_of(spec) if "data" in texts else None
        asked = of_words(spec, vocab_size, 2 if scale else nodes, rate, link, per_node or 1, node_link)
        if scale is not None:
            from evener.cli import scaled

            return scaled.tell(asked, scale, strong, jitter, slow, mtbf_days, draw, as_json)
    else:
        spec = make_spec(Path(spec_file) if spec_file else None, texts)
        path = fleets.fleet_path(fleet)
        if path is None:
            raise UsageError(
                "no fleet.toml here, and no --fleet",
                hint="or without machines: --nodes 2 --link 1GbE --compute-tokens-per-s 500",
            )
        asked = planned.of_fleet(path, hosts, spec, "data" in texts, link)
    found = answer(asked)
    if as_json:
        print(json.dumps(planned.as_json(found, asked)))
    else:
        planned.tell(found, asked)
    return 0


def add_to(app: typer.Typer) -> None:
    """Add `plan`, with one option for every leaf of RunSpec."""
    from evener.cli.flags import Parameter, signature, spec_options

    options: list[Parameter] = [
        ("spec_file", SPEC_FILE, str | None),
        ("fleet", FLEET, str | None),
        ("hosts", HOSTS, str | None),
        ("nodes", NODES, int | None),
        ("rate", RATE, str | None),
        ("link", LINK, str | None),
        ("per_node", PER_NODE, int | None),
        ("node_link", NODE_LINK, str | None),
        ("scale", SCALE, str | None),
        ("strong", STRONG, bool),
        ("jitter", JITTER, float | None),
        ("slow", SLOW, str | None),
        ("mtbf_days", MTBF, float | None),
        ("draw", DRAW, str | None),
        ("source_run", FROM, str | None),
        ("as_json", AS_JSON, bool),
        *spec_options(),
    ]

    def command(**values: Any) -> int:
        return plan(**values)

    command.__doc__ = plan.__doc__
    command.__signature__ = signature(options)  # type: ignore[attr-defined]
    app.command("plan", epilog=EXAMPLES)(command)
