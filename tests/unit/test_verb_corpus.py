"""The verb corpus is correct English and depends only on its seed."""

from __future__ import annotations

import doctest
import json
import re
from itertools import product

import pytest

from evener.core.base.errors import UsageError
from evener.corpus import english, lexicon, verbs
from evener.corpus.english import (
    Aspect,
    NounPhrase,
    Tense,
    VerbFeatures,
    build_sentence,
    noun_phrase,
    pluralize_noun,
    principal_parts,
    why_ungrammatical,
    with_indefinite_article,
)
from evener.corpus.lexicon import IRREGULAR, VERBS
from evener.corpus.verbs import generate_sentences, make_verb_corpus

NEGATIVE = {"polarity": "negative"}
SHORT = {"contracted": True}
ASK = {"question": "yes/no"}
PASSIVE = {"voice": "passive"}
LETTERS = noun_phrase("the letters", "plural")
YOU_ALL = NounPhrase("you", "you", 2, "plural")

# verb, tense, aspect, further features, subject, rest, the sentence; written by hand
KNOWN = [
    # person and number
    ("write", "present", "simple", {}, "I", "a letter", "I write a letter."),
    ("write", "present", "simple", {}, "you", "a letter", "You write a letter."),
    ("write", "present", "simple", {}, "she", "a letter", "She writes a letter."),
    ("write", "present", "simple", {}, "it", "a letter", "It writes a letter."),
    ("write", "present", "simple", {}, "we", "a letter", "We write a letter."),
    ("write", "present", "simple", {}, "they", "a letter", "They write a letter."),
    ("write", "present", "simple", {}, "the teacher", "a letter", "The teacher writes a letter."),
    ("go", "present", "simple", {}, "he", "to the park", "He goes to the park."),
    ("have", "present", "simple", {}, "Anna", "a car", "Anna has a car."),
    ("have", "present", "simple", {}, noun_phrase("Anna and Ben", "plural"), "a car", "Anna and Ben have a car."),
    ("be", "present", "simple", {}, "I", "ready", "I am ready."),
    ("be", "present", "simple", {}, YOU_ALL, "ready", "You are ready."),
    ("be", "present", "simple", {}, "he", "ready", "He is ready."),
    ("be", "past", "simple", {}, "I", "ready", "I was ready."),
    ("be", "past", "simple", {}, "we", "ready", "We were ready."),
    # tense and aspect
    ("sing", "past", "simple", {}, "she", "a song", "She sang a song."),
    ("sing", "future", "simple", {}, "she", "a song", "She will sing a song."),
    ("sing", "present", "progressive", {}, "I", "a song", "I am singing a song."),
    ("sing", "past", "progressive", {}, "they", "a song", "They were singing a song."),
    ("sing", "future", "progressive", {}, "he", "a song", "He will be singing a song."),
    ("sing", "present", "perfect", {}, "he", "a song", "He has sung a song."),
    ("sing", "past", "perfect", {}, "he", "a song", "He had sung a song."),
    ("sing", "future", "perfect", {}, "he", "a song", "He will have sung a song."),
    ("sing", "present", "perfect progressive", {}, "we", "a song", "We have been singing a song."),
    ("sing", "past", "perfect progressive", {}, "we", "a song", "We had been singing a song."),
    ("sing", "future", "perfect progressive", {}, "we", "a song", "We will have been singing a song."),
    ("lie", "past", "progressive", {}, "the child", "under the tree", "The child was lying under the tree."),
    ("lie", "past", "simple", {}, "the child", "under the tree", "The child lay under the tree."),
    ("panic", "past", "simple", {}, "the pilot", "", "The pilot panicked."),
    ("run", "present", "progressive", {}, "you", "home", "You are running home."),
    ("be", "present", "perfect", {}, "they", "tired", "They have been tired."),
    # negation, long and short
    ("write", "present", "perfect progressive", NEGATIVE, "she", "the letter", "She has not been writing the letter."),
    ("write", "present", "simple", NEGATIVE, "she", "the letter", "She does not write the letter."),
    ("write", "past", "simple", NEGATIVE, "they", "the letter", "They did not write the letter."),
    ("write", "present", "simple", NEGATIVE | SHORT, "I", "the letter", "I don't write the letter."),
    ("write", "present", "simple", NEGATIVE | SHORT, "he", "the letter", "He doesn't write the letter."),
    ("write", "future", "simple", NEGATIVE | SHORT, "he", "the letter", "He won't write the letter."),
    ("write", "present", "progressive", NEGATIVE | SHORT, "I", "the letter", "I'm not writing the letter."),
    ("write", "past", "perfect", NEGATIVE | SHORT, "we", "the letter", "We hadn't written the letter."),
    ("be", "present", "simple", NEGATIVE, "it", "good", "It is not good."),
    ("be", "past", "simple", NEGATIVE | SHORT, "they", "angry", "They weren't angry."),
    ("have", "present", "simple", NEGATIVE, "he", "a cat", "He does not have a cat."),
    ("do", "present", "simple", NEGATIVE, "she", "her homework", "She does not do her homework."),
    ("know", "past", "simple", NEGATIVE | SHORT, "I", "the answer", "I didn't know the answer."),
    # contraction without negation
    ("write", "future", "simple", SHORT, "I", "the letter", "I'll write the letter."),
    ("write", "present", "progressive", SHORT, "they", "the letter", "They're writing the letter."),
    ("write", "present", "perfect", SHORT, "she", "the letter", "She's written the letter."),
    ("write", "past", "perfect", SHORT, "you", "the letter", "You'd written the letter."),
    ("write", "present", "perfect", SHORT, "the teacher", "the letter", "The teacher has written the letter."),
    ("be", "present", "simple", SHORT, "I", "proud", "I'm proud."),
    ("have", "present", "simple", SHORT, "I", "a car", "I have a car."),
    # questions
    ("eat", "present", "simple", ASK, "he", "an apple", "Does he eat an apple?"),
    ("eat", "past", "simple", ASK, "you", "an apple", "Did you eat an apple?"),
    ("eat", "future", "perfect", ASK, "they", "an apple", "Will they have eaten an apple?"),
    ("eat", "present", "progressive", ASK, "I", "an apple", "Am I eating an apple?"),
    ("be", "present", "simple", ASK, "she", "happy", "Is she happy?"),
    ("be", "past", "simple", ASK, "you", "at home", "Were you at home?"),
    ("do", "past", "simple", ASK, "they", "the exercise", "Did they do the exercise?"),
    ("eat", "past", "simple", ASK | NEGATIVE, "she", "the soup", "Did she not eat the soup?"),
    ("eat", "past", "simple", ASK | NEGATIVE | SHORT, "she", "the soup", "Didn't she eat the soup?"),
    ("be", "present", "simple", ASK | NEGATIVE | SHORT, "I", "famous", "Aren't I famous?"),
    ("eat", "future", "simple", ASK | NEGATIVE | SHORT, "we", "the soup", "Won't we eat the soup?"),
    ("leave", "past", "simple", {"question": "when"}, "he", "the house", "When did he leave the house?"),
    ("meet", "future", "progressive", {"question": "where"}, "we", "them", "Where will we be meeting them?"),
    ("cry", "present", "progressive", {"question": "why"}, "the baby", "", "Why is the baby crying?"),
    ("know", "present", "perfect", {"question": "how long"}, "you", "her", "How long have you known her?"),
    # the passive
    ("write", "past", "simple", PASSIVE | ASK, "the letter", "by them", "Was the letter written by them?"),
    ("write", "present", "simple", PASSIVE, "the letter", "by me", "The letter is written by me."),
    ("write", "present", "progressive", PASSIVE, LETTERS, "", "The letters are being written."),
    ("write", "past", "progressive", PASSIVE | NEGATIVE | SHORT, LETTERS, "", "The letters weren't being written."),
    ("write", "future", "simple", PASSIVE, LETTERS, "by her", "The letters will be written by her."),
    ("write", "present", "perfect", PASSIVE | NEGATIVE, LETTERS, "yet", "The letters have not been written yet."),
    ("steal", "past", "perfect", PASSIVE, "the car", "", "The car had been stolen."),
    ("finish", "future", "perfect", PASSIVE | ASK, "the report", "", "Will the report have been finished?"),
    ("give", "past", "simple", PASSIVE, "the child", "a book by us", "The child was given a book by us."),
    ("invite", "past", "simple", PASSIVE | NEGATIVE, "I", "", "I was not invited."),
]  # fmt: skip

# base, third person, past, past participle, present participle; written by hand
PARTS = """
    be is was been being                     have has had had having            do does did done doing
    go goes went gone going                  write writes wrote written writing begin begins began begun beginning
    lie lies lay lain lying                  lay lays laid laid laying          pay pays paid paid paying
    forget forgets forgot forgotten forgetting    put puts put put putting      run runs ran run running
    fly flies flew flown flying              flee flees fled fled fleeing       see sees saw seen seeing
    catch catches caught caught catching     teach teaches taught taught teaching  swim swims swam swum swimming
    overtake overtakes overtook overtaken overtaking  quit quits quit quit quitting  sew sews sewed sewn sewing
    withdraw withdraws withdrew withdrawn withdrawing  weep weeps wept wept weeping  cling clings clung clung clinging
    spread spreads spread spread spreading   forbid forbids forbade forbidden forbidding  tear tears tore torn tearing
    get gets got gotten getting              freeze freezes froze frozen freezing   upset upsets upset upset upsetting
    seek seeks sought sought seeking         strike strikes struck struck striking  say says said said saying
    stop stops stopped stopped stopping      study studies studied studied studying  die dies died died dying
    panic panics panicked panicked panicking picnic picnics picnicked picnicked picnicking  tie ties tied tied tying
    dye dyes dyed dyed dyeing                agree agrees agreed agreed agreeing     play plays played played playing
    visit visits visited visited visiting    open opens opened opened opening        fix fixes fixed fixed fixing
    travel travels traveled traveled traveling  prefer prefers preferred preferred preferring
    admit admits admitted admitted admitting  equip equips equipped equipped equipping
    quiz quizzes quizzed quizzed quizzing    veto vetoes vetoed vetoed vetoing       watch watches watched watched watching
    kiss kisses kissed kissed kissing        wash washes washed washed washing       enjoy enjoys enjoyed enjoyed enjoying
    repair repairs repaired repaired repairing  cook cooks cooked cooked cooking     stir stirs stirred stirred stirring
    marry marries married married marrying   rely relies relied relied relying       use uses used used using
    occur occurs occurred occurred occurring  whisper whispers whispered whispered whispering
    focus focuses focused focused focusing   commit commits committed committed committing  knit knits knitted knitted knitting
"""  # noqa: E501


@pytest.mark.parametrize(("lemma", "tense", "aspect", "more", "subject", "rest", "expected"), KNOWN)
def test_sentences_match_expected_english(
    lemma: str, tense: Tense, aspect: Aspect, more: dict[str, str], subject: str | NounPhrase, rest: str, expected: str
) -> None:
    assert build_sentence(lemma, VerbFeatures(tense=tense, aspect=aspect, **more), subject, rest) == expected


@pytest.mark.parametrize("forms", re.findall(r"\S+ \S+ \S+ \S+ \S+", PARTS))
def test_verb_forms_match_expected_english(forms: str) -> None:
    parts = principal_parts(forms.split()[0])
    assert [parts.base, parts.third, parts.past, parts.participle, parts.ing] == forms.split()


def test_the_lexicon_has_200_verbs_each_in_one_frame() -> None:
    heads = [entry.split()[0] for frame in lexicon.LEXICON["frames"].values() for entry in frame]
    assert len(heads) == len(set(heads)) == len(VERBS) >= 400
    listed = set(IRREGULAR) | lexicon.STATES | lexicon.EVENTS | lexicon.DOUBLING | lexicon.ACTIVE_ONLY
    assert listed <= set(VERBS)
    assert len(IRREGULAR) >= 120
    assert not any("  " in word or ":" in word for verb in VERBS.values() for word in verb.words)


@pytest.mark.parametrize(
    ("lemma", "features", "reason"),
    [
        ("sleep", VerbFeatures(voice="passive"), "no passive"),
        ("listen", VerbFeatures(voice="passive"), "no passive"),
        ("resemble", VerbFeatures(voice="passive"), "no passive"),
        ("know", VerbFeatures(aspect="progressive"), "state"),
        ("own", VerbFeatures(aspect="perfect progressive"), "state"),
        ("write", VerbFeatures(aspect="perfect progressive", voice="passive"), "has been being written"),
        ("write", VerbFeatures(tense="future", aspect="progressive", voice="passive"), "will be being written"),
    ],
)
def test_ungrammatical_sentence_is_refused(lemma: str, features: VerbFeatures, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build_sentence(lemma, features, "she")


@pytest.mark.parametrize(
    ("noun", "expected"),
    [
        ("hour", "an hour"), ("honest man", "an honest man"), ("heir", "an heir"), ("house", "a house"),
        ("university", "a university"), ("uniform", "a uniform"), ("useful tool", "a useful tool"),
        ("unusual song", "an unusual song"), ("unhappy aunt", "an unhappy aunt"), ("uncle", "an uncle"),
        ("European pilot", "a European pilot"), ("umbrella", "an umbrella"), ("egg", "an egg"), ("horse", "a horse"),
        ("one-eyed cat", "a one-eyed cat"), ("ordinary day", "an ordinary day"), ("uninvited man", "an uninvited man"),
    ],
)  # fmt: skip
def test_article_a_or_an_follows_sound(noun: str, expected: str) -> None:
    assert with_indefinite_article(noun) == expected


def test_plurals_match_expected_english() -> None:
    nouns = "child box knife party key potato photo sheep woman apple_pie bus wolf ax dish day"
    assert [pluralize_noun(noun.replace("_", " ")) for noun in nouns.split()] == [
        "children", "boxes", "knives", "parties", "keys", "potatoes", "photos", "sheep", "women", "apple pies",
        "buses", "wolves", "axes", "dishes", "days",
    ]  # fmt: skip


def test_every_verb_makes_a_sentence_of_every_kind_it_allows() -> None:
    subjects = [noun_phrase(word) for word in ("I", "you", "she", "they")]
    for verb in VERBS.values():
        made = set()
        for tense, aspect, voice, polarity, question, contracted, subject in product(
            ("present", "past", "future"),
            ("simple", "progressive", "perfect", "perfect progressive"),
            ("active", "passive"),
            ("positive", "negative"),
            ("no", "yes/no"),
            (False, True),
            subjects[2:3] if verb.lemma != "be" else subjects,
        ):
            features = VerbFeatures(
                tense=tense, aspect=aspect, voice=voice, polarity=polarity, question=question, contracted=contracted
            )
            if not why_ungrammatical(verb, features):
                text = build_sentence(verb.lemma, features, subject)
                made.add(text)
                negations = len(re.findall(r"\bnot\b|n't\b", text))
                assert negations == (polarity == "negative"), text
                assert text.endswith("?" if question == "yes/no" else "."), text
        assert len(made) >= 30, verb.lemma


def test_generated_corpus_is_well_formed_english() -> None:
    drawn = list(generate_sentences(seed=7, num=20_000))
    assert len({one.text for one in drawn}) == len(drawn)
    known = re.compile(r"[A-Z][A-Za-z' ,19]*[.?]")
    for one in drawn:
        assert known.fullmatch(one.text), one.text
        assert not re.search(r"  | [.?,]", one.text), one.text
        assert not re.search(r"\b[Aa] (?=[AEIOUaeiou])(?!uniform|useful|European)", one.text), one.text
        assert not re.search(r"\b[Aa]n (?![aeiou]|hour|heir|honest|honor)|\b[Aa]n (uniform|useful)", one.text), one.text
        assert not re.search(r"\b(I|we|me|us)\b.*\bby (me|us)\b|\bI\b [a-z' ]*\b(helped|thanked) me\b", one.text, re.I)
        assert (one.question == "no") == one.text.endswith("."), one.text
        first_word = one.text.split()[0]
        assert one.question in ("no", "yes/no") or first_word.lower() == one.question.split()[0]
    for feature, values in {
        "tense": {"present", "past", "future"},
        "aspect": {"simple", "progressive", "perfect", "perfect progressive"},
        "voice": {"active", "passive"},
        "polarity": {"positive", "negative"},
        "question": {"no", "yes/no", "why", "when", "where", "how long"},
        "person": {1, 2, 3},
        "number": {"singular", "plural"},
        "lemma": set(VERBS),
    }.items():
        assert {getattr(one, feature) for one in drawn} == values


def test_no_sentence_is_in_both_splits() -> None:
    splits, files = make_verb_corpus(seed=0, num=3000, val_fraction=0.1)
    train, val = (
        [json.loads(line)["text"] for line in files[name].splitlines()] for name in ("train.jsonl", "val.jsonl")
    )
    assert (len(train), len(val)) == (2700, 300)
    assert not set(train) & set(val)
    assert splits.train[0].document.source == "".join(text + "\n" for text in train).encode()
    assert splits.val[0].document.source == "".join(text + "\n" for text in val).encode()


@pytest.mark.parametrize(("num", "val_fraction"), [(0, 0.1), (1, 0.5), (100, 0.0), (100, 1.0), (100, -1), (5, 0.01)])
def test_an_empty_split_is_refused(num: int, val_fraction: float) -> None:
    with pytest.raises(UsageError, match="leave one split empty"):
        make_verb_corpus(seed=0, num=num, val_fraction=val_fraction)


def test_too_many_sentences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "VERBS", {"blush": VERBS["blush"]})
    monkeypatch.setattr(verbs, "PEOPLE", ("man",))
    monkeypatch.setattr(verbs, "_MAX_REPEATS", 2000)
    with pytest.raises(UsageError, match="too few sentences for 10000000"):
        list(generate_sentences(0, 10_000_000))


@pytest.mark.parametrize("module", [english, verbs])
def test_docstring_examples_pass(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
