"""Sentences laid on a time line: who says what when, and what the assistant natively does in each unit.

The assistant decides at the end of a unit.  It answers in the first unit that ends at least `REACTION` seconds after
the question's last word, `CHUNK` words a unit; a user who talks over it, with anything but a back-channel, makes it end
its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from a2t.data import world
from a2t.data.manifest import Row, Turn, Word
from a2t.data.world import Sentence

CHUNK = 3
REACTION = 0.3
INTERRUPT_REACTION = 0.2

Speak = Callable[[Sentence], tuple[Sequence[float], Sequence[float]]]
"""Starts and ends of a sentence's words in seconds from its own start, pauses not counted."""


@dataclass
class Said:
    """A sentence on the time line; times in seconds from the start of the session."""

    sentence: Sentence
    starts: list[float]
    ends: list[float]
    answer_unit: int | None = None

    @property
    def start(self) -> float:
        return self.starts[0]

    @property
    def end(self) -> float:
        return self.ends[-1]

    def pauses(self) -> list[tuple[float, float]]:
        return [(self.ends[i], self.starts[i + 1]) for i in sorted(self.sentence.pauses)]


@dataclass
class Session:
    """`native[u]` are the native tokens of unit u, as texts, terminator included, `</unit>` not."""

    said: list[Said] = field(default_factory=list)
    native: list[list[str]] = field(default_factory=list)
    prompt: list[str] = field(default_factory=list)

    @property
    def units(self) -> int:
        return len(self.native)

    def words(self) -> list[Word]:
        triples = [(w, s, e) for x in self.said for w, s, e in zip(x.sentence.words, x.starts, x.ends, strict=True)]
        return [Word(w, s, max(s, e)) for w, s, e in sorted(triples, key=lambda t: t[2])]

    def row(self, id: str, audio: str, speaker: str, split: str) -> Row:
        turns = []
        for x in self.said:
            s = x.sentence
            extra: dict[str, Any] = {"key": list(s.key), "value": s.value, "source": s.source}
            extra |= {"answer_unit": x.answer_unit, "pauses": [list(p) for p in x.pauses()]}
            answer = " ".join(s.answer) if s.answer else None
            turns.append(Turn(s.kind, x.start, x.end, " ".join(s.words), answer, extra))
        native = tuple(tuple(u) for u in self.native)
        about = {"prompt": " ".join(self.prompt)}
        return Row(id, audio, float(self.units), speaker, split, tuple(self.words()), tuple(turns), native, about)


class TimeLine:
    """Builds a session sentence by sentence."""

    def __init__(self, rng: Random, speak: Speak):
        self.rng, self.speak = rng, speak
        self.said: list[Said] = []
        self.now = rng.uniform(0.2, 1.0)
        self._native: dict[int, list[str]] = {}

    def say(self, sentence: Sentence) -> Said:
        """Speaks now, and lets the assistant answer; time goes on after both."""
        said = self._place(sentence, self.now)
        self.said.append(said)
        if sentence.answer is None:
            self.now = max(self.now, said.end + self.rng.uniform(0.4, 2.0))
            return said
        chunks = [sentence.answer[i : i + CHUNK] for i in range(0, len(sentence.answer), CHUNK)]
        said.answer_unit = math.ceil(said.end + REACTION) - 1
        for j, chunk in enumerate(chunks):
            close = ["<|turn_eos|>"] if j == len(chunks) - 1 else []
            start = ["<|speak|>"] if j == 0 else []
            self._native[said.answer_unit + j] = [*start, *chunk, *close, "<|chunk_eos|>"]
        self.now = said.answer_unit + len(chunks) + self.rng.uniform(0.1, 1.5)
        if len(chunks) > 4:
            self._talk_over(said.answer_unit, len(chunks))
        return said

    def _talk_over(self, unit: int, chunks: int) -> None:
        """During a long answer: nothing, a back-channel (it goes on), or an interruption (it stops)."""
        rng = self.rng
        if rng.random() < 0.3:
            begin = unit + 1 + rng.uniform(0.0, 2.0)
            self.said.append(self._place(Sentence("backchannel", rng.choice(world.BACKCHANNELS).split()), begin))
        if rng.random() < 0.6:
            begin = unit + 3.2 + rng.uniform(0.3, chunks - 4.0)
            said = self._place(world.interruption(rng), begin)
            heard = next(i for i, w in enumerate(said.sentence.words) if w not in world.BACKCHANNELS)
            stop = math.ceil(said.ends[heard] + INTERRUPT_REACTION) - 1
            if stop < unit + chunks:
                for u in range(stop, unit + chunks):
                    del self._native[u]
                self._native[stop] = ["<|turn_eos|>", "<|chunk_eos|>"]
            self.said.append(said)
            self.now = max(said.end, stop + 1.0) + rng.uniform(0.4, 1.5)

    def _place(self, sentence: Sentence, begin: float) -> Said:
        starts, ends = self.speak(sentence)
        shift, out = 0.0, Said(sentence, [], [])
        for i, (s, e) in enumerate(zip(starts, ends, strict=True)):
            out.starts.append(begin + s + shift)
            out.ends.append(begin + e + shift)
            shift += sentence.pauses.get(i, 0.0)
        return out

    def close(self, prompt: list[str]) -> Session:
        last = max((math.ceil(s.end + 1.3) for s in self.said), default=1)
        units = max(last, max(self._native, default=0) + 2)
        native = [self._native.get(u, ["<|listen|>"]) for u in range(units)]
        order = sorted(range(len(self.said)), key=lambda i: self.said[i].start)
        moved = {old: new for new, old in enumerate(order)}
        for said in self.said:
            if said.sentence.source is not None:
                said.sentence.source = moved[said.sentence.source]
        return Session([self.said[i] for i in order], native, prompt)


@dataclass
class Plan:
    """How a session is made up. Facts are stated until `ask_from` of its length, then asked for; with `mixed` all is
    shuffled and a fact may be asked for again."""

    seconds: float
    facts: int
    arrivals: int = 0
    ask_from: float = 0.5
    ask_chance: float = 0.55
    mixed: bool = False
    pause_chance: float = 0.3
    prompt_facts: float = 0.0


def converse(rng: Random, speak: Speak, plan: Plan, held_out: bool) -> Session:
    """One session from a plan; `held_out` chooses the side of the split that its sentences come from."""
    facts = _draw_facts(rng, plan, held_out)
    line = TimeLine(rng, speak)
    prompt = world.DEFAULT_PROMPT.split()
    stated: list[tuple[world.Fact, int | None]] = []
    if rng.random() < plan.prompt_facts:
        for _ in range(rng.randint(1, max(1, len(facts) // 2))):
            if facts:
                fact = facts.pop()
                prompt += world.state_fact(rng, fact).words
                stated.append((fact, None))
    people = rng.sample(world.PEOPLE, plan.arrivals)
    to_arrive, arrived, open_pairs = list(people), [], list(pairwise(people))
    asked: list[int] = []
    while line.now < plan.seconds - 4.0:
        asking = plan.mixed or line.now > plan.ask_from * plan.seconds
        left = len(facts) + len(to_arrive)
        horizon = plan.seconds * (1.0 if plan.mixed else plan.ask_from)
        pace = 0.9 if line.now >= horizon else min(0.9, 7.0 * left / max(7.0, horizon - line.now))
        if left and (not asking or plan.mixed) and rng.random() < pace:
            if facts and rng.random() < len(facts) / left:
                fact = facts.pop()
                line.say(world.with_pause(rng, world.state_fact(rng, fact), plan.pause_chance))
                stated.append((fact, len(line.said) - 1))
            else:
                person = to_arrive.pop(0)
                line.say(world.with_pause(rng, world.arrive(rng, person), plan.pause_chance))
                arrived.append(person)
            continue
        pairs = [p for p in open_pairs if p[0] in arrived and p[1] in arrived]
        fresh = [i for i in range(len(stated)) if plan.mixed or i not in asked]
        if asking and (pairs or fresh) and rng.random() < plan.ask_chance:
            if pairs and rng.random() < len(pairs) / (len(pairs) + len(fresh)):
                pair = pairs[0]
                open_pairs.remove(pair)
                line.say(world.with_pause(rng, world.ask_order(rng, *pair), plan.pause_chance))
            else:
                i = rng.choice(fresh) if plan.mixed else fresh[0]
                asked.append(i)
                fact, source = stated[i]
                question = world.with_pause(rng, world.ask_fact(rng, fact), plan.pause_chance)
                question.source = source
                line.say(question)
            continue
        line.say(world.with_pause(rng, world.small_talk(rng, held_out), plan.pause_chance))
    return line.close(prompt)


def _draw_facts(rng: Random, plan: Plan, held_out: bool) -> list[world.Fact]:
    facts: list[world.Fact] = []
    while len(facts) < plan.facts:
        fact = world.draw_fact(rng, held_out)
        keys = [f[0] for f in facts]
        if len(fact[0]) == 2 and rng.random() < 0.3:  # the same thing in another colour
            twin = ((rng.choice(world.COLOURS), fact[0][1]), rng.choice(world.PLACES))
            if world.is_held_out(*twin[0]) == held_out and twin[0] != fact[0] and not world.conflicts(twin[0], keys):
                facts.append(twin)
                keys.append(twin[0])
        if len(facts) < plan.facts and not world.conflicts(fact[0], keys):
            facts.append(fact)
    rng.shuffle(facts)
    return facts


def imagined_speech(rng: Random) -> Speak:
    """Word times without a synthesizer, for training on text alone."""
    rate = rng.uniform(0.8, 1.3)

    def speak(sentence: Sentence) -> tuple[list[float], list[float]]:
        edges = [0.0]
        for word in sentence.words:
            edges.append(edges[-1] + (0.1 + 0.055 * len(word)) * rate)
        return edges[:-1], edges[1:]

    return speak
