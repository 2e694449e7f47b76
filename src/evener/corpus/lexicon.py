"""The lexicon of the verb corpus, as tables. American English throughout.

An entry of a frame is `verb: nouns`, with a fixed ending after `|` where the verb needs one ("put the book on the
table"); columns are two or more spaces apart. `@people` stands for everyone. A verb stands in one frame. Its forms are
not here: `english.py` makes them, from `IRREGULAR` or by rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Frame = Literal["intransitive", "happening", "transitive", "ditransitive", "prepositional", "linking"]


def _entries(table: str) -> Iterator[str]:
    """Yield the entries of a table whose columns are separated by two spaces or more."""
    return (entry for entry in re.split(r" {2,}|\n", table) if entry)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Past and past participle of every irregular verb.
IRREGULAR_FORMS = """
be was been                          beat beat beaten                     become became become
begin began begun                    bend bent bent                       bet bet bet
bind bound bound                     bite bit bitten                      bleed bled bled
blow blew blown                      break broke broken                   breed bred bred
bring brought brought                build built built                    burst burst burst
buy bought bought                    cast cast cast                       catch caught caught
choose chose chosen                  cling clung clung                    come came come
creep crept crept                    cut cut cut                          deal dealt dealt
dig dug dug                          do did done                          draw drew drawn
drink drank drunk                    drive drove driven                   eat ate eaten
fall fell fallen                     feed fed fed                         feel felt felt
fight fought fought                  find found found                     flee fled fled
fly flew flown                       forbid forbade forbidden             foresee foresaw foreseen
forget forgot forgotten              forgive forgave forgiven             freeze froze frozen
get got gotten                       give gave given                      go went gone
grind ground ground                  grow grew grown                      hang hung hung
have had had                         hear heard heard                     hide hid hidden
hit hit hit                          hold held held                       hurt hurt hurt
keep kept kept                       kneel knelt knelt                    know knew known
lay laid laid                        lead led led                         leave left left
lend lent lent                       lie lay lain                         light lit lit
lose lost lost                       make made made                       meet met met
overcome overcame overcome           overtake overtook overtaken          pay paid paid
put put put                          quit quit quit                       read read read
rebuild rebuilt rebuilt              rewrite rewrote rewritten            ride rode ridden
ring rang rung                       rise rose risen                      run ran run
say said said                        see saw seen                         seek sought sought
sell sold sold                       send sent sent                       set set set
sew sewed sewn                       shake shook shaken                   shine shone shone
shoot shot shot                      show showed shown                    shrink shrank shrunk
shut shut shut                       sing sang sung                       sink sank sunk
sit sat sat                          sleep slept slept                    slide slid slid
sow sowed sown                       speak spoke spoken                   spend spent spent
spin spun spun                       split split split                    spread spread spread
stand stood stood                    steal stole stolen                   stick stuck stuck
strike struck struck                 swear swore sworn                    sweep swept swept
swim swam swum                       swing swung swung                    take took taken
teach taught taught                  tear tore torn                       tell told told
think thought thought                throw threw thrown                   understand understood understood
undertake undertook undertaken       upset upset upset                    wake woke woken
wear wore worn                       weave wove woven                     weep wept wept
win won won                          withdraw withdrew withdrawn          write wrote written
"""

# Verbs of more than one syllable that double their last letter because the stress is on it (visit, visited; but these).
DOUBLING = _words("admit begin commit control equip forbid forget occur permit prefer refer regret upset")

# States are not seen in progress: no "is knowing". Events are over at once: no "has been finding for an hour".
STATES = _words("""
    agree be believe depend deserve doubt envy fear foresee hate have hear know like love need object own prefer
    recognize regret rely remain remember resemble respect see seem trust understand want
""")
EVENTS = _words("""
    admit announce arrive become bite break burst cancel catch choose collapse deny die disappear discover drop explode
    faint find forbid forget forgive get graduate hit identify invent join leave lose marry notice occur overtake quit
    recover refuse reply respond retire reveal say set spill stick vanish veto wake win withdraw
""")
# Verbs with an object and yet without a passive.
ACTIVE_ONLY = {"have", "resemble"}

# What people do. The word after the colon says which phrases of place may follow.
INTRANSITIVE = """
arrive: place       bleed: none         blush: none         breathe: none       camp: place         chat: place
clap: none          come: motion        cough: none         crawl: motion       creep: motion       cry: place
dance: place        die: place          exercise: place     faint: place        fall: none          flee: motion
fly: motion         giggle: place       go: motion          graduate: none      hesitate: none      hurry: motion
jog: motion         jump: place         kneel: place        laugh: place        lie: place          live: place
march: motion       nod: none           panic: none         pause: place        picnic: place       pray: place
relax: place        rest: place         retire: none        return: motion      rise: none          run: motion
sail: motion        shiver: none        shop: place         shout: place        sigh: none          sit: place
skate: motion       sleep: place        slide: motion       smile: none         sneeze: none        snore: place
stand: place        stay: place         swim: motion        travel: motion      tremble: none       wait: place
wake: none          walk: motion        wander: motion      weep: place         whisper: place      work: place
yawn: none
"""

# What happens to things, and to which.
HAPPENING = """
bloom: rose, flower, tulip             boil: kettle, soup, egg              burst: pipe, balloon, dam
collapse: bridge, wall, tent           creak: door, stair, chair            disappear: ship, island, cat
explode: bomb, firework, engine        fade: photo, light, star             float: boat, log, leaf
flow: river, stream, honey             freeze: lake, river, pond            grow: tree, plant, tomato
leak: roof, pipe, bucket               melt: candle, snow, ice              occur: accident, error, storm
ring: bell, telephone, alarm           ripen: apple, tomato, pear           rust: gate, bicycle, hinge
shine: star, lamp, light               shrink: sweater, shirt, puddle       sink: boat, ship, stone
spin: wheel, coin, planet              vanish: ship, star, owl              whistle: kettle, train, arrow
"""

TRANSITIVE = """
accept: offer, invitation, apology     admire: painting, garden, artist     admit: mistake, error
adopt: kitten, plan, puppy             announce: winner, result, plan       answer: question, letter, email
arrange: meeting, flower, interview    attend: meeting, concert, lecture    avoid: puddle, question, argument
bake: cake, bread, apple pie           beat: drum, egg, rug                 begin: lesson, journey, project
bend: wire, branch, spoon              bet: money, coin | on the race       bind: book, notebook
bite: apple, sandwich, cookie          blow: whistle, trumpet, horn         borrow: book, umbrella, ladder
break: cup, window, vase, egg          breed: horse, sheep, dog             brush: horse, coat, rug
build: house, bridge, wall, igloo      burn: letter, log, candle            bury: treasure, bone, box
buy: car, ticket, hat, umbrella        call: taxi, @people                  cancel: meeting, order, flight
carry: bag, box, basket                cast: net, vote, shadow              catch: ball, fish, train
celebrate: birthday, victory           chase: dog, thief, mouse             check: list, answer, map
choose: color, gift, hat               chop: onion, wood, carrot            clean: room, window, oven
climb: hill, tree, ladder              close: door, window, gate            collect: coin, stamp, shell
compare: price, result, offer          control: machine, robot              cook: meal, rice, soup, egg
copy: picture, list, poem              count: coin, vote, sheep             cross: street, river, bridge
cut: rope, bread, cake                 decorate: room, cake, tree           defend: castle, idea, team
deliver: package, letter, pizza        deny: rumor, claim                   describe: picture, dream, animal
deserve: prize, award, break           design: bridge, engine, poster       destroy: nest, castle, document
develop: plan, tool, method            dig: hole, well, tunnel              discover: island, cave, error
discuss: problem, idea, plan           do: homework, exercise, puzzle       doubt: story, claim, result
drag: sack, log, chair                 draw: map, picture, elephant         drink: water, coffee, tea, milk
drive: car, bus, truck, ambulance      drop: plate, coin, knife             dry: dish, shirt, towel
dye: scarf, shirt, sheet               eat: apple, orange, sandwich, soup   edit: report, film, article
enjoy: concert, meal, game             envy: @people                        equip: ship, laboratory
examine: stone, insect, document       explain: rule, idea, problem         fear: storm, wolf, exam
fight: fire, enemy                     fill: bucket, bottle, pool           find: key, coin, hotel
finish: report, meal, exam             fix: bicycle, clock, engine, roof    fold: napkin, blanket, letter
follow: map, rule, @people             forbid: game, song                   foresee: problem, storm
forget: password, name, umbrella       forgive: @people                     grab: rope, handle, bag
greet: @people                         grind: coffee, pepper                guard: gate, treasure, prisoner
hang: picture, coat | on the wall      hate: storm, noise, rule             have: car, cat, idea, uncle
hear: noise, bell, song, owl           heat: soup, oven, milk               help: @people
hide: gift, key | under the bed        hit: ball, target                    hold: rope, baby, umbrella
hug: @people                           hurt: @people                        identify: bird, plant, insect
ignore: warning, advice, email         improve: design, plan, method        inspect: engine, building, elevator
invent: machine, game, engine          invite: @people                      iron: shirt, sheet
join: club, team, orchestra            keep: secret, diary, promise         kick: ball, stone, door
kiss: @people                          knit: sweater, scarf, hat            know: answer, secret, @people
lay: brick, carpet, cable              lead: team, group, orchestra         learn: language, song, poem
leave: house, city, party              lift: box, stone, suitcase           light: candle, fire, lamp
like: music, cat, song                 lock: door, safe, office             lose: key, wallet, umbrella, game
love: music, ocean, @people            make: cake, plan, omelet             marry: @people
meet: @people                          mend: sock, net, fence               mimic: bird, accent, actor
miss: train, bus, lesson               mix: paint, salad, drink             mop: floor, kitchen
move: table, piano, box                need: money, umbrella, map           notice: error, mistake, owl
observe: star, eclipse, animal         open: door, envelope, box            order: pizza, meal, book
organize: party, event, trip           overcome: problem, fear              overtake: truck, car, bus
own: house, island, farm               pack: suitcase, bag, box             paint: wall, fence, picture
park: car, truck, bus                  peel: orange, potato, apple          permit: game, visit
pick: flower, apple, pear              plan: trip, party, attack            plant: tree, rose, onion
play: game, piano, guitar, violin      polish: shoe, table, silver          postpone: meeting, trip, exam
practice: dance, song, speech          praise: @people                      prefer: tea, coffee, silence
prepare: meal, report, exam            press: button, key                   print: report, poster, email
produce: film, engine, report          protect: forest, animal, child       prune: rose, hedge, tree
publish: book, article, essay          pull: rope, cart, weed               push: cart, door, button
put: book, vase, cup | on the table    quit: job, team, club                quiz: student, child
raise: flag, question, hand            read: book, letter, article, essay   rebuild: house, wall, bridge
recognize: song, voice, @people        record: song, interview, lecture     refuse: offer, invitation
regret: mistake, decision, error       remember: name, story, @people       remove: stain, label, nail
rent: apartment, car, office           repair: roof, engine, umbrella       repeat: question, word, exercise
replace: battery, lamp, tire           rescue: cat, sailor, @people         resemble: @people
respect: rule, @people                 reveal: secret, plan                 review: film, essay, report
rewrite: essay, report, chapter        ride: horse, bicycle, elephant       save: file, money, stamp
say: word, name, prayer                scrub: floor, pan, sink              search: room, house, attic
see: star, ship, eagle, accident       seek: advice, job, treasure          sell: car, house, painting, orange
set: vase, lamp | on the shelf         sew: button, dress, shirt            shake: bottle, tree, rug
share: meal, secret, office            shoot: film, arrow                   shut: door, gate, window
sign: contract, letter, check          sing: song, hymn, anthem             slice: bread, onion, cucumber
solve: puzzle, problem, riddle         sow: seed, wheat                     spend: money | on books
spill: milk, coffee, ink               split: log, bill, coconut            spread: butter, rumor, blanket
steal: car, wallet, apple              stick: stamp, note | on the wall     stir: soup, paint, tea
stop: car, train, thief                strike: match, bell, drum            study: map, poem, history
support: team, plan, idea              sweep: floor, street, yard           swing: bat, ax, hammer
take: photo, picture, umbrella         taste: soup, cake, honey             tear: page, shirt, ticket
test: engine, machine, idea            thank: @people                       throw: ball, stone, apple
tie: knot, ribbon, rope                touch: screen, stone, elephant       train: dog, horse, athlete
translate: book, poem, article         trap: mouse, fox, wolf               trim: hedge, bush
trust: @people                         try: cake, recipe, exercise          tug: rope, sleeve
understand: question, rule, joke       undertake: journey, project          upset: @people
use: tool, computer, hour              veto: bill, plan                     visit: museum, island, @people
want: toy, apple, bicycle              warn: @people                        wash: car, dish, shirt
watch: film, game, eclipse             water: plant, garden, orchid         wear: hat, coat, uniform
weave: basket, rug, scarf              weigh: package, onion, baby          welcome: @people
win: race, prize, award                wipe: table, screen, floor           wrap: gift, sandwich, vase
write: letter, report, essay, poem
"""

# Someone gives someone something: "gave the child an apple".
DITRANSITIVE = """
ask: question, riddle, favor           award: prize, medal, honor           bring: book, cup, umbrella
feed: banana, apple, cookie            give: book, apple, gift, orange      grant: interview, wish, loan
hand: key, letter, hammer              lend: car, umbrella, ladder          mail: package, letter, invitation
offer: job, chair, apple               pass: plate, ball, envelope          promise: bicycle, answer, job
send: letter, package, email           serve: meal, omelet, pizza           show: map, picture, island
teach: lesson, song, trick             tell: story, joke, secret
"""

PREPOSITIONAL = """
agree with: @people                    apologize to: @people                argue with: @people
believe in: miracle, ghost, idea       care for: animal, baby, garden       chatter about: party, film, exam
cling to: rope, branch                 comment on: article, result          commit to: plan, project
compete with: @people                  complain about: noise, price, meal   concentrate on: problem, exam
deal with: problem, accident           depend on: @people, result           dream about: ocean, horse, island
escape from: island, prison            experiment with: color, recipe       focus on: question, lesson
insist on: answer, apology             knock on: door, window               lean on: fence, table
listen to: music, story, @people       look at: picture, eclipse, map       object to: plan, price
participate in: game, experiment       pay for: meal, ticket, orange        point at: star, map, airplane
recover from: illness, accident        refer to: article, rule, map         rely on: @people, map
reply to: email, letter                respond to: question, offer          speak to: @people
stare at: screen, owl, picture         swear at: computer, @people          talk to: @people
think about: problem, idea, exam       vote for: plan, actor                withdraw from: race, contest
worry about: exam, storm, price
"""

LINKING = """
be: ready, tired, happy, proud, at home, angry, in a hurry
become: famous, rich, strong, angry, nervous
feel: tired, happy, sick, lonely, strong
get: tired, angry, hungry, cold, lost
remain: calm, silent, awake, loyal
seem: nervous, honest, busy, sad
"""

PEOPLE = ("actor", "artist", "aunt", "brother", "child", "doctor", "engineer", "farmer", "friend", "guest", "heir",
          "lawyer", "man", "neighbor", "nurse", "officer", "pilot", "singer", "sister", "student", "teacher", "uncle",
          "woman", "writer")  # fmt: skip
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Ivan", "Lena", "Omar", "Rosa", "Tom", "Uma", "Yuki")

PEOPLE_ADJECTIVES = ("old", "young", "honest", "kind", "tall", "European", "unhappy", "famous")
THING_ADJECTIVES = ("old", "new", "small", "unusual", "useful", "ordinary", "good", "strange")

# Nouns without a plural and without a or an.
MASS = _words("""
    advice bread butter coffee history homework honey ice ink milk money music pepper rice silence silver snow tea water
    wheat wood
""")
IRREGULAR_PLURALS = dict(
    entry.split()
    for entry in _entries("""
child children  fish fish    knife knives   leaf leaves  man men      mouse mice   photo photos  piano pianos
scarf scarves   sheep sheep  thief thieves  wolf wolves  woman women
""")
)

PLACES = ("at home", "at the station", "in the garden", "in the kitchen", "near the window", "in the library",
          "under the tree", "on the beach", "outside", "there")  # fmt: skip
MOTIONS = ("to the park", "across the field", "along the river", "through the forest", "to the station",
           "toward the lake", "over the bridge", "into the city")  # fmt: skip
PLACES_OF_ACTION = ("there", "here", "outside", "in the city")
MANNERS = ("carefully", "quickly", "slowly", "quietly", "happily", "again", "with great care")

# Adverbials of time by tense and aspect: first those of states ("for years"), then those of all other verbs.
STATE_TIMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("present", "simple"): ("now", "these days"),
    ("past", "simple"): ("then", "at that time", "last year"),
    ("future", "simple"): ("next year", "one day", "by then"),
    ("present", "perfect"): ("for years", "for a long time", "since last year"),
    ("past", "perfect"): ("for years", "for a long time", "until then"),
    ("future", "perfect"): ("for years by then", "for an hour by noon"),
}
TIMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("present", "simple"): ("every day", "on Mondays", "in the morning", "once a week"),
    ("past", "simple"): ("yesterday", "last week", "an hour ago", "two days ago", "in 1999", "on Friday"),
    ("future", "simple"): ("tomorrow", "next week", "in an hour", "on Sunday", "tonight"),
    ("present", "progressive"): ("now", "right now", "at the moment", "today"),
    ("past", "progressive"): ("at noon", "at that time", "all morning", "when the bell rang"),
    ("future", "progressive"): ("this time tomorrow", "at noon", "all day tomorrow"),
    ("present", "perfect"): ("today", "this week", "twice", "before"),
    ("past", "perfect"): ("by then", "before noon", "by Friday"),
    ("future", "perfect"): ("by then", "by tomorrow", "by the end of the week"),
    ("present", "perfect progressive"): ("for two hours", "since Monday", "all day", "for an hour"),
    ("past", "perfect progressive"): ("for two hours", "since noon", "all day"),
    ("future", "perfect progressive"): ("for two hours by then", "for a week by Friday"),
}
# Adverbs between the auxiliary and the verb; the first tuple fits every sentence, the second only positive statements.
MID_ADVERBS: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("present", "simple"): (("often", "usually"), ("sometimes", "rarely", "always")),
    ("past", "simple"): (("often", "usually"), ("sometimes", "rarely", "once")),
    ("future", "simple"): ((), ("probably", "soon")),
    ("present", "progressive"): ((), ("still", "probably")),
    ("past", "progressive"): ((), ("still", "already")),
    ("present", "perfect"): ((), ("already", "just", "recently")),
    ("past", "perfect"): ((), ("already", "just", "recently")),
    ("future", "perfect"): ((), ("probably", "already")),
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


def _read_frame(frame: Frame, table: str) -> dict[str, LexiconVerb]:
    verbs = {}
    for entry in _entries(table):
        head, _, rest = entry.partition(": ")
        lemma, _, preposition = head.partition(" ")
        words, _, tail = rest.partition(" | ")
        verbs[lemma] = LexiconVerb(lemma, frame, tuple(words.split(", ")), preposition, tail)
    return verbs


IRREGULAR: dict[str, tuple[str, str]] = {
    base: (past, participle) for base, past, participle in map(str.split, _entries(IRREGULAR_FORMS))
}
VERBS: dict[str, LexiconVerb] = (
    _read_frame("intransitive", INTRANSITIVE)
    | _read_frame("happening", HAPPENING)
    | _read_frame("transitive", TRANSITIVE)
    | _read_frame("ditransitive", DITRANSITIVE)
    | _read_frame("prepositional", PREPOSITIONAL)
    | _read_frame("linking", LINKING)
)
