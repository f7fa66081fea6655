"""The embedded world: a closed vocabulary without homophones and a grammar of what people say in it.

Things have places, people like foods, events have hours, people come home one after another; around that there is
chatter, commands, greetings, back-channels, stories told by the assistant and interruptions of them.  The texts are
this project's own.  A sentence knows its true answer.

Held out: combinations are split by a hash (`is_held_out`).  A (thing, place), (person, food) or (event, hour) pair, a
chatter sentence or a coloured thing that is held out never occurs in training in any form.  Who came home before whom,
commands, greetings, stories and back-channels are the same closed sets on both sides.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

THINGS = "key book phone coat bag lamp cup hat ring map box ball knife camera letter ticket".split()
COLOURS = "red blue green black white yellow".split()
PLACES = "kitchen garden office bedroom garage bathroom hall car drawer basement library station".split()
PEOPLE = "anna peter maria david lucy oliver emma george sophie thomas helen robert".split()
FOODS = "coffee pizza bread soup rice cheese apples chocolate honey salad cake fish".split()
EVENTS = "meeting party concert lesson dinner film".split()
HOURS = "two three four five six seven eight nine ten eleven twelve".split()
SUBJECTS = ["i", "we", "they", "my brother", "my sister", "the teacher", "our friend", "the doctor", "the neighbour"]
VERBS = "saw bought found lost watched fixed painted cleaned".split()
OBJECTS = [
    "a movie", "an old house", "the new bridge", "a small dog", "some flowers", "the big window", "a train",
    "a {colour} {thing}", "the {thing}",
]  # fmt: skip
TIMES = ["yesterday", "today", "this morning", "last week", "on monday", "again", ""]
COMMANDS = {
    "turn on the light": "okay the light is on",
    "turn off the light": "okay the light is off",
    "open the door": "okay the door is open",
    "close the window": "okay the window is closed",
    "play some music": "okay i will play it",
    "stop the music": "okay the music is off",
    "set a timer": "okay the timer is set",
    "call my brother": "okay i will call him",
    "start the car": "okay the car is on",
}
POLITE = ["{}", "please {}", "can you {}", "{} please"]
GREETINGS = {
    "can you hear me": "yes i can",
    "how are you": "i am fine thank you",
    "who are you": "i am your helper",
    "what is your name": "i am your helper",
    "are you there": "yes i am",
    "thank you": "you are welcome",
}
NOT_FOR_ME = [
    "i wonder where my brother is",
    "she asked me what time it was",
    "he told me who you are",
    "i know what my sister likes",
    "they asked where the doctor was",
    "i wonder if you can hear them",
]
BACKCHANNELS = ["mm-hmm", "yeah", "right", "uh huh", "okay", "i see"]
STORIES = {
    "dog": "once there was a small black dog he lived in an old house and every morning he found some bread there",
    "train": "once there was a green train it came over the new bridge every morning and one day it lost the map",
    "garden": "once there was a big garden with white flowers my friend painted a door there and they lived in it",
}
STORY_REQUESTS = [
    "tell me a story about a {}",
    "please tell me a story about a {}",
    "can you tell me a story about a {}",
]
STOPS = ["stop", "wait a moment", "please stop", "thank you that is enough"]
DEFAULT_PROMPT = "i am your helper"
REPEAT = "please tell me again"
"""A typed request after some audio: write down all that was said (MiniCPM-o's prompted transcription)."""
ANSWERED = frozenset({"question", "order_question", "command", "greeting", "story_request"})


def _vocabulary() -> list[str]:
    text = [*THINGS, *COLOURS, *PLACES, *PEOPLE, *FOODS, *EVENTS, *HOURS, *SUBJECTS, *VERBS, *TIMES, *BACKCHANNELS]
    text += [o.replace("{colour}", "").replace("{thing}", "") for o in OBJECTS]
    for pairs in (COMMANDS, GREETINGS, STORIES):
        text += [*pairs.keys(), *pairs.values()]
    text += [*NOT_FOR_ME, *STOPS, DEFAULT_PROMPT, "please can you tell me a story about"]
    text += ["the is in i put left likes really where what does like when at starts then came home who first or"]
    return sorted({w for t in text for w in t.split()})


WORDS: list[str] = _vocabulary()


@dataclass
class Sentence:
    """One thing said. `key`/`value` are what a fact states or a question asks; `pauses` maps a word's index to the
    seconds of silence after it."""

    kind: str
    words: list[str]
    answer: list[str] | None = None
    key: tuple[str, ...] = ()
    value: str = ""
    source: int | None = None  # index of the turn that stated it; None: the prompt, or nothing
    pauses: dict[int, float] = field(default_factory=dict)


def is_held_out(*parts: str) -> bool:
    """One in eight, by content: the same on every machine."""
    return zlib.crc32(" ".join(parts).encode()) % 8 == 0


def _draw(rng: Random, held_out: bool, make: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    while is_held_out(*(parts := make())) != held_out:
        pass
    return parts


Fact = tuple[tuple[str, ...], str]  # key, value


def draw_fact(rng: Random, held_out: bool, family: str | None = None) -> Fact:
    """A key and its value: (thing,) or (colour, thing) -> place; (person,) -> food; (event,) -> hour."""
    family = family or rng.choice(["thing", "thing", "colour", "colour", "person", "person", "event"])
    if family == "colour":
        colour, thing = _draw(rng, held_out, lambda: (rng.choice(COLOURS), rng.choice(THINGS)))
        return (colour, thing), rng.choice(PLACES)
    keys, values = {"thing": (THINGS, PLACES), "person": (PEOPLE, FOODS), "event": (EVENTS, HOURS)}[family]
    key, value = _draw(rng, held_out, lambda: (rng.choice(keys), rng.choice(values)))
    return (key,), value


def conflicts(key: tuple[str, ...], known: Sequence[tuple[str, ...]]) -> bool:
    """A plain "the key" beside "the red key" would make a question ambiguous."""
    return any(key == k or (key[-1] == k[-1] and len(key) != len(k)) for k in known)


def state_fact(rng: Random, fact: Fact) -> Sentence:
    key, value = fact
    name = " ".join(key)
    if key[-1] in THINGS:
        form = rng.choice(
            ["the {} is in the {}", "the {} is in the {}", "i put the {} in the {}", "i left the {} in the {}"]
        )
    elif key[0] in EVENTS:
        form = rng.choice(["the {} is at {}", "the {} starts at {}"])
    else:
        form = rng.choice(["{} likes {}", "{} really likes {}"])
    return Sentence("fact", form.format(name, value).split(), key=key, value=value)


def ask_fact(rng: Random, fact: Fact) -> Sentence:
    key, value = fact
    name = " ".join(key)
    if key[-1] in THINGS:
        forms = ["where is the {}", "where is the {}", "tell me where the {} is", "can you tell me where the {} is"]
        answer = f"in the {value}"
    elif key[0] in EVENTS:
        forms, answer = ["when is the {}", "can you tell me when the {} is"], f"at {value}"
    else:
        forms, answer = ["what does {} like", "what does {} like", "tell me what {} likes"], f"{name} likes {value}"
    return Sentence("question", rng.choice(forms).format(name).split(), answer.split(), key=key, value=value)


def arrive(rng: Random, person: str) -> Sentence:
    return Sentence(
        "arrival", rng.choice(["{} came home", "then {} came home"]).format(person).split(), key=("home", person)
    )


def ask_order(rng: Random, first: str, second: str) -> Sentence:
    pair = [first, second]
    rng.shuffle(pair)
    words = f"who came first {pair[0]} or {pair[1]}".split()
    return Sentence("order_question", words, f"{first} came first".split(), key=("home", first, second), value=first)


def chatter(rng: Random, held_out: bool) -> Sentence:
    if rng.random() < 0.2:
        return Sentence("chat", rng.choice(NOT_FOR_ME).split())

    def make() -> tuple[str, ...]:
        thing = rng.choice(OBJECTS).format(colour=rng.choice(COLOURS), thing=rng.choice(THINGS))
        return (rng.choice(SUBJECTS), rng.choice(VERBS), thing, rng.choice(TIMES))

    return Sentence("chat", " ".join(_draw(rng, held_out, make)).split())


def small_talk(rng: Random, held_out: bool) -> Sentence:
    """Everything that is neither fact nor question."""
    roll = rng.random()
    if roll < 0.52:
        return chatter(rng, held_out)
    if roll < 0.70:
        return Sentence("backchannel", rng.choice(BACKCHANNELS).split())
    if roll < 0.82:
        command = rng.choice(list(COMMANDS))
        return Sentence("command", rng.choice(POLITE).format(command).split(), COMMANDS[command].split())
    if roll < 0.92:
        greeting = rng.choice(list(GREETINGS))
        return Sentence("greeting", greeting.split(), GREETINGS[greeting].split())
    topic = rng.choice(list(STORIES))
    return Sentence("story_request", rng.choice(STORY_REQUESTS).format(topic).split(), STORIES[topic].split())


def interruption(rng: Random) -> Sentence:
    return Sentence("interruption", rng.choice(STOPS).split())


def with_pause(rng: Random, sentence: Sentence, probability: float = 0.3) -> Sentence:
    """A speaker who stops to think inside a sentence, 0.7 to 2 s."""
    if len(sentence.words) > 2 and rng.random() < probability:
        sentence.pauses[rng.randint(1, len(sentence.words) - 2)] = rng.uniform(0.7, 2.0)
    return sentence
