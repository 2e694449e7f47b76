"""The lexicon of the verb corpus: its verbs, and the words that each combines with. `lexicon.toml` has the tables."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

Frame = Literal["intransitive", "happening", "transitive", "ditransitive", "prepositional", "linking"]

LEXICON = tomllib.loads((files("evener.corpus") / "lexicon.toml").read_text(encoding="utf-8"))

DOUBLING: frozenset[str] = frozenset(LEXICON["doubling"])
STATES: frozenset[str] = frozenset(LEXICON["states"])
EVENTS: frozenset[str] = frozenset(LEXICON["events"])
ACTIVE_ONLY: frozenset[str] = frozenset(LEXICON["active_only"])
MASS: frozenset[str] = frozenset(LEXICON["mass"])

PEOPLE: tuple[str, ...] = tuple(LEXICON["people"])
NAMES: tuple[str, ...] = tuple(LEXICON["names"])
PEOPLE_ADJECTIVES: tuple[str, ...] = tuple(LEXICON["people_adjectives"])
THING_ADJECTIVES: tuple[str, ...] = tuple(LEXICON["thing_adjectives"])
PLACES: tuple[str, ...] = tuple(LEXICON["places"])
MOTIONS: tuple[str, ...] = tuple(LEXICON["motions"])
PLACES_OF_ACTION: tuple[str, ...] = tuple(LEXICON["places_of_action"])
MANNERS: tuple[str, ...] = tuple(LEXICON["manners"])


def _by_tense_and_aspect(table: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return a table by ("past", "perfect progressive") instead of "past perfect progressive"."""
    return {tuple(key.split(" ", 1)): values for key, values in table.items()}


STATE_TIMES: dict[tuple[str, ...], list[str]] = _by_tense_and_aspect(LEXICON["state_times"])
TIMES: dict[tuple[str, ...], list[str]] = _by_tense_and_aspect(LEXICON["times"])
MID_ADVERBS: dict[tuple[str, ...], list[list[str]]] = _by_tense_and_aspect(LEXICON["mid_adverbs"])

IRREGULAR_PLURALS: dict[str, str] = LEXICON["irregular_plurals"]
IRREGULAR: dict[str, tuple[str, str]] = {
    base: (past, participle) for base, forms in LEXICON["irregular"].items() for past, participle in [forms.split()]
}


@dataclass(frozen=True)
class LexiconVerb:
    """A verb and the words that it combines with."""

    lemma: str
    frame: Frame
    words: tuple[str, ...]
    """Objects; for `happening` subjects, for `linking` complements, for `intransitive` the kind of place."""
    preposition: str = ""
    tail: str = ""

    @property
    def is_state(self) -> bool:
        return self.lemma in STATES

    @property
    def is_event(self) -> bool:
        return self.lemma in EVENTS

    @property
    def has_passive(self) -> bool:
        return self.frame in ("transitive", "ditransitive") and self.lemma not in ACTIVE_ONLY


def _read_frame(frame: Frame) -> dict[str, LexiconVerb]:
    verbs = {}
    for head, rest in LEXICON["frames"][frame].items():
        lemma, _, preposition = head.partition(" ")
        words, _, tail = rest.partition(" | ")
        verbs[lemma] = LexiconVerb(lemma, frame, tuple(words.split(", ")), preposition, tail)
    return verbs


VERBS: dict[str, LexiconVerb] = {}
for _frame in get_args(Frame):
    VERBS |= _read_frame(_frame)
