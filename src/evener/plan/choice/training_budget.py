"""Choose model, batch and steps for a budget of time or of tokens, so that the loss at the end is predicted lowest.

A larger model learns more from a token, and a machine trains it on fewer tokens in the same time. The loss of a model
with N parameters that has read D tokens is

    L(N, D) = E + A / N^α + B / D^β          [Hoffmann et al. 2022; constants of Besiroglu et al. 2024]

A text that is read again teaches less each time: D = U + U·R_D·(1 − e^(−R/R_D)) after R repetitions of U tokens
[Muennighoff et al. 2023], and no model that reads it has more than MAX_PARAMS_PER_TOKEN. With a larger batch more
tokens are needed for the same loss: 1 + batch / noise scale times as many [McCandlish et al. 2018]. The noise scale
grows with about the root of the tokens read, at any size [Zhang et al. 2024].

A short run is further from what its size can learn than the law says, so small models are better there: on two cores
0.1M parameters are best for 2 minutes, and 0.4M for 10 (docs/log). So A is 0.7 of the published one up to 1e13 FLOPs,
and rises to it with their logarithm until 1e17. That makes losses comparable at equal FLOPs only.

The sizes are presets: the shapes of nanoGPT's character model with up to 10 layers, then GPT-2's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import msgspec

from evener.core.base.errors import UsageError
from evener.core.model.corpus import Corpus
from evener.core.model.shape import GPTShape
from evener.core.run.resolve import model_shape
from evener.core.run.run_spec import RunSpec

SIZES = ("g1", "g2", "g3", "g4", "g5", "g6", "g8", "g10", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
PROBED_SIZES = ("g1", "g2", "g4", "g6")  # the rates of the others follow from these
ALIKE = 1.002  # of two batches whose losses are this close, the larger one is steadier, and exchanged less often
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)  # sequences
DEFAULT_SECONDS = 180.0
TIME_SHARE = 0.88  # of the time budget is planned: evaluations and checkpoints take some, and a step may be slower
# [Besiroglu et al. 2024], who fitted the data of Hoffmann et al. again: theirs do not give their own table's sizes
A, ALPHA, B, BETA = 482.01, 0.3478, 2085.43, 0.3658
FEW_FLOPS, MANY_FLOPS, FEW_FLOPS_FACTOR = 1e13, 1e17, 0.7  # of A; between them by the logarithm of the FLOPs
REPEATS_D = 15.4  # [Muennighoff et al. 2023, section 5]
MAX_PARAMS_PER_TOKEN = 11.0  # of a text that is repeated: nanoGPT's character model has 10.7 on tiny Shakespeare
MAX_EPOCHS = 60  # after 4 · REPEATS_D repetitions 98 % of what a text can teach is learned
# nanoGPT's, for a text that is read often by a model of more parameters than the text has tokens; up to 4 epochs are
# almost as good as new text. A model of a tenth of them ended 27 % higher with it (docs/log).
DROPOUT, DROPOUT_EPOCHS = 0.2, 4.0
NOISE_TOKENS, NOISE_AFTER = 16384, 4e6  # gradient noise scale of a run of so many tokens: *assumption*


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of a run: either seconds or tokens are given."""

    text: str  # as the user gave it
    seconds: float | None = None
    tokens: float | None = None


class BudgetChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The run that fits a budget best."""

    spec: RunSpec
    shape: GPTShape
    tokens: float  # to train on
    epochs: float | None  # times that the text is read; None: its size is not known
    tokens_per_s: float | None  # predicted; None: not known, for a budget of tokens
    reducible_loss: float  # A / N^α + B / D^β: only good to compare choices
    ends_early: bool  # reading the text more often would not help any more


Throughput = Callable[[RunSpec], float]
"""Tokens/s with which a run of this spec would train; 0 if it cannot."""
ShapeOf = Callable[[RunSpec], GPTShape]


def choose_for_budget(
    spec: RunSpec, given: Collection[str], corpus: Corpus | None, budget: Budget, throughput: Throughput | None,
    shape_of: ShapeOf | None = None,
) -> BudgetChoice:  # fmt: skip
    """Return the best model, batch and steps for a budget; leaves of the spec that are `given` stay as they are.

    `throughput` is needed for a budget of time. `shape_of` returns the model of a spec, by default that of its preset
    with the corpus's vocabulary. Raise UsageError if no model fits and can take a step.
    """

    def judge(candidates: Sequence[RunSpec]) -> list[BudgetChoice]:
        shapes = map(shape_of or (lambda one: model_shape(one, corpus.vocab_size if corpus else None)), candidates)
        found = (_judge(one, shape, corpus, budget, throughput, given)
                 for one, shape in zip(candidates, shapes, strict=True))  # fmt: skip
        return [choice for choice in found if choice is not None]

    choices = judge(_sizes(spec, given))
    if not choices and "batch" not in given:  # more ranks than the default batch has sequences
        choices = judge([with_train(one, batch=batch) for one in _sizes(spec, given) for batch in BATCHES])
    if not choices:
        raise UsageError(
            f"{budget.text}: too little for one step, or no model fits into memory", hint="a larger budget"
        )
    if budget.seconds is None:  # a smaller batch would always learn more from so many tokens
        return min(choices, key=lambda choice: abs(math.log(choice.shape.num_params() / balanced_size(choice.tokens))))
    best = min(choices, key=lambda choice: choice.reducible_loss)
    if "batch" in given:
        return best
    others = [best, *judge([with_train(best.spec, batch=batch) for batch in BATCHES])]
    lowest = min(choice.reducible_loss for choice in others)
    alike = [choice for choice in others if choice.reducible_loss <= ALIKE * lowest]
    return max(alike, key=lambda choice: choice.spec.train.batch)


def reducible_loss(num_params: float, tokens: float, batch_tokens: float, corpus_tokens: float | None) -> float:
    """Return A / N^α + B / D^β after so many tokens of a text of `corpus_tokens`; None: of new text.

    >>> round(reducible_loss(10e6, 2e9, 4096, None), 2)  # 482 / 10e6^0.3478 + 2085 / 1.98e9^0.3658
    2.6
    """
    flops = 6 * num_params * tokens
    if corpus_tokens is not None and tokens > corpus_tokens:
        repetitions = tokens / corpus_tokens - 1
        tokens = corpus_tokens * (1 + REPEATS_D * (1 - math.exp(-repetitions / REPEATS_D)))
    effective = tokens / (1 + batch_tokens / (NOISE_TOKENS * math.sqrt(tokens / NOISE_AFTER)))
    few = math.log(MANY_FLOPS / flops) / math.log(MANY_FLOPS / FEW_FLOPS)
    scale = math.pow(FEW_FLOPS_FACTOR, min(1.0, max(0.0, few)))
    return scale * A / math.pow(num_params, ALPHA) + B / math.pow(effective, BETA)


def balanced_size(tokens: float) -> float:
    """Return the size whose loss falls as fast with more parameters as with more tokens, at equal FLOPs."""
    return math.pow(ALPHA * A / (BETA * B) * math.pow(tokens, BETA), 1 / ALPHA)


def _sizes(spec: RunSpec, given: Collection[str]) -> list[RunSpec]:
    """Return the spec with each size; only with its own one if the user has chosen it."""
    if set(given) & {"model", "num_layers", "num_heads", "width", "init_from"}:
        return [spec]
    return [msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, model=size)) for size in SIZES]


def _judge(
    spec: RunSpec, shape: GPTShape, corpus: Corpus | None, budget: Budget, throughput: Throughput | None,
    given: Collection[str],
) -> BudgetChoice | None:  # fmt: skip
    """Return what becomes of the budget with this model and batch; None if it does not suit the text or is no step."""
    step_tokens = spec.train.batch * shape.block_size
    tokens_per_s = None if throughput is None else throughput(spec)
    if tokens_per_s == 0:
        return None
    if budget.seconds is None:
        assert budget.tokens is not None
        tokens = budget.tokens
    else:
        assert tokens_per_s is not None
        tokens = TIME_SHARE * budget.seconds * tokens_per_s
    corpus_tokens = corpus.train_tokens if corpus else None
    ends_early = budget.seconds is not None and corpus_tokens is not None and tokens > MAX_EPOCHS * corpus_tokens
    if ends_early and corpus_tokens:
        tokens = MAX_EPOCHS * corpus_tokens
    steps = math.ceil(tokens / step_tokens) if budget.seconds is None else int(tokens / step_tokens)
    if steps < 1:
        return None
    tokens = float(steps * step_tokens)
    epochs = tokens / corpus_tokens if corpus_tokens else None
    is_free = "model" not in given and spec.model.model in SIZES[1:]
    if is_free and corpus_tokens and corpus_tokens < min(tokens, shape.num_params() / MAX_PARAMS_PER_TOKEN):
        return None
    model = spec.model
    if "dropout" not in given and epochs is not None and not set(given) & {"model"}:
        can_memorize = epochs > DROPOUT_EPOCHS and shape.num_params() > (corpus_tokens or math.inf)
        model = msgspec.structs.replace(model, dropout=DROPOUT if can_memorize else 0.0)
    chosen = with_train(msgspec.structs.replace(spec, model=model), steps=steps, max_s=budget.seconds)
    loss = reducible_loss(shape.num_params(), tokens, step_tokens, corpus_tokens)
    return BudgetChoice(
        spec=chosen,
        shape=shape,
        tokens=tokens,
        epochs=epochs,
        tokens_per_s=tokens_per_s,
        reducible_loss=loss,
        ends_early=ends_early,
    )


def with_train(spec: RunSpec, **changes: object) -> RunSpec:
    """Return the spec with other training settings."""
    return msgspec.structs.replace(spec, train=msgspec.structs.replace(spec.train, **changes))
