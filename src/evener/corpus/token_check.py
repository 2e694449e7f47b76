"""Check that every token id of a corpus is inside its vocabulary.

A wrong id would cause an index error deep in an embedding, or on a GPU a kernel assertion without a useful message. The
command line calls `check_token_ids` before a launch: one pass at the speed of the disk, far below a second for a corpus
in the page cache. Where the vocabulary fills the dtype no id can be wrong, and nothing is read.

Code that reads batches itself can do the same check at no cost: compare `ids.max()` with `corpus.vocab_size` and raise
`evener.core.model.corpus.token_out_of_range_error`.
"""

from __future__ import annotations

import numpy as np

from evener.core.base.errors import DataError
from evener.core.base.file_io import open_file
from evener.core.model.corpus import SPLITS, Corpus, token_out_of_range_error

_CHUNK_TOKENS = 4 * 1024 * 1024


def check_token_ids(corpus: Corpus) -> None:
    """Raise DataError with the file, position and id of the first token beyond the vocabulary, if there is one."""
    dtype = np.dtype(corpus.dtype).newbyteorder("<")
    if corpus.vocab_size > np.iinfo(dtype).max:
        return
    for split in SPLITS:
        position = 0
        try:
            with open_file(corpus.split_path(split)) as file:
                while (ids := np.frombuffer(file.read(_CHUNK_TOKENS * dtype.itemsize), dtype)).size:
                    if ids.max() >= corpus.vocab_size:
                        first = int(np.argmax(ids >= corpus.vocab_size))
                        raise token_out_of_range_error(corpus, split, position + first, int(ids[first]))
                    position += ids.size
        except OSError as error:
            raise DataError(f"{corpus.split_path(split)}: {error.strerror}") from None
