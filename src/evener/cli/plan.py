"""evener plan: predict step time, cost and the best sync strategy. Its flags are those of `train`, and a few more."""

from __future__ import annotations

from typing import Any

import typer

from evener.core.base.escaped_output import print_escaped

EXAMPLES = (
    "evener plan --model gpt2-760m --nodes 2 --link 1GbE --compute-tokens-per-s 500\n"
    "evener plan --gpu 4090,3090 --link 2.5GbE --tokens 2.5B --rent 1xh100@2.5\n"
    "evener plan --scale 1,8,64 --link 10GbE --compute-tokens-per-s 9000\n"
    "evener plan my.txt --for 2d --on local,laptop\n"
    "evener plan chats.jsonl --model hf:./some-model --lora 16\n"
    "evener plan --fleet fleet.toml --model char\n"
    "evener plan --from runs/mine --link 100Mbit"
)

ARGUMENTS = typer.Argument(None, metavar="TEXT", help="what to train on, and a run as TOML, as for train")
SOURCE_OPTIONS: dict[str, tuple[Any, Any]] = {  # parameter: (flag, type)
    "fleet": (typer.Option(None, "--fleet", metavar="FILE", help="hosts and their measured rates [fleet.toml if here]"),
              str | None),
    "hosts": (typer.Option(None, "--hosts", metavar="NAME,…", help="only these hosts [all]"), str | None),
    "link": (typer.Option(None, "--link", metavar="LINK", help="between machines: 1GbE, 8x400Gbit, 117MB/s, wan, "
                          "wifi:200Mbit; with ping's round trip: 1Gbit,5ms"), str | None),
    "params": (typer.Option(None, "--params", metavar="SIZE",
                            help="a model of this many parameters, 350M or 72b, instead of --model"), str | None),
    "source_run": (typer.Option(None, "--from", metavar="RUN", help="what a run measured, instead of probes; "
                                "with --fleet also written to that file"), str | None),
}  # fmt: skip
MACHINE_OPTIONS: dict[str, tuple[Any, Any]] = {  # hypothetical machines: question.Words
    "nodes": (typer.Option(None, "--nodes", min=1, max=4096, help="no fleet: number of machines"), int | None),
    "rates": (typer.Option(None, "--compute-tokens-per-s", metavar="RATE,…", help="no fleet: tokens/s that one rank (a "
                           "GPU or a processor) trains alone; or a list"), str | None),
    "gpus": (typer.Option(None, "--gpu", metavar="NAME,…", help="no fleet: hardware by name, for all machines or for "
                          "each: h100, a100-80, 4090, m2-max, cpu:8"), str | None),
    "memory": (typer.Option(None, "--memory", metavar="SIZE,…", help="no fleet: of each GPU, or of a machine without "
                            "any: 24GB [that of --gpu]"), str | None),
    "per_node": (typer.Option(None, "--per-node", min=1, max=1024, help="no fleet: ranks on each machine [1]; more are "
                              "GPUs"), int | None),
    "node_link": (typer.Option(None, "--node-link", metavar="LINK", help="no fleet: between them: nvlink, pcie, 50GB/s "
                               "[as --gpu has it, else pcie]"), str | None),
    "watts": (typer.Option(None, "--watts", min=0.001, max=1e9, help="no fleet: of a machine while it trains [that of "
                           "--gpu]"), float | None),
    "price_per_h": (typer.Option(None, "--price-per-h", min=0.0, max=1e9, help="no fleet: of a machine; any currency"),
                    float | None),
}  # fmt: skip
COST_OPTIONS: dict[str, tuple[Any, Any]] = {
    "for_time": (typer.Option(None, "--for", metavar="TIME", help="plan a run of 30min, 8h or 2d; chooses model, batch "
                              "and steps, where no flag does"), str | None),
    "tokens": (typer.Option(None, "--tokens", metavar="NUMBER", help="plan a run of this many tokens, with its time "
                            "and cost: 2.5B [those of --steps]"), str | None),
    "epochs": (typer.Option(None, "--epochs", metavar="N", min=0.0, help="with hf:FOLDER: read every sample so many "
                            "times, without --steps [1]"), float | None),
    "price_per_kwh": (typer.Option(None, "--price-per-kwh", min=0.0, max=1e6, help="of electricity [the fleet's "
                                   "price_per_kwh]"), float | None),
    "rent": (typer.Option(None, "--rent", metavar="OFFER,…", help="also compare rented machines, with their "
                          "price per hour: 1xh100@2.5,8xh100@20"), str | None),
}  # fmt: skip
SCALE_FLAG = typer.Option(None, "--scale", metavar="RANKS,…",
                     help="no fleet: simulate this many ranks: 1,2,4,…,4096; --batch is then per rank")  # fmt: skip
SIMULATION_OPTIONS: dict[str, tuple[Any, Any]] = {
    "strong": (typer.Option(False, "--strong", help="--scale: all ranks together have --batch sequences"), bool),
    "jitter": (typer.Option(None, "--jitter", min=0.0, max=300.0, help="--scale: percent by which a rank's compute "
                            "time varies from step to step [2]"), float | None),
    "slow": (typer.Option(None, "--slow", metavar="SHARE:FACTOR", help="--scale: a fraction of the ranks that is "
                          "always slower by this factor: 0.01:1.5 [none]"), str | None),
    "mtbf_days": (typer.Option(None, "--mtbf-days", min=0.001, max=1e6, help="--scale: mean days between failures of a "
                               "node [300]"), float | None),
    "draw": (typer.Option(None, "--draw", metavar="FOLDER", help="--scale: write two pictures here"), str | None),
}  # fmt: skip
ALL = typer.Option(False, "--all", help="also print all strategies, each host, other links, and what is assumed")
AS_JSON = typer.Option(False, "--json", help="print one JSON object")
NOT_WITH_SCALE = ("nodes", "hosts", "watts", "price_per_h", *COST_OPTIONS)
REAL_HOST_FLAGS = ("ranks", "threads")  # flags of train without meaning for hypothetical machines


def plan(arguments: list[str] | None, as_json: bool, is_long: bool, scale: str | None, values: dict[str, Any]) -> int:
    """Predict step time and cost before a run, the best sync strategy, and whether each machine is worth including.

    From what `evener probe` measured, or from a short description (--nodes, --gpu, --link, --compute-tokens-per-s).
    Answers at once: starts nothing and contacts no host; only a new text is prepared first. The flags below mean the
    same as those of `train`. Mixtures of experts, fp8 and optimizer states in bf16 are not supported.
    """
    import json

    from evener.cli import plan_output
    from evener.cli.flags import check_names_data_once, explicit_values, split_arguments
    from evener.cli.hub_models import with_model_folder
    from evener.core.base.errors import UsageError
    from evener.core.cluster.fleet_file import fleet_flag
    from evener.core.model.corpus import load_corpus
    from evener.core.model.fine_tuning import FineTuning
    from evener.core.model.gradients import ProgramModel
    from evener.core.run.roster import requested_sync
    from evener.core.run.run_spec import FLAGS, RunSpec, given_fields, make_spec
    from evener.plan.choice.plan_request import PlanRequest, answer_request

    of_what, machines, of_bill, of_scale = (
        {name: values.pop(name) for name in group}
        for group in (SOURCE_OPTIONS, MACHINE_OPTIONS, COST_OPTIONS, SIMULATION_OPTIONS)
    )
    texts = explicit_values(values)
    given_machines = [_flag_name(MACHINE_OPTIONS, name) for name, value in machines.items() if value is not None]
    given_machines += ["--scale"] if scale is not None else []
    fleet, source_run = of_what["fleet"], of_what["source_run"]
    if given_machines and (fleet or source_run):
        other = fleet_flag(fleet) if fleet else f"--from {source_run}"
        raise UsageError(f"{given_machines[0]} describes machines; so does {other}", hint="one of them")
    if of_what["params"] is not None and ("model" in texts or source_run):
        raise UsageError(f"--params {of_what['params']}: {'--from' if source_run else '--model'} says what is trained",
                         hint="one of them")  # fmt: skip
    _check_scale_flags(scale, of_scale, machines | {"hosts": of_what["hosts"]} | of_bill, texts)
    file, paths = split_arguments(arguments or [])
    if paths and source_run:
        raise UsageError(f"--from {source_run} has its own data; so does {paths[0]}", hint="one of them")
    check_names_data_once(paths, texts)
    wanted = RunSpec() if source_run is not None else with_model_folder(make_spec(file, texts))
    for_time, epochs, budget = of_bill.pop("for_time"), of_bill.pop("epochs"), None
    lengths = (for_time, of_bill["tokens"], epochs)
    if wanted.model.pretrained is not None or any(length is not None for length in lengths):
        from evener.cli.budget import parse_budget, request_for_budget  # a fifth of a second, which other plans save
        from evener.cli.epochs import check_epochs, request_for_epochs

        budget = parse_budget(for_time, of_bill["tokens"], given_fields(file, texts))
        if source_run is None:
            check_epochs(wanted, epochs, is_resumed=False)
    useless = [f"--{name}" for name in REAL_HOST_FLAGS if name in texts]
    if given_machines and useless:
        raise UsageError(f"{useless[0]}: not for machines that are only described",
                         hint="--per-node sets the ranks of each")  # fmt: skip
    if paths or ("data" in given_fields(file, texts) and wanted.model.pretrained is not None):
        from evener.cli.text_data import prepared_folder, prepared_samples

        requested_sync(wanted)  # reports mistakes before a long preparation
        if wanted.model.pretrained is None:
            texts["data"] = prepared_folder(paths)
        else:
            texts["data"] = prepared_samples(paths or [wanted.data.data], wanted, None, None, None)
    given = given_fields(file, texts)
    if source_run is not None:
        request = plan_output.load_run_request(source_run, texts, of_what["link"], fleet)
        if isinstance(request.job.shape, ProgramModel):
            meaningless = [_flag_name(COST_OPTIONS, name) for name, value in of_bill.items() if value is not None]
            if budget is not None or meaningless:
                flag = meaningless[0] if meaningless else "--for"
                raise UsageError(f"{flag}: {request.job.model} decides itself how long it trains")
        if isinstance(request.job.shape, FineTuning):
            if budget is not None or epochs is not None:
                request = request_for_epochs(request, load_corpus(request.job.spec.data.data), given, budget, epochs)
        elif epochs is not None:
            raise UsageError(f"--epochs {epochs:g}: {source_run} is no fine-tuning", hint="--steps N")
        elif budget is not None:
            request = request_for_budget(lambda _: request, request.job.spec, set(FLAGS), None, budget)
    else:
        spec = with_model_folder(make_spec(file, texts))
        machines |= {"nodes": 2} if scale is not None else {}

        def make_request(spec: RunSpec) -> PlanRequest:
            if given_machines:
                return plan_output.make_machines_request(machines, of_what, spec, "data" in texts)
            return plan_output.load_fleet_request(of_what, spec, "data" in texts)

        if spec.model.pretrained is not None:
            request = make_request(spec)
            request = request_for_epochs(request, load_corpus(spec.data.data), given, budget, epochs)
        elif budget is None:
            request = make_request(spec)
        else:
            given |= {"model"} if of_what["params"] or machines["rates"] else set()
            if budget.seconds is not None and machines["rates"] and "model" not in texts and not of_what["params"]:
                raise UsageError(f"--for {budget.text} chooses a model, and --compute-tokens-per-s is the rate of one",
                                 hint="--model NAME")  # fmt: skip
            corpus = plan_output.find_corpus(spec) if "data" in given or not given_machines else None
            request = request_for_budget(make_request, spec, given, corpus, budget)
        if scale is not None:
            from evener.cli import scale_output

            return scale_output.print_scaling(request, scale, **of_scale, as_json=as_json)
    prediction = answer_request(request)
    extras = plan_output.compute_extras(prediction, request, **of_bill)
    if as_json:
        print_escaped(json.dumps(plan_output.plan_to_dict(prediction, request, extras), allow_nan=False))
    else:
        plan_output.print_plan(prediction, request, extras, is_long=is_long)
    return 0


def _flag_name(group: dict[str, tuple[Any, Any]], name: str) -> str:
    return str(group[name][0].param_decls[0])


def _check_scale_flags(
    scale: str | None, of_scale: dict[str, Any], others: dict[str, Any], texts: dict[str, str]
) -> None:
    from evener.core.base.errors import UsageError

    stray = [_flag_name(SIMULATION_OPTIONS, name) for name, value in of_scale.items() if value not in (None, False)]
    if scale is None and stray:
        raise UsageError(f"{stray[0]}: only with --scale", hint="--scale 1,2,4,…,4096")
    useless = [
        _flag_name({**MACHINE_OPTIONS, **SOURCE_OPTIONS, **COST_OPTIONS}, name)
        for name in NOT_WITH_SCALE
        if others[name] is not None
    ]
    useless += ["--sync"] if "sync" in texts else []
    if scale is not None and useless:
        raise UsageError(f"--scale simulates ranks of plain ddp: it excludes {useless[0]}",
                         hint="--per-node sets the ranks of a machine")  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add `plan`, with one option for every leaf of RunSpec."""
    from evener.cli.flags import CommandParameter, command_signature, spec_options

    options: list[CommandParameter] = [("arguments", ARGUMENTS, list[str] | None)]
    for group in (SOURCE_OPTIONS, MACHINE_OPTIONS, COST_OPTIONS):
        options += [(name, option, kind) for name, (option, kind) in group.items()]
    options.append(("scale", SCALE_FLAG, str | None))
    options += [(name, option, kind) for name, (option, kind) in SIMULATION_OPTIONS.items()]
    options += [("is_long", ALL, bool), ("as_json", AS_JSON, bool), *spec_options()]

    def command(arguments: list[str] | None, as_json: bool, is_long: bool, scale: str | None, **values: Any) -> int:
        return plan(arguments, as_json, is_long, scale, values)

    command.__doc__ = plan.__doc__
    command.__signature__ = command_signature(options)  # type: ignore[attr-defined]
    app.command("plan", epilog=EXAMPLES)(command)
