"""The tokenizer of a model of transformers, as llama.cpp has it in a GGUF file.

llama.cpp's SentencePiece merges those two neighbours first that make the piece with the highest score, whatever the two
are. A tokenizer.json has no scores but an ordered list of merges, made of them: all pairs that make a piece, the best
piece first. So ranks of merges are scores, if the list is such a one.
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
NO_SCORES = "its merges follow from no scores, as SentencePiece of llama.cpp has them"
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

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_before_text)


def read_vocabulary(tokenizer: dict[str, Any], vocab_size: int) -> Vocabulary:
    """Return what a tokenizer.json holds. Numbers of the embedding without a token are unused ones.

    Raise UsageError for a tokenizer of which no equal is known in llama.cpp.
    """
    model = tokenizer["model"]
    if model.get("type") != "BPE" or not model.get("merges"):
        raise UsageError(
            "--gguf: its tokenizer is not exported to GGUF, only BPE with merges, by bytes as GPT-2's or by "
            "SentencePiece as Llama 2's"
        )
    is_sentencepiece = bool(model.get("byte_fallback"))
    split = "default" if is_sentencepiece else split_name(tokenizer)
    tokens, types = tokens_and_types(tokenizer, vocab_size)
    if not is_sentencepiece:
        return Vocabulary("gpt2", split, tokens, types)
    space_before_text, scores = has_space_before_text(tokenizer), piece_scores(tokenizer)
    for i, token in enumerate(tokens):
        if types[i] == gguf.TokenType.NORMAL and token in BYTES:
            types[i] = gguf.TokenType.BYTE
    return Vocabulary("llama", split, tokens, types, [scores.get(token, LEAST_SCORE) for token in tokens],
                      space_before_text)  # fmt: skip


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


def has_space_before_text(tokenizer: dict[str, Any]) -> bool:
    """Return whether SentencePiece puts a space before each piece of text between special tokens.

    Raise UsageError if text is changed otherwise before it is split into pieces.
    """
    normalizer, before = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer") or {}
    if normalizer is not None and not before:
        steps = normalizer.get("normalizers", [normalizer])
        if steps == [SPACES]:
            return False
        if steps == [{"type": "Prepend", "prepend": SPACE}, SPACES]:
            return True
    if normalizer is None and before == METASPACE | {"prepend_scheme": before.get("prepend_scheme")}:
        if before["prepend_scheme"] in ("always", "never"):
            return bool(before["prepend_scheme"] == "always")
        raise UsageError(
            "--gguf: its tokenizer puts a space before the first word alone, and llama.cpp behind each special token, "
            "too",
            hint="a tokenizer.json with the prepend_scheme always, if the model was trained so",
        )
    raise UsageError("--gguf: its tokenizer changes text before it splits it, other than SentencePiece of llama.cpp")


def piece_scores(tokenizer: dict[str, Any]) -> dict[str, float]:
    """Return the score of each piece that merges make: minus the rank of the first of these merges.

    Raise UsageError if the merges are not those of scores: all pairs of pieces that make a piece, one after another.
    """
    model, added = tokenizer["model"], {one["content"] for one in tokenizer.get("added_tokens", [])}
    vocabulary = model["vocab"].keys() - added - set(BYTES)
    if not model["vocab"].keys() >= set(BYTES):
        raise UsageError("--gguf: its tokenizer falls back to bytes, of which it has not all")
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    merges = {(left, right): rank for rank, (left, right) in enumerate(pairs) if left + right in vocabulary}
    scores, last_piece = dict[str, float](), ""
    for (left, right), rank in merges.items():
        if (piece := left + right) != last_piece and piece in scores:
            raise UsageError(f"--gguf: its tokenizer has other merges between those that make {piece!r}: {NO_SCORES}")
        scores.setdefault(piece, -float(rank))
        last_piece = piece
    for piece in vocabulary:
        for i in range(1, len(piece)):
            left, right = piece[:i], piece[i:]
            if left in vocabulary and right in vocabulary and (left, right) not in merges:
                raise UsageError(f"--gguf: its tokenizer does not merge {left!r} and {right!r}: {NO_SCORES}")
    return scores
