"""evener sample: generate text with a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from pathlib import Path

    from evener.core.run.rundir import RunDir

EXAMPLES = 'evener sample runs/mine --prompt "She has " --num-tokens 80'


def sample(
    run: str = typer.Argument(..., help="run directory"),
    prompt: str = typer.Option("\n", help="text to continue [a new line]"),
    num_tokens: int = typer.Option(200, min=1, max=100_000, help="tokens to generate"),
    temperature: float = typer.Option(0.8, min=0.0, help="0 always takes the likeliest token"),
    top_k: int | None = typer.Option(None, min=1, help="sample from the k likeliest tokens [all]"),
    seed: int = typer.Option(1337, min=0, help="random seed"),
    step: int | None = typer.Option(None, min=0, help="checkpoint [newest]"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Generate text with a run's newest checkpoint."""
    import json

    from evener.core.run.rundir import RunDir

    rundir = RunDir(run)
    folder, shown, text = rundir.verified_checkpoint(step), "", ""
    for text in generate_text(rundir, folder, prompt, num_tokens, temperature=temperature, top_k=top_k, seed=seed):
        # A character may take several tokens.
        if not as_json and text.startswith(shown) and not text.endswith("\ufffd"):
            print_escaped(text[len(shown) :], end="", flush=True)
            shown = text
    print_escaped(json.dumps({"text": text, "checkpoint": str(folder)}) if as_json else text[len(shown) :])
    return 0


def generate_text(rundir: RunDir, checkpoint: Path, prompt: str, num_tokens: int, *, temperature: float = 0.8,
            top_k: int | None = None, seed: int = 1337) -> Iterator[str]:  # fmt: skip
    """Yield the prompt and the text generated so far, after each token; UsageError if the model is not evener's."""
    import json

    import msgspec

    from evener.core.base.errors import UsageError
    from evener.corpus.tokenizer import load_run_tokenizer
    from evener.launch.torch_subprocess import program_lines

    manifest = rundir.manifest()
    if manifest.corpus is None or manifest.shape is None:
        raise UsageError(f"{rundir}: not one of evener's models", hint="load its weights.safetensors in your program")
    tokenizer = load_run_tokenizer(rundir.path, manifest.corpus)
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if not ids:
        raise UsageError("--prompt: is empty")
    request = {
        "checkpoint": str(checkpoint),
        "shape": msgspec.to_builtins(manifest.shape),
        "prompt": ids,
        "num_tokens": num_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
    }
    for line in program_lines("evener.worker.generate", json.dumps(request)):
        ids.append(int(line))
        yield tokenizer.decode(ids)
