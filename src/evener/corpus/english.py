"""Build the forms of English verbs, and sentences around them.

A verb phrase is a chain of helpers and one verb; each link demands a form of the next, and the first is finite:

    will   →  have          →  be      →  be              →  verb
    future    perfect          progressive passive
              (participle)     (-ing)      (participle)

Where a question or a "not" needs a helper and there is none, "do" becomes the first link; only "be" needs none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from evener.corpus.lexicon import DOUBLING, IRREGULAR, IRREGULAR_PLURALS, VERBS, LexiconVerb

GrammaticalNumber = Literal["singular", "plural"]
Tense = Literal["present", "past", "future"]
Aspect = Literal["simple", "progressive", "perfect", "perfect progressive"]
QuestionKind = Literal["no", "yes/no", "why", "when", "where", "how long"]


@dataclass(frozen=True, kw_only=True)
class VerbFeatures:
    """Grammatical features of a verb phrase. Person and number come from the subject."""

    tense: Tense = "present"
    aspect: Aspect = "simple"
    voice: Literal["active", "passive"] = "active"
    polarity: Literal["positive", "negative"] = "positive"
    question: QuestionKind = "no"
    contracted: bool = False


@dataclass(frozen=True)
class NounPhrase:
    """A noun phrase: its forms as subject and as object, and the person and number with which a verb agrees."""

    subject: str
    object: str
    person: int
    number: GrammaticalNumber

    @property
    def is_pronoun(self) -> bool:
        return self in PRONOUNS


@dataclass(frozen=True)
class PrincipalParts:
    """The principal parts of a verb."""

    base: str
    third: str
    past: str
    participle: str
    ing: str


PRONOUNS = (
    NounPhrase("I", "me", 1, "singular"),
    NounPhrase("you", "you", 2, "singular"),
    NounPhrase("he", "him", 3, "singular"),
    NounPhrase("she", "her", 3, "singular"),
    NounPhrase("it", "it", 3, "singular"),
    NounPhrase("we", "us", 1, "plural"),
    NounPhrase("you", "you", 2, "plural"),
    NounPhrase("they", "them", 3, "plural"),
)
_NOT = {"will": "won't"}
_CLITICS = {"am": "'m", "is": "'s", "are": "'re", "have": "'ve", "has": "'s", "had": "'d", "will": "'ll"}


def noun_phrase(text: str, number: GrammaticalNumber = "singular") -> NounPhrase:
    """Return the pronoun with this subject form, or any other noun phrase in the third person.

    >>> noun_phrase("they").object, noun_phrase("the letters", "plural").object
    ('them', 'the letters')
    """
    for pronoun in PRONOUNS:
        if pronoun.subject == text:
            return pronoun
    return NounPhrase(text, text, 3, number)


@cache
def principal_parts(lemma: str) -> PrincipalParts:
    """Return the base, third person, past, past participle and present participle of a verb.

    >>> principal_parts("panic")
    PrincipalParts(base='panic', third='panics', past='panicked', participle='panicked', ing='panicking')
    """
    past, participle = IRREGULAR.get(lemma) or (_regular_past(lemma),) * 2
    third = {"be": "is", "have": "has"}.get(lemma) or _add_s(lemma)
    return PrincipalParts(lemma, third, past, participle, _add_ing(lemma))


def pluralize_noun(noun: str) -> str:
    """Return the plural of a noun; of several words the last one changes.

    >>> pluralize_noun("knife"), pluralize_noun("box"), pluralize_noun("apple pie"), pluralize_noun("party")
    ('knives', 'boxes', 'apple pies', 'parties')
    """
    head, space, last = noun.rpartition(" ")
    return head + space + (IRREGULAR_PLURALS.get(last) or _add_s(last))


def with_indefinite_article(noun: str) -> str:
    """Return the noun with "a" or "an", by sound: an hour, a university.

    >>> (with_indefinite_article("old hat"), with_indefinite_article("hour"), with_indefinite_article("uniform"),
    ...  with_indefinite_article("umbrella"))
    ('an old hat', 'an hour', 'a uniform', 'an umbrella')
    """
    vowel = re.match(r"[aeiou]|hour|heir|hono|hones", noun, re.IGNORECASE)
    consonant = re.match(r"uni(?![mn])|us[aeu]|eu|ewe|one\b|once\b", noun, re.IGNORECASE)
    return f"an {noun}" if vowel and not consonant else f"a {noun}"


def _add_s(word: str) -> str:
    """Return the regular third person of a verb or plural of a noun."""
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    if word.endswith("quiz"):
        return word + "zes"
    if re.search(r"(s|x|z|ch|sh|[^aeiou]o)$", word):
        return word + "es"
    return word + "s"


def _regular_past(lemma: str) -> str:
    if lemma.endswith("e"):
        return lemma + "d"
    if re.search(r"[^aeiou]y$", lemma):
        return lemma[:-1] + "ied"
    return _double_final_consonant(lemma) + "ed"


def _add_ing(lemma: str) -> str:
    if lemma.endswith("ie"):
        return lemma[:-2] + "ying"
    if lemma.endswith("e") and not lemma.endswith(("ee", "oe", "ye")) and lemma != "be":
        return lemma[:-1] + "ing"
    return _double_final_consonant(lemma) + "ing"


def _double_final_consonant(lemma: str) -> str:
    """Prepare a verb for -ed or -ing: a final c becomes ck; the last letter doubles after one short, stressed vowel."""
    if lemma.endswith("c"):
        return lemma + "k"
    one_syllable = re.fullmatch(r"(?:[^aeiou]*|[^aeiou]*qu)[aeiou][bdfgklmnprstvz]", lemma)
    return lemma + lemma[-1] if one_syllable or lemma in DOUBLING else lemma


def why_ungrammatical(verb: LexiconVerb, features: VerbFeatures) -> str:
    """Return why English has no sentence with these features of this verb; "" if it has one."""
    if features.voice == "passive":
        if not verb.has_passive:
            return f'"{verb.lemma}" has no passive'
        if features.aspect == "perfect progressive" or (features.tense, features.aspect) == ("future", "progressive"):
            return 'English does not use "has been being written" or "will be being written"'
    if verb.is_state and "progressive" in features.aspect:
        return f'"{verb.lemma}" is a state: it has no progressive'
    return ""


def verb_phrase(lemma: str, features: VerbFeatures, subject: NounPhrase) -> list[str]:
    """Return the helpers and the verb, finite form first, without "not".

    >>> verb_phrase("write", VerbFeatures(aspect="perfect progressive"), noun_phrase("she"))
    ['has', 'been', 'writing']
    """
    links: list[tuple[str, str]] = []
    if "perfect" in features.aspect:
        links.append(("have", "participle"))
    if "progressive" in features.aspect:
        links.append(("be", "ing"))
    if features.voice == "passive":
        links.append(("be", "participle"))
    needs_helper = features.polarity == "negative" or features.question != "no"

    words, form = [], "finite"
    if features.tense == "future":
        words, form = ["will"], "base"
    elif needs_helper and not links and lemma != "be":
        words, form = [_finite("do", features.tense, subject)], "base"
    for link, demands in [*links, (lemma, "")]:
        words.append(
            _finite(link, features.tense, subject) if form == "finite" else getattr(principal_parts(link), form)
        )
        form = demands
    return words


def _finite(lemma: str, tense: str, subject: NounPhrase) -> str:
    third_singular = (subject.person, subject.number) == (3, "singular")
    if lemma == "be":
        first_singular = (subject.person, subject.number) == (1, "singular")
        if tense == "past":
            return "was" if first_singular or third_singular else "were"
        return "am" if first_singular else "is" if third_singular else "are"
    parts = principal_parts(lemma)
    if tense == "past":
        return parts.past
    return parts.third if third_singular else parts.base


def build_sentence(
    lemma: str, features: VerbFeatures, subject: str | NounPhrase, rest: str = "", *, adverb: str = ""
) -> str:
    """Build one sentence. `rest` follows the verb; `adverb` stands before it, behind the first helper.

    Raise ValueError for ungrammatical features: the passive of "sleep", the progressive of "know".

    >>> build_sentence("write", VerbFeatures(aspect="perfect progressive", polarity="negative"), "she", "the letter")
    'She has not been writing the letter.'
    >>> build_sentence("write", VerbFeatures(tense="past", voice="passive", question="yes/no"), "the letter", "by them")
    'Was the letter written by them?'
    """
    if reason := why_ungrammatical(VERBS[lemma], features):
        raise ValueError(reason)
    who = noun_phrase(subject) if isinstance(subject, str) else subject
    first, *others = verb_phrase(lemma, features, who)
    has_helper = bool(others) or lemma == "be"
    is_negative = features.polarity == "negative"

    if features.question != "no":
        opening = [] if features.question == "yes/no" else [features.question]
        if is_negative and features.contracted:
            words = [*opening, "aren't" if first == "am" else _negated(first), who.subject]
        else:
            words = [*opening, first, who.subject, *(["not"] if is_negative else [])]
        words += [adverb, *others]
    elif not has_helper:
        words = [who.subject, adverb, first]
    else:
        words = [*_subject_and_helper(who, first, features), adverb, *others]
    text = " ".join(word for word in [*words, rest] if word)
    return text[0].upper() + text[1:] + ("." if features.question == "no" else "?")


def _subject_and_helper(who: NounPhrase, helper: str, features: VerbFeatures) -> list[str]:
    if features.polarity == "negative":
        if not features.contracted:
            return [who.subject, helper, "not"]
        return ["I'm not"] if helper == "am" else [who.subject, _negated(helper)]
    if features.contracted and who.is_pronoun and (who.subject, helper) != ("it", "had"):
        return [who.subject + _CLITICS[helper]] if helper in _CLITICS else [who.subject, helper]
    return [who.subject, helper]


def _negated(helper: str) -> str:
    return _NOT.get(helper) or helper + "n't"
