"""evener sample: generate text with a checkpoint of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING

import typer

from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from pathlib import Path

    from evener.core.run.rundir import RunDir

SAMPLE_TOKENS, SAMPLE_S = 200, 20.0  # at the end of a run
EXAMPLES = 'evener sample runs/mine\nevener sample runs/mine --prompt "She has " --num-tokens 80'


def sample(
    run: str = typer.Argument(..., help="run directory"),
    prompt: str | None = typer.Option(None, help="text to continue [on a terminal: each line typed; else a new line]"),
    num_tokens: int = typer.Option(200, min=1, max=100_000, help="tokens to generate"),
    temperature: float = typer.Option(0.8, min=0.0, help="0 always takes the likeliest token"),
    top_k: int | None = typer.Option(None, min=1, help="sample from the k likeliest tokens [all]"),
    seed: int = typer.Option(1337, min=0, help="random seed"),
    step: int | None = typer.Option(None, min=0, help="checkpoint [newest]"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Generate text with a run's newest checkpoint.

    On a terminal and without --prompt it asks for texts to continue, until an empty line.
    """
    import json

    from evener.cli.terminal import is_interactive
    from evener.core.run.rundir import RunDir

    rundir = RunDir(run)
    folder = rundir.verified_checkpoint(step)
    is_dialog = prompt is None and not as_json and is_interactive() and sys.stdout.isatty()
    prompts = _ask_for_prompts(rundir) if is_dialog else [first_prompt(rundir) if prompt is None else prompt]
    shown = text = ""
    for text, is_complete in continue_texts(
        rundir, folder, prompts, num_tokens, temperature=temperature, top_k=top_k, seed=seed
    ):
        # A character may take several tokens.
        if not as_json and (is_complete or not text.endswith("\ufffd")):
            print_escaped(text[len(shown) :], end="\n" if is_complete else "", flush=True)
            shown = "" if is_complete else text
    if as_json:
        print_escaped(json.dumps({"text": text, "checkpoint": str(folder)}))
    return 0


def continue_texts(
    rundir: RunDir, checkpoint: Path, prompts: Iterable[str], num_tokens: int, *, temperature: float = 0.8,
    top_k: int | None = None, seed: int = 1337,
) -> Generator[tuple[str, bool]]:  # fmt: skip
    """Yield each prompt with the text generated so far, after each token, and whether it is complete.

    The next prompt is drawn when the text of the one before is complete. Raise UsageError if the model is not evener's.
    """
    import json

    import msgspec

    from evener.core.base.errors import UsageError
    from evener.core.run.resolve import pretrained_of_run
    from evener.corpus.tokenizer import load_run_tokenizer
    from evener.launch.torch_subprocess import program_lines

    manifest = rundir.manifest()
    if manifest.corpus is None or manifest.shape is None:
        raise UsageError(f"{rundir}: not one of evener's models", hint="load its weights.safetensors in your program")
    how = {"num_tokens": num_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    if (pretrained := pretrained_of_run(rundir)) is not None:
        source, tuned = pretrained
        trained = {"checkpoint": str(checkpoint), "model": str(source), "lora_rank": tuned.lora_rank,
                   "has_dora": tuned.has_dora}  # fmt: skip
        is_chat = manifest.corpus.is_chat

        def lines() -> Iterator[str]:
            for prompt in prompts:
                if not prompt:
                    raise UsageError("--prompt: is empty")
                yield json.dumps({"prompt": prompt, "is_chat": is_chat, **how})

        text = ""
        for line in program_lines("evener.worker.finetune.generate", json.dumps(trained), inputs=lines()):
            text = json.loads(line) if line else text
            yield text, not line
        return
    tokenizer = load_run_tokenizer(rundir.path, manifest.corpus)
    ids: list[int] = []

    def requests() -> Iterator[str]:
        nonlocal ids
        for prompt in prompts:
            ids = [int(token) for token in tokenizer.encode(prompt)]
            if not ids:
                raise UsageError("--prompt: is empty")
            yield json.dumps({"prompt": ids, **how})

    own = {"checkpoint": str(checkpoint), "shape": msgspec.to_builtins(manifest.shape)}
    for line in program_lines("evener.worker.generate", json.dumps(own), inputs=requests()):
        if line:
            ids.append(int(line))
        yield tokenizer.decode(ids), not line


def print_sample(rundir: RunDir) -> None:
    """Print a text by the newest checkpoint of a run that has trained one of evener's models; at most SAMPLE_S long."""
    import time

    from evener.cli.run_output import print_status
    from evener.core.base.errors import EvenerError
    from evener.core.model.shape import GPTShape

    manifest = rundir.manifest()
    if manifest.corpus is None or not isinstance(manifest.shape, GPTShape) or not rundir.checkpoint_steps():
        return
    until, written = time.monotonic() + SAMPLE_S, ""
    try:
        prompt = first_prompt(rundir)
        texts = continue_texts(rundir, rundir.verified_checkpoint(None), [prompt], SAMPLE_TOKENS)
        with contextlib.closing(texts):
            for written, _ in texts:  # noqa: B007  # the last one is printed
                if time.monotonic() > until:
                    break
    except EvenerError as error:  # the run itself has succeeded
        print_status(f"no text by the model: {error}")
        return
    print_status("it writes:")
    print_escaped(written.strip())


def first_prompt(rundir: RunDir) -> str:
    """Return a text with which a model's own text can begin: a new line, or the first token if it knows no such."""
    from evener.core.base.errors import DataError, UsageError
    from evener.corpus.tokenizer import load_run_tokenizer

    corpus = rundir.manifest().corpus
    if corpus is None:
        raise UsageError(f"{rundir}: not one of evener's models")
    tokenizer = load_run_tokenizer(rundir.path, corpus)
    try:
        tokenizer.encode("\n")
    except DataError:
        return tokenizer.decode([0])
    return "\n"


def _ask_for_prompts(rundir: RunDir) -> Iterator[str]:
    """Yield the lines that a person types, but for those that the vocabulary cannot encode, until an empty one."""
    from evener.cli.run_output import print_status
    from evener.core.base.errors import DataError
    from evener.corpus.tokenizer import load_run_tokenizer

    corpus = rundir.manifest().corpus
    is_chat = corpus is not None and corpus.is_chat
    what = "a message, and the model answers it" if is_chat else "the beginning of a text, and the model continues it"
    print_status(f"{what}; an empty line ends this")
    while True:
        print_escaped("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        try:
            if corpus is not None:
                load_run_tokenizer(rundir.path, corpus).encode(line)
        except DataError as error:
            print_status(f"{error}")
            continue
        yield line
