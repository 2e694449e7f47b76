"""evener sample: what does a trained model write?"""

from __future__ import annotations

import typer

EXAMPLES = 'evener sample runs/mine --prompt "She has " --num-tokens 80'


def sample(
    run: str = typer.Argument(..., help="run directory"),
    prompt: str = typer.Option("\n", help="text to go on from [a new line]"),
    num_tokens: int = typer.Option(200, min=1, max=100_000, help="tokens to write"),
    temperature: float = typer.Option(0.8, min=0.0, help="0 takes the likeliest token every time"),
    top_k: int | None = typer.Option(None, min=1, help="draw from the k likeliest tokens [all]"),
    seed: int = typer.Option(1337, min=0, help="of the draws"),
    step: int | None = typer.Option(None, min=0, help="checkpoint [newest]"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Write text with a run's newest checkpoint."""
    import json
    import sys

    import msgspec

    from evener.core.errors import UsageError
    from evener.core.rundir import RunDir
    from evener.corpus.tokenizer import tokenizer_of
    from evener.launch.tool import lines_of

    rundir = RunDir(run)
    manifest = rundir.manifest()
    folder = rundir.whole_checkpoint(step)
    if manifest.corpus is None or manifest.shape is None:
        raise UsageError(f"{rundir}: not a model of evener's own", hint="load its weights.safetensors in your program")
    tokenizer = tokenizer_of(rundir.path, manifest.corpus)
    request = {
        "checkpoint": str(folder),
        "shape": msgspec.to_builtins(manifest.shape),
        "prompt": [int(token) for token in tokenizer.encode(prompt)],
        "num_tokens": num_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
    }
    if not request["prompt"]:
        raise UsageError("--prompt: is empty")
    ids: list[int] = list(request["prompt"])
    shown = ""
    for line in lines_of("evener.worker.sample", json.dumps(request)):
        ids.append(int(line))
        text = tokenizer.decode(ids)
        if (
            not as_json and text.startswith(shown) and not text.endswith("\ufffd")
        ):  # a character may take several tokens
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    text = tokenizer.decode(ids)
    print(json.dumps({"text": text, "checkpoint": str(folder)}) if as_json else text[len(shown) :])
    return 0
