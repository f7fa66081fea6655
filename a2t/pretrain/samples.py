"""Training sequences of the language model: compact text, imagined sessions, and sessions over real audio.

All are laid out by `duplex.protocol`, so that training and decoding cannot drift.  Positions are stretched, gapped and
offset up to `MAX_POSITION`: at inference they run on past everything that was evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from a2t.audio.conv_encoder import PER_UNIT
from a2t.data import world
from a2t.data.conversation import Plan, converse, imagined_speech
from a2t.data.manifest import Row
from a2t.duplex.protocol import AUDIO_ID, Layout, SpecialTokens, UnitTokens, lay_out, text_question_layout
from a2t.models.tiny import WordTokenizer
from a2t.pretrain.features import word_ends, word_frames
from a2t.pretrain.sample import MAX_POSITION, Sample, stretch, thin

KEYS = [*world.THINGS, *world.PEOPLE, *world.EVENTS]
KEY_INDEX = {k: i for i, k in enumerate(KEYS)}
COLOUR_INDEX = {c: i + 1 for i, c in enumerate(world.COLOURS)}
CLASSES = ("none", "listen", "speak", "thing", "colour", "person", "event", "order", "response", "end", "transcript")
LISTEN_WEIGHT, VALUE_WEIGHT, REPEAT_WEIGHT = 0.3, 2.0, 0.5


class Sampler:
    def __init__(self, tokenizer: WordTokenizer):
        self.tokenizer = tokenizer
        self.tokens = SpecialTokens.from_lookup(tokenizer.token_id)
        self.ids = {w: i for w in world.WORDS if (i := tokenizer.token_id(w)) is not None}
        self._word_ids = sorted(self.ids.values())

    def compact(self, rng: Random, progress: float) -> Sample:
        """Facts, chatter, then questions, as plain text: what a typed question about a transcript looks like."""
        facts = _distinct_facts(rng, rng.randint(2, 3 + int(9 * min(1.0, progress * 4))))
        people = rng.sample(world.PEOPLE, rng.choice([0, 0, 2, 3, 4]))
        heard: list[world.Sentence] = [world.state_fact(rng, f) for f in facts] + [world.arrive(rng, p) for p in people]
        rng.shuffle(heard)
        order = [s.key[1] for s in heard if s.kind == "arrival"]
        text: list[int] = self.tokenizer.encode(world.DEFAULT_PROMPT)
        sources: dict[tuple[str, ...], list[int]] = {}
        bind, guide = [], []
        for sentence in heard:
            text += self.tokenizer.encode(" ".join(sentence.words))
            if sentence.kind == "fact":
                sources[sentence.key] = [len(text) - 1]
                bind.append((len(text) - 1, *_key_and_colour(sentence.key)))
            if rng.random() < 0.25:
                text += self.tokenizer.encode(" ".join(world.small_talk(rng, False).words))
        questions = [world.ask_fact(rng, f) for f in rng.sample(facts, len(facts))]
        questions += [world.ask_order(rng, *sorted(rng.sample(order, 2), key=order.index)) for _ in order[1:]]
        rng.shuffle(questions)
        target, weight, kind = [-1] * len(text), [0.0] * len(text), [0] * len(text)
        for question in questions:
            assert question.answer is not None
            start = len(text)
            layout = text_question_layout(self.tokens, [], [], self.tokenizer.encode(" ".join(question.words)))
            answer = self.tokenizer.encode(" ".join(question.answer))
            value = 0 if question.kind == "order_question" else len(answer) - 1
            text += [*layout.ids, *answer, self.tokens.turn_eos]
            target += [-1] * (len(text) - start)
            weight += [0.0] * (len(text) - start)
            kind += [0] * (len(text) - start)
            speak = start + len(layout.ids) - 1
            target[speak - 1], weight[speak - 1], kind[speak - 1] = self.tokens.speak, 0.2, CLASSES.index("speak")
            for n, token in enumerate([*answer, self.tokens.turn_eos]):
                at = speak + n
                target[at], weight[at], kind[at] = token, 0.3, CLASSES.index("response")
                if n == value:
                    weight[at], kind[at] = VALUE_WEIGHT, _value_class(question)
                    if question.kind == "question":
                        bind.append((at, *_key_and_colour(question.key)))
                        guide.append((at, list(sources[question.key])))
        T = len(text)
        positions = np.arange(T)
        if rng.random() < 0.6:
            positions = positions + np.cumsum([rng.choice([0, 0, 1, 2, 4, 9]) for _ in range(T)])
        if rng.random() < 0.3:
            positions[rng.randrange(T) :] += rng.randint(0, 6000)
        if rng.random() < 0.5:
            positions = positions + rng.randint(0, max(0, MAX_POSITION - int(positions[-1])))
        none = np.full(T, -1)
        return Sample(
            np.array(text), none, positions, np.array(target), np.array(weight, np.float32), np.array(kind), bind, guide
        )

    def repeated(self, rng: Random) -> Sample:
        """A few sentences of text, then the request to repeat them."""
        said = [world.small_talk(rng, False).words for _ in range(rng.randint(1, 4))]
        said.insert(rng.randint(0, len(said)), world.state_fact(rng, world.draw_fact(rng, False)).words)
        words = self.tokenizer.encode(" ".join(w for s in said for w in s))
        text = self.tokenizer.encode(world.DEFAULT_PROMPT) + words
        T, none = len(text), np.full(len(text), -1)
        zeros = np.zeros(T, np.float32)
        return self._ask_to_repeat(Sample(np.array(text), none, np.arange(T), none, zeros, zeros.astype(int)), words)

    def prompted(
        self, rng: Random, row: Row, units: int, drop: float = 0.0, blank: np.ndarray | None = None
    ) -> Sample | None:
        """At most `units` of a session's audio, then the request to repeat what was said in them. None where that is
        nothing."""
        assert row.native is not None
        starts = [u for u, native in enumerate(row.native[:-2]) if native == ("<|listen|>",)]
        first = rng.choice([0, rng.choice(starts)]) if starts else 0
        units = min(units, row.units() - first)
        cut = replace(row, native=row.native[first : first + units], turns=())
        due = [(w.word, f - first * PER_UNIT) for w, f in zip(row.words, word_frames(row), strict=True)]
        words = [self.ids[w] for w, f in due if 0 <= f < units * PER_UNIT]
        if not words:
            return None
        layout = self.layout(cut)
        targets, weights, classes = self._targets(cut, layout)
        audio = np.array(layout.audio_index)
        audio[audio >= 0] += first * PER_UNIT
        sample = Sample(np.array(layout.ids), audio, np.arange(len(layout)), targets, weights, classes)
        sample = thin(rng, sample, drop, blank)
        sample = self._ask_to_repeat(sample, words)
        if rng.random() < 0.5:
            sample.positions_T = sample.positions_T + rng.randint(0, MAX_POSITION - int(sample.positions_T[-1]))
        return sample

    def _ask_to_repeat(self, sample: Sample, words: list[int]) -> Sample:
        """The request and its answer at a sample's end."""
        question = text_question_layout(self.tokens, [], [], self.tokenizer.encode(world.REPEAT)).ids
        answer = [*words, self.tokens.turn_eos]
        ids = [*question, *answer]
        start = int(sample.positions_T[-1]) + 1
        target = np.full(len(ids), -1)
        target[len(question) - 1 : -1] = answer
        said = target >= 0
        return Sample(
            np.concatenate([sample.ids_T, ids]),
            np.concatenate([sample.audio_T, np.full(len(ids), -1)]),
            np.concatenate([sample.positions_T, np.arange(start, start + len(ids))]),
            np.concatenate([sample.targets_T, target]),
            np.concatenate([sample.weights_T, REPEAT_WEIGHT * said]).astype(np.float32),
            np.concatenate([sample.classes_T, CLASSES.index("transcript") * said]).astype(int),
            sample.bind,
            sample.guide,
            sample.row,
        )

    def imagined(self, rng: Random, progress: float, repeat: bool = False) -> Sample:
        """A session without audio: a word's own embedding stands at the frame where it ends, most other frames are
        left out; one word in fifty is lost or misheard. With `repeat` a short one, and the request to repeat it."""
        facts = rng.randint(2, 3 + int(8 * progress))
        plan = Plan(rng.uniform(7, 11) * facts, facts, rng.choice([0, 0, 2, 3]), mixed=True, prompt_facts=0.35)
        if repeat:
            plan = Plan(rng.uniform(6, 20), 1, mixed=True)
        row = converse(rng, imagined_speech(rng), plan, held_out=False).row("-", "-", "-", "train")
        frames = word_ends(row, self.ids)
        truth = frames.copy()
        for f in np.nonzero(frames)[0]:
            if rng.random() < 0.02:
                frames[f] = rng.choice([0, rng.choice(self._word_ids)])
        drop = rng.choice([1.0, 1.0, 0.6])
        short = self.prompted(rng, row, rng.randint(4, 16), drop, truth == 0) if repeat else None
        sample = short or self.session(rng, row, drop=drop, blank=frames == 0)
        heard = sample.audio_T >= 0
        sample.ids_T[heard] = frames[sample.audio_T[heard]]
        sample.audio_T[:] = -1
        return sample

    def session(
        self, rng: Random, row: Row, drop: float = 0.0, blank: np.ndarray | None = None, offset: bool = True
    ) -> Sample:
        """A whole session, native tokens only. `blank` frames are left out with probability `drop`, positions stay."""
        layout = self.layout(row)
        positions = stretch(rng, layout) if offset else np.arange(len(layout))
        targets, weights, classes = self._targets(row, layout)
        bind, guide = self._guidance(row, layout)
        sample = Sample(
            np.array(layout.ids), np.array(layout.audio_index), positions, targets, weights, classes, bind, guide
        )
        return thin(rng, sample, drop, blank)

    def layout(self, row: Row) -> Layout:
        assert row.native is not None
        units = [UnitTokens(tuple(self._token(t) for t in unit)) for unit in row.native]
        return lay_out(
            self.tokens, self.tokenizer.encode(row.extra.get("prompt", world.DEFAULT_PROMPT)), units, PER_UNIT
        )

    def _token(self, token: str | int) -> int:
        found = token if isinstance(token, int) else self.tokenizer.token_id(token)
        assert found is not None, token
        return found

    def _targets(self, row: Row, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        T = len(layout)
        targets, weights, classes = np.full(T, -1), np.zeros(T, np.float32), np.zeros(T, np.int64)
        answers = {t.extra["answer_unit"]: t for t in row.turns if t.extra.get("answer_unit") is not None}
        for event in layout.events:
            at, token = event.position, event.token
            targets[at], weights[at] = token, 1.0
            name = "response"
            if token == self.tokens.listen:
                name, weights[at] = "listen", LISTEN_WEIGHT
            elif token == self.tokens.speak:
                name = "speak"
            elif token in (self.tokens.turn_eos, self.tokens.chunk_eos):
                name = "end"
            classes[at] = CLASSES.index(name)
            turn = answers.get(event.unit)
            if turn and turn.extra["value"] and self.ids.get(turn.extra["value"]) == token:
                classes[at], weights[at] = _value_class_of(turn.kind, turn.extra["key"]), VALUE_WEIGHT
        return targets, weights, classes

    def _guidance(self, row: Row, layout: Layout) -> tuple[list[tuple[int, int, int]], list[tuple[int, list[int]]]]:
        """Where a fact's value stands, and from where an answer must look at it."""
        at_audio = {a: i for i, a in enumerate(layout.audio_index) if a >= 0}
        frame_of = word_frames(row)
        bind: list[tuple[int, int, int]] = []
        sources: dict[tuple[tuple[str, ...], str], list[int]] = {}
        prompt = row.extra.get("prompt", "").split()
        for key, value, i in _facts_in_text(prompt):
            bind.append((i, *_key_and_colour(key)))
            sources.setdefault((key, value), []).append(i)
        begin = 0
        answering: dict[int, tuple[tuple[str, ...], str]] = {}
        for turn in row.turns:
            begin += len(turn.text.split())
            key, value = tuple(turn.extra["key"]), str(turn.extra["value"])
            if turn.kind == "fact" and (at := at_audio.get(frame_of[begin - 1])) is not None:
                bind.append((at, *_key_and_colour(key)))
                sources.setdefault((key, value), []).append(at)
                if (after := at_audio.get(frame_of[begin - 1] + 1)) is not None:
                    sources[key, value].append(after)
            elif turn.kind == "question" and turn.extra["answer_unit"] is not None:
                answering[turn.extra["answer_unit"]] = (key, value)
        guide = []
        for event in layout.events:
            fact = answering.get(event.unit)
            if fact and event.token == self.ids[fact[1]]:
                bind += [(event.position, *_key_and_colour(fact[0])), (event.fed_at, *_key_and_colour(fact[0]))]
                seen = [s for s in sources.get(fact, []) if s < event.position]
                if seen:
                    guide.append((event.position, seen))
                sources.setdefault(fact, []).append(event.fed_at)
        return bind, guide


def _distinct_facts(rng: Random, count: int) -> list[world.Fact]:
    facts: list[world.Fact] = []
    while len(facts) < count:
        fact = world.draw_fact(rng, held_out=False)
        if not world.conflicts(fact[0], [f[0] for f in facts]):
            facts.append(fact)
    return facts


def _key_and_colour(key: Sequence[str]) -> tuple[int, int]:
    return KEY_INDEX[key[-1]], COLOUR_INDEX[key[0]] if len(key) == 2 else 0


def _value_class_of(kind: str, key: Sequence[str]) -> int:
    if kind == "order_question":
        return CLASSES.index("order")
    if len(key) == 2:
        return CLASSES.index("colour")
    family = "thing" if key[-1] in world.THINGS else "event" if key[-1] in world.EVENTS else "person"
    return CLASSES.index(family)


def _value_class(question: world.Sentence) -> int:
    return _value_class_of(question.kind, question.key)


def _facts_in_text(words: Sequence[str]) -> list[tuple[tuple[str, ...], str, int]]:
    """Facts stated in a prompt: (key, value, index of the value)."""
    values = {*world.PLACES, *world.FOODS, *world.HOURS}
    found: list[tuple[tuple[str, ...], str, int]] = []
    key = colour = ""
    for i, word in enumerate(words):
        if word in COLOUR_INDEX:
            colour = word
        elif word in KEY_INDEX:
            key = word
        elif key and word in values:
            found.append(((colour, key) if colour else (key,), word, i))
            key = colour = ""
    return found


assert AUDIO_ID == -1  # samples mark audio positions by the same value
