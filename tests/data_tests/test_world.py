from collections import Counter
from random import Random

import pytest

from a2t.data import world
from a2t.data.conversation import CHUNK, Plan, Session, converse, imagined_speech

HOMOPHONES = [("here", "hear"), ("no", "know"), ("for", "four"), ("to", "two"), ("red", "read"), ("ate", "eight")]
HOMOPHONES += [
    ("their", "there"),
    ("write", "right"),
    ("new", "knew"),
    ("won", "one"),
    ("blew", "blue"),
    ("son", "sun"),
]


def talk(seed: int, plan: Plan, held_out: bool = False) -> Session:
    rng = Random(seed)
    return converse(rng, imagined_speech(rng), plan, held_out)


def test_vocabulary_size_and_homophones() -> None:
    assert 200 <= len(world.WORDS) <= 400
    assert len(set(world.WORDS)) == len(world.WORDS)
    for a, b in HOMOPHONES:
        assert not (a in world.WORDS and b in world.WORDS), (a, b)


@pytest.mark.parametrize("seed", range(5))
def test_everything_said_and_answered_is_in_the_vocabulary(seed: int) -> None:
    session = talk(seed, Plan(600, 13, 4))
    said = {w for s in session.said for w in s.sentence.words} | {
        t for unit in session.native for t in unit if not t.startswith("<")
    }
    assert said <= set(world.WORDS)


def test_held_out_combinations_never_meet_training() -> None:
    facts = {False: set(), True: set()}
    chat = {False: set(), True: set()}
    for held_out in (False, True):
        for seed in range(12):
            for s in talk(seed, Plan(600, 13, 4), held_out).said:
                x = s.sentence
                if x.kind == "fact":
                    facts[held_out].add((x.key, x.value) if len(x.key) == 1 else x.key)
                if x.kind == "chat" and " ".join(x.words) not in world.NOT_FOR_ME:
                    chat[held_out].add(" ".join(x.words))
    assert facts[True] and chat[True]
    assert not facts[False] & facts[True]
    assert not chat[False] & chat[True]


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_true_and_follow_their_question(seed: int) -> None:
    session = talk(seed, Plan(600, 13, 4))
    stated, arrived = {}, []
    for s in session.said:
        x = s.sentence
        if x.kind == "fact":
            stated[x.key] = x.value
        elif x.kind == "arrival":
            arrived.append(x.key[1])
        elif x.kind == "question":
            assert stated[x.key] == x.value
            assert x.answer is not None and x.answer[-1] == x.value
            assert x.source is not None and session.said[x.source].sentence.key == x.key
        elif x.kind == "order_question":
            first, second = x.key[1:]
            assert arrived.index(first) < arrived.index(second) and x.value == first
        if s.answer_unit is not None:
            assert s.end + 0.3 <= s.answer_unit + 1 < s.end + 1.3 + 1e-9
            assert session.native[s.answer_unit][0] == "<|speak|>"


def test_units_follow_the_grammar() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(10):
        session = talk(seed, Plan(300, 6, 2))
        speaking = False
        for unit in session.native:
            kinds[unit[0] if unit[0].startswith("<") else "goes on"] += 1
            words = [t for t in unit if not t.startswith("<")]
            assert len(words) <= CHUNK
            if unit == ["<|listen|>"]:
                assert not speaking
                continue
            assert unit[-1] == "<|chunk_eos|>"
            assert (unit[0] == "<|speak|>") != speaking
            speaking = "<|turn_eos|>" not in unit
    assert kinds["<|turn_eos|>"] > 0, "somebody is interrupted"
    assert kinds["goes on"] > 0 and kinds["<|listen|>"] > 0


def test_same_seed_same_session() -> None:
    assert talk(3, Plan(60, 4, 2, mixed=True)) == talk(3, Plan(60, 4, 2, mixed=True))
