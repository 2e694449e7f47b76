"""Generate the verb corpus: sentences with every verb of the lexicon in all its grammatical forms.

Each sentence has one verb in one person, number, tense, aspect, voice, polarity and mood, with subject, object and
adverbials that fit it. The corpus is a pure function of (seed, num): it is drawn only from
`random.Random(seed).random()`, whose sequence Python promises to keep between versions. All sentences are distinct, so
that no sentence of the validation split is trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from evener.core.base.errors import UsageError
from evener.corpus.documents import CorpusSplits, Document, whole_document
from evener.corpus.english import (
    PRONOUNS,
    Aspect,
    GrammaticalNumber,
    NounPhrase,
    QuestionKind,
    Tense,
    VerbFeatures,
    build_sentence,
    noun_phrase,
    pluralize_noun,
    why_ungrammatical,
    with_indefinite_article,
)
from evener.corpus.lexicon import (
    MANNERS,
    MASS,
    MID_ADVERBS,
    MOTIONS,
    NAMES,
    PEOPLE,
    PEOPLE_ADJECTIVES,
    PLACES,
    PLACES_OF_ACTION,
    STATE_TIMES,
    THING_ADJECTIVES,
    TIMES,
    VERBS,
    LexiconVerb,
)

_PEOPLE_PRONOUNS = tuple(p for p in PRONOUNS if p.subject != "it")
_THING_PRONOUNS = {"singular": noun_phrase("it"), "plural": noun_phrase("they")}
_SINGULAR = ("the", "the", "the", "a", "a", "my", "your", "his", "her", "our", "their", "this", "that")
_PLURAL = (
    "the",
    "the",
    "the",
    "",
    "my",
    "your",
    "his",
    "her",
    "our",
    "their",
    "these",
    "those",
    "two",
    "three",
    "several",
)
_MASS = ("the", "the", "", "my", "your", "his", "her", "our", "their", "this", "that")
_TENSES: tuple[Tense, ...] = ("present", "past", "future")
_ASPECTS: tuple[Aspect, ...] = ("simple", "simple", "progressive", "perfect", "perfect progressive")
_MAX_REPEATS = 10_000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A sentence and its grammar: a line of train.jsonl."""

    text: str
    lemma: str
    person: int
    number: str
    tense: str
    aspect: str
    voice: str
    polarity: str
    question: str


def generate_sentences(seed: int, num: int) -> Iterator[Sentence]:
    """Yield `num` distinct sentences. Verbs occur equally often; the first sentences do not depend on `num`."""
    sampler = _SentenceSampler(random.Random(seed))
    verbs = list(VERBS.values())
    seen: set[str] = set()
    repeats = 0
    while len(seen) < num:
        for verb in sampler.shuffled(verbs):
            drawn = sampler.sentence(verb)
            if drawn.text in seen:
                repeats += 1
                if repeats > _MAX_REPEATS and len(seen) < repeats:
                    raise UsageError(f"the grammar has too few sentences for {num}", hint="ask for fewer --sentences")
                continue
            seen.add(drawn.text)
            yield drawn
            if len(seen) == num:
                return


def make_verb_corpus(seed: int, num: int, val_fraction: float) -> tuple[CorpusSplits, dict[str, bytes]]:
    """Return the corpus as text, one sentence per line, and as the files train.jsonl and val.jsonl."""
    num_val = round(num * val_fraction)
    if not 0 < num_val < num:
        raise UsageError(
            f"{num} sentences with a validation fraction of {val_fraction:g} leave one split empty",
            hint="for example: --sentences 100000 --val-fraction 0.1",
        )
    drawn = list(generate_sentences(seed, num))
    encoder = msgspec.json.Encoder()
    parts, files = [], {}
    for split, lines in (("train", drawn[:-num_val]), ("val", drawn[-num_val:])):
        text = "".join(line.text + "\n" for line in lines).encode()
        parts.append((whole_document(Document(f"{split}.txt", len(text), text)),))
        files[f"{split}.jsonl"] = b"".join(encoder.encode(line) + b"\n" for line in lines)
    return CorpusSplits(*parts), files


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


class _SentenceSampler:
    """Samples sentences from one stream of random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self.random = rng.random

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def choose(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = int(self.random() * (last + 1))
            order[last], order[other] = order[other], order[last]
        return order

    def sentence(self, verb: LexiconVerb) -> Sentence:
        features = self.features(verb)
        subject, rest = self.participants(verb, features)
        adverb = self.mid_adverb(verb, features)
        where = self.place_adverbial(verb, features)
        when = "" if adverb else self.time_adverbial(verb, features)  # not "will soon leave next year"
        text = build_sentence(verb.lemma, features, subject, _join(rest, where, when), adverb=adverb)
        return Sentence(
            text=text,
            lemma=verb.lemma,
            person=subject.person,
            number=subject.number,
            tense=features.tense,
            aspect=features.aspect,
            voice=features.voice,
            polarity=features.polarity,
            question=features.question,
        )

    def features(self, verb: LexiconVerb) -> VerbFeatures:
        """Sample features that the verb allows and that make sense with it."""
        while True:
            aspect = self.choose(_ASPECTS)
            negative = self.chance(0.3)
            features = VerbFeatures(
                tense=self.choose(_TENSES),
                aspect=aspect,
                voice="passive" if verb.has_passive and self.chance(0.3) else "active",
                polarity="negative" if negative else "positive",
                question=self.question(verb, aspect, negative) if self.chance(0.3) else "no",
                contracted=self.chance(0.4),
            )
            lasts_too_long = verb.is_event and aspect == "perfect progressive"
            if not lasts_too_long and not why_ungrammatical(verb, features):
                return features

    def question(self, verb: LexiconVerb, aspect: Aspect, negative: bool) -> QuestionKind:
        options: list[QuestionKind] = ["yes/no", "yes/no", "yes/no", "why"]
        if not negative:
            if aspect == "simple" and not verb.is_state:
                options.append("when")
            if not verb.is_state and verb.frame in ("transitive", "ditransitive", "intransitive"):
                options.append("where")
            if aspect == "perfect progressive" or (aspect == "perfect" and verb.is_state):
                options.append("how long")
        return self.choose(options)

    def participants(self, verb: LexiconVerb, features: VerbFeatures) -> tuple[NounPhrase, str]:
        """Sample the subject, and the objects or complement of the verb."""
        if verb.frame == "happening":
            return self.inanimate(verb.words), ""
        if features.voice == "passive":
            return self.passive_participants(verb)
        subject = self.person()
        if verb.frame == "intransitive":
            return subject, ""
        if verb.frame == "linking":
            return subject, self.choose(verb.words)
        if verb.frame == "ditransitive":
            return subject, f"{self.other_person(subject).object} {self.inanimate(verb.words, pronouns=False).object}"
        target = self.object_of(verb, subject)
        return subject, _join(verb.preposition, target.object, verb.tail)

    def passive_participants(self, verb: LexiconVerb) -> tuple[NounPhrase, str]:
        if verb.frame == "ditransitive":
            subject = self.person()
            rest = self.inanimate(verb.words, pronouns=False).object
        else:
            subject = self.object_of(verb, None)
            rest = verb.tail
        agent = f"by {self.other_person(subject).object}" if self.chance(0.4) else ""
        return subject, _join(rest, agent)

    def object_of(self, verb: LexiconVerb, subject: NounPhrase | None) -> NounPhrase:
        word = self.choose(verb.words)
        if word == "@people":
            return self.other_person(subject) if subject else self.person()
        return self.inanimate((word,))

    def person(self) -> NounPhrase:
        if self.chance(0.45):
            return self.choose(_PEOPLE_PRONOUNS)
        if self.chance(0.2):
            return noun_phrase(self.choose(NAMES))
        if self.chance(0.1):
            first, second = self.shuffled(NAMES)[:2]
            return noun_phrase(f"{first} and {second}", "plural")
        return self.noun_phrase(self.choose(PEOPLE), PEOPLE_ADJECTIVES)

    def other_person(self, than: NounPhrase) -> NounPhrase:
        """Sample someone else than the subject: "I helped me" and "we helped me" are not English."""
        while True:
            other = self.person()
            if other != than and (other.person == 3 or other.person != than.person):
                return other

    def inanimate(self, nouns: Sequence[str], *, pronouns: bool = True) -> NounPhrase:
        noun = self.noun_phrase(self.choose(nouns), THING_ADJECTIVES)
        return _THING_PRONOUNS[noun.number] if pronouns and self.chance(0.12) else noun

    def noun_phrase(self, noun: str, adjectives: Sequence[str]) -> NounPhrase:
        number: GrammaticalNumber = "plural" if noun not in MASS and self.chance(0.35) else "singular"
        determiner = self.choose(_MASS if noun in MASS else _PLURAL if number == "plural" else _SINGULAR)
        words = pluralize_noun(noun) if number == "plural" else noun
        if self.chance(0.2):
            words = f"{self.choose(adjectives)} {words}"
        return noun_phrase(
            with_indefinite_article(words) if determiner == "a" else f"{determiner} {words}".strip(), number
        )

    def place_adverbial(self, verb: LexiconVerb, features: VerbFeatures) -> str:
        """Sample an adverbial of manner or place."""
        if verb.is_state or verb.frame in ("linking", "prepositional") or features.question == "where":
            return ""
        if verb.frame == "intransitive":
            kind = verb.words[0]
            places = MOTIONS if kind == "motion" else PLACES if kind == "place" else ()
            return self.choose(places) if places and self.chance(0.6) else ""
        if verb.frame == "happening" or verb.tail or not self.chance(0.35):
            return ""
        return self.choose(PLACES_OF_ACTION if verb.is_event or self.chance(0.5) else MANNERS)

    def time_adverbial(self, verb: LexiconVerb, features: VerbFeatures) -> str:
        key = (features.tense, features.aspect)
        if features.question in ("when", "how long") or not self.chance(0.45):
            return ""
        if verb.is_state:
            return self.choose(STATE_TIMES[key])
        if verb.is_event and key == ("present", "simple"):
            return ""
        if key == ("present", "perfect") and self.chance(0.3):
            is_open = features.polarity == "negative" or features.question != "no"
            return "yet" if is_open and features.question in ("no", "yes/no") else ""
        return self.choose(TIMES[key])

    def mid_adverb(self, verb: LexiconVerb, features: VerbFeatures) -> str:
        key = (features.tense, features.aspect)
        if verb.is_state or verb.is_event or key not in MID_ADVERBS or not self.chance(0.2):
            return ""
        anywhere, in_statements = MID_ADVERBS[key]
        is_plain = features.question == "no" and features.polarity == "positive"
        options = anywhere + in_statements if is_plain else anywhere
        return self.choose(options) if options else ""
