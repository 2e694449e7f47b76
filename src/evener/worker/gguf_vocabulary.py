"""The tokenizer of a model of transformers, as llama.cpp has it in a GGUF file.

llama.cpp's SentencePiece merges those two neighbours first that make the piece with the highest score, whatever the two
are. A tokenizer.json has no scores but an ordered list of merges, made of them: all pairs that make a piece, the best
piece first. So ranks of merges are scores, if the list is such a one. Pieces of equal scores stand in no order there:
in published vocabularies runs of spaces are such pieces.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import gguf

from evener.core.base.errors import UsageError

SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}  # GPT-2's
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# llama.cpp's names of how a tokenizer splits text into words   [llama.cpp: src/llama-vocab.cpp]
SPLIT_PATTERNS = {CONTRACTIONS + WORDS % r"\p{N}{1,3}": "llama-bpe", CONTRACTIONS + WORDS % r"\p{N}": "qwen2"}
SPACE = "▁"  # SentencePiece's
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}
NO_SCORES = "llama.cpp merges by a score for each piece, and this list of merges does not come from such scores"
FIRST_ALONE = ("llama.cpp puts a space before text behind a special token, too; this model was trained with one before "
               "the first text alone")  # fmt: skip
LEAST_SCORE = -1e6  # of pieces that no merge makes
BYTES = [f"<0x{i:02X}>" for i in range(256)]


class Vocabulary(NamedTuple):
    """A tokenizer as it stands in a GGUF file."""

    kind: Literal["gpt2", "llama"]  # llama.cpp's names: byte-level BPE and SentencePiece's BPE
    split: str  # llama.cpp's name of how text is split into words
    tokens: list[str]  # by number
    types: list[int]  # gguf.TokenType
    scores: list[float] | None = None  # SentencePiece: the higher, the earlier a piece is merged
    space_before_text: bool = False  # SentencePiece: also behind each special token
    warning: str = ""  # of what llama.cpp does otherwise

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_before_text)


def is_sentencepiece(tokenizer: dict[str, Any]) -> bool:
    """Return whether a tokenizer falls back to bytes for what is in none of its pieces, as SentencePiece's BPE does."""
    return bool(tokenizer["model"].get("byte_fallback"))


def read_vocabulary(tokenizer: dict[str, Any], vocab_size: int) -> Vocabulary:
    """Return what a tokenizer.json holds. Numbers of the embedding without a token are unused ones.

    Raise UsageError for a tokenizer of which no equal is known in llama.cpp. One difference is accepted: llama.cpp puts
    the space before text behind each special token, too.
    """
    model = tokenizer["model"]
    if model.get("type") != "BPE" or not model.get("merges"):
        raise UsageError(
            "--gguf: its tokenizer is not exported to GGUF, only BPE with merges, by bytes as GPT-2's or by "
            "SentencePiece as Llama 2's"
        )
    tokens, types = tokens_and_types(tokenizer, vocab_size)
    if not is_sentencepiece(tokenizer):
        return Vocabulary("gpt2", split_name(tokenizer), tokens, types)
    check_plain(tokenizer)
    scheme, scores = space_scheme(tokenizer), piece_scores(tokenizer)
    for i, token in enumerate(tokens):
        if types[i] == gguf.TokenType.NORMAL and token in BYTES:
            types[i] = gguf.TokenType.BYTE
        elif types[i] == gguf.TokenType.USER_DEFINED:
            tokens[i] = token.replace(SPACE, " ")  # as llama.cpp looks for them in the text itself
    return Vocabulary(
        "llama", "default", tokens, types,
        scores=[scores.get(token, LEAST_SCORE) for token in tokens],
        space_before_text=scheme != "never",
        warning=FIRST_ALONE if scheme == "first" else "",
    )  # fmt: skip


def split_name(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name of how a byte-level BPE tokenizer splits text. Raise UsageError if it knows none."""
    normalizer, before = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer") or {}
    parts = [{key: value for key, value in part.items() if key != "trim_offsets"}
             for part in before.get("pretokenizers", [before])]  # fmt: skip
    splits_words = parts[-1:] == [SPLIT]
    if splits_words and len(parts) == 1:
        name = "gpt-2"
    elif splits_words and parts[:-1] == [{"type": "Digits", "individual_digits": True}]:
        name = "smollm"
    else:
        pattern = parts[0].get("pattern", {}).get("Regex") if parts[1:] == [SPLIT | {"use_regex": False}] else None
        name = SPLIT_PATTERNS.get(pattern or "", "")
    if not name or (normalizer is not None and normalizer["type"] != "NFC"):
        raise UsageError(
            "--gguf: its tokenizer splits text as none of those that are exported to GGUF: GPT-2's, Llama 3's, Qwen2's "
            "and SmolLM's"
        )
    return name


def tokens_and_types(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the tokens by number, with their types."""
    tokens: list[str] = [f"[PAD{i}]" for i in range(vocab_size)]
    types: list[int] = [gguf.TokenType.UNUSED] * vocab_size
    added_tokens = tokenizer.get("added_tokens", [])
    largest = max([*tokenizer["model"]["vocab"].values(), *(added["id"] for added in added_tokens)], default=0)
    if largest >= vocab_size:
        raise UsageError(f"--gguf: the tokenizer has a token {largest}, and the model's embedding {vocab_size} tokens")
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for added in added_tokens:
        token, i = added["content"], added["id"]
        is_control = added["special"] or (token.startswith("<|") and token.endswith("|>"))
        tokens[i], types[i] = token, gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
    return tokens, types


def check_plain(tokenizer: dict[str, Any]) -> None:
    """Raise UsageError for settings of a tokenizer like SentencePiece's that llama.cpp does not have."""
    model, added_tokens = tokenizer["model"], tokenizer.get("added_tokens", [])
    found = [name for name in ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
             if model.get(name)]  # fmt: skip
    flags = ["lstrip", "rstrip", "single_word", *(["normalized"] if tokenizer.get("normalizer") else [])]
    found += [f"a token {added['content']!r} with {flag}" for added in added_tokens for flag in flags if added[flag]]
    if found:
        raise UsageError(f"--gguf: its tokenizer has {found[0]}, and llama.cpp's SentencePiece does not")


def space_scheme(tokenizer: dict[str, Any]) -> Literal["always", "first", "never"]:
    """Return before which text SentencePiece puts a space: each piece between special tokens, what begins with text, or
    none. Raise UsageError if text is changed otherwise before it is split into pieces.
    """
    normalizer, before = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer") or {}
    if normalizer is not None and not before:
        steps = normalizer.get("normalizers", [normalizer])
        if steps == [SPACES]:
            return "never"
        if steps == [{"type": "Prepend", "prepend": SPACE}, SPACES]:
            return "always"
    for scheme in ("always", "first", "never"):
        if normalizer is None and before == METASPACE | {"prepend_scheme": scheme}:
            return scheme
    raise UsageError("--gguf: its tokenizer normalizes text in another way than llama.cpp does for SentencePiece")


def piece_scores(tokenizer: dict[str, Any]) -> dict[str, float]:
    """Return the score of each piece that merges make: minus the rank of the first of these merges. Runs of spaces that
    stand among each other have one score.

    Raise UsageError if the merges are not those of scores: all pairs of pieces that make a piece, one after another.
    """
    model, added = tokenizer["model"], {one["content"] for one in tokenizer.get("added_tokens", [])}
    vocabulary = model["vocab"].keys() - added - set(BYTES)
    if not model["vocab"].keys() >= set(BYTES):
        raise UsageError("--gguf: its tokenizer falls back to bytes, but lacks tokens for some of them")
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    merges = {(left, right): rank for rank, (left, right) in enumerate(pairs) if left + right in vocabulary}
    spans: dict[str, tuple[int, int]] = {}  # ranks of the first and the last merge, in the order of the first
    for (left, right), rank in merges.items():
        spans[left + right] = spans.get(left + right, (rank, rank))[0], rank
    scores, last_rank, last_piece = dict[str, float](), -1, ""
    for piece, (first, last) in spans.items():
        is_tied = first < last_rank
        if is_tied and {*piece, *last_piece} != {SPACE}:
            raise UsageError(f"--gguf: its tokenizer has other merges between those that make {piece!r}: {NO_SCORES}")
        scores[piece] = scores[last_piece] if is_tied else -float(first)
        last_rank, last_piece = max(last_rank, last), piece
    for piece in vocabulary:
        for i in range(1, len(piece)):
            left, right = piece[:i], piece[i:]
            # llama.cpp merges characters that are no pieces, too
            if all(part in vocabulary or len(part) == 1 for part in (left, right)) and (left, right) not in merges:
                raise UsageError(f"--gguf: its tokenizer does not merge {left!r} and {right!r}: {NO_SCORES}")
    return scores
