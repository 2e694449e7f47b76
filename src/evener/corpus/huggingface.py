"""Export a tokenizer for transformers: tokenizer.json of the `tokenizers` library, and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path

from evener.corpus.tokenizer import ByteTokenizer, CharTokenizer, LibraryTokenizer, Tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, block_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; for GPT-2's own tokens only the latter, which names them."""
    config: dict[str, object] = {"model_max_length": block_size, "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, LibraryTokenizer | ByteTokenizer | CharTokenizer):
        (folder / "tokenizer.json").write_bytes(_tokenizer_json(tokenizer))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(tokenizer, LibraryTokenizer) and tokenizer.end_of_text_name is not None:
            config |= dict.fromkeys(("bos_token", "eos_token"), tokenizer.end_of_text_name)
    else:
        config["tokenizer_class"] = "GPT2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer_json(tokenizer: LibraryTokenizer | ByteTokenizer | CharTokenizer) -> bytes:
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.serialize()
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Engine

    if isinstance(tokenizer, CharTokenizer):
        engine = Engine(models.WordLevel({char: index for index, char in enumerate(tokenizer.chars)}))
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        engine.decoder = decoders.Fuse()
    else:
        engine = Engine(models.BPE({char: byte for byte, char in enumerate(_byte_names())}, []))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.decoder = decoders.ByteLevel()
    return str(engine.to_str(pretty=True)).encode()


def _byte_names() -> list[str]:
    """Return the character with which byte-level tokenizers write each byte: itself, or one above 255.   [GPT-2]"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
