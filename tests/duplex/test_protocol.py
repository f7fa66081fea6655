"""The unit loop keeps the grammar whatever the model says."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.protocol import AUDIO_ID, SpecialTokens, after_audio, lay_out, text_question_layout
from a2t.duplex.unit_loop import Feed, Reply, UnitLoop, UnitResult
from a2t.kv.kinds import Kind
from tests.duplex.stub import WordTokenizer

TOKENIZER = WordTokenizer()
T = SpecialTokens.from_lookup(TOKENIZER.token_id)
V = len(TOKENIZER.vocabulary)
AUDIO_AD = torch.zeros(10, 4)


class Babbler:
    """Random logits: a few likely special tokens on a bed of words, so that every path is taken often."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, n: int) -> Iterator[torch.Tensor]:
        """n rows drawn at once."""
        logits_NV = torch.randn((n, V), generator=self.generator)
        favourite_N = torch.randint(0, 24, (n,), generator=self.generator)
        logits_NV[torch.arange(n), favourite_N] += 4  # a special token half of the time
        return iter(logits_NV)


def drive(
    loop: UnitLoop, logits: Iterator[torch.Tensor], hurry: Iterator[bool], force: bool
) -> tuple[UnitResult, list[Feed]]:
    """The unit's result and what was fed in it, what was taken back left out and what is held over added."""
    steps, feeds = loop.unit(AUDIO_AD, force), []
    try:
        feed = next(steps)
        while True:
            reply = Reply(torch.stack([next(logits) for _ in range(feed.want)]), None, next(hurry))
            feeds.append(feed)
            try:
                feed = steps.send(reply)
            finally:
                feeds[-1] = feeds[-1].first(len(feeds[-1].ids) - reply.rejected)
    except StopIteration as end:
        return end.value, [*feeds, Feed(*loop.take_held(), end.value.unit)]


CONFIGS = st.builds(
    DuplexConfig,
    max_new_speak_tokens_per_chunk=st.sampled_from([1, 2, 5, 20]),
    chunk_char_limit=st.sampled_from([None, 8, 28]),
    first_token_is_text=st.booleans(),
    greedy=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 1.05]),
    length_penalty=st.sampled_from([1.0, 1.1]),
    side_channel=st.sampled_from([True, True, False]),
    max_transcript_tokens=st.sampled_from([1, 3, 64]),
    seed=st.integers(0, 99),
    draft=st.booleans(),
)


@settings(max_examples=200)
@given(config=CONFIGS, seed=st.integers(0, 2**32), hurried=st.sampled_from([0, 5, 40]))
def test_no_model_produces_an_illegal_unit(config, seed, hurried):
    """200 conversations of 50 units: 10,000."""
    loop, babbler = UnitLoop(T, TOKENIZER.decode, config), Babbler(seed)
    chance = torch.Generator().manual_seed(seed + 1)
    turn_open, carried, units, fed = False, False, [], []
    for index in range(50):
        force = int(torch.randint(0, 8, (), generator=chance)) == 0
        hurry = (torch.randint(0, 100, (100,), generator=chance) < hurried).tolist()
        result, feeds = drive(loop, babbler(100), iter(hurry), force)
        ids = [i for feed in feeds for i in feed.ids]
        kinds = [k for feed in feeds for k in feed.kinds]
        assert {feed.unit for feed in feeds} == {index} == {result.unit}
        assert all(feed.want for feed in feeds[:-1]) and feeds[-1].want == 0
        # what was fed is what the protocol lays out, and it fits the room that the engine keeps for it
        assert ids[:11] == [T.unit] + [AUDIO_ID] * 10 and kinds[:11] == [Kind.MARKER] + [Kind.AUDIO] * 10
        assert (ids[11:], kinds[11:]) == after_audio(T, result.tokens)
        assert len(ids) <= loop.positions_per_unit(10)
        # native tokens
        native = result.native_ids
        assert native[-1] in T.terminators and not T.terminators & set(native[:-1])
        assert not {T.asr_start, T.asr_end, T.tts_pad} & set(native)
        if force:
            assert native == ([T.turn_eos] if turn_open else []) + [T.listen]
        else:
            assert len(native) <= config.max_new_speak_tokens_per_chunk
        for token in native:
            assert token != T.listen or not turn_open, "listening is not possible in an open turn"
            if token == T.turn_eos:
                turn_open = False
            elif token not in T.terminators:
                turn_open = True
        words = [i for i in native if i >= TOKENIZER.specials]
        if not config.first_token_is_text:
            words = [i for i in native[1:] if i >= TOKENIZER.specials]
        assert result.response_ids == words and result.response_text == TOKENIZER.decode(words)
        if config.chunk_char_limit is not None and len(words) > 1:
            assert len(result.response_text) < config.chunk_char_limit
        # the segment
        assert all(i >= TOKENIZER.specials for i in result.transcript_ids)
        assert len(result.transcript_ids) <= config.max_transcript_tokens
        assert result.transcript_text == TOKENIZER.decode(result.transcript_ids)
        if carried:
            assert result.segment_opened or result.segment_closed_by == "budget"
        carried = result.segment_closed_by == "budget"
        assert (result.segment_closed_by is not None) == (result.segment_opened or carried)
        assert config.side_channel or not result.segment_opened
        # the state's own account: a turn refused at the character limit goes on
        assert loop.turn_open == turn_open or native[-1] == T.chunk_eos
        turn_open = loop.turn_open
        units.append(result.tokens)
        fed += ids
    assert fed == lay_out(T, [], units).ids


def scripted(
    *likely: str | list[str], hurry_from: int = 99, loop: UnitLoop, force: bool = False
) -> tuple[UnitResult, int]:
    """A unit where the model's argmax is `likely`, answer by answer; a list gives first and second choice. Returns its
    result and the number of feeds."""

    def logits() -> Iterator[torch.Tensor]:
        for choice in likely:
            logits_V = torch.zeros(V)
            for rank, text in enumerate([choice] if isinstance(choice, str) else choice):
                logits_V[TOKENIZER.ids[text]] = 9.0 - rank
            yield logits_V

    steps, feeds, n = loop.unit(AUDIO_AD, force), [], 0
    answers = logits()
    try:
        feed = next(steps)
        while True:
            feeds.append(feed)
            assert feed.want == 1
            reply, n = Reply(next(answers)[None], None, n >= hurry_from), n + 1
            feed = steps.send(reply)
    except StopIteration as end:
        assert next(answers, None) is None, "the script is used up"
        assert loop.take_held()[0], "a unit ends with tokens that wait for the next"
        return end.value, len(feeds)


@pytest.fixture
def loop() -> UnitLoop:
    return UnitLoop(T, TOKENIZER.decode, DuplexConfig(draft=False))


def test_listening_without_a_segment_is_two_feeds_and_one_with_drafts(loop):
    result, feeds = scripted("<|listen|>", "amber", loop=loop)
    assert result.listening and result.native_ids == [T.listen] and not result.segment_opened and feeds == 2


def test_a_segment_in_a_listening_unit(loop):
    result, feeds = scripted("<|listen|>", "<|asr_start|>", "amber", "boat", "<|asr_end|>", loop=loop)
    assert result.transcript_text == "amber boat" and result.segment_closed_by == "model" and feeds == 5


def test_a_segment_comes_after_the_first_native_token_and_the_answer_goes_on_after_it(loop):
    script = ["<|speak|>", ["<|asr_start|>", "cup"], "amber", "<|asr_end|>", "door", "<|turn_eos|>", "<|chunk_eos|>"]
    result, _ = scripted(*script, loop=loop)
    assert (result.transcript_text, result.response_text) == ("amber", "door") and result.end_of_turn
    assert result.native_ids == [T.speak, TOKENIZER.ids["door"], T.turn_eos, T.chunk_eos]
    assert result.speech_ids == [TOKENIZER.ids["door"], T.turn_eos]


def test_the_side_channel_stays_shut_where_it_is_not_the_argmax(loop):
    result, _ = scripted("<|speak|>", ["cup", "<|asr_start|>"], "<|chunk_eos|>", loop=loop)
    assert not result.segment_opened and result.response_text == "cup"


@pytest.mark.parametrize("control", ["<|listen|>", "<|asr_start|>", "<|chunk_eos|>", "</unit>", "<pad>"])
def test_anything_that_is_no_text_closes_the_segment(loop, control):
    result, _ = scripted("<|listen|>", "<|asr_start|>", "amber", control, loop=loop)
    assert result.transcript_text == "amber" and result.segment_closed_by == "control"


def test_the_segment_ends_at_64_tokens(loop):
    result, feeds = scripted("<|listen|>", "<|asr_start|>", *["amber"] * 64, loop=loop)
    assert len(result.transcript_ids) == 64 and result.segment_closed_by == "limit" and feeds == 2 + 1 + 63


def test_what_hurry_cuts_off_carries_over(loop):
    first, _ = scripted("<|listen|>", "<|asr_start|>", "amber", "boat", hurry_from=3, loop=loop)
    assert first.transcript_text == "amber" and first.segment_closed_by == "budget" and loop.carry_over
    second, _ = scripted(
        "<|listen|>", "cup", "boat", "<|asr_end|>", loop=loop
    )  # `cup`, not <|asr_start|>, is the argmax
    assert second.transcript_text == "boat" and second.segment_closed_by == "model" and not loop.carry_over
    third, _ = scripted("<|listen|>", "cup", loop=loop)
    assert not third.segment_opened


def test_a_segment_that_found_no_time_to_open_opens_in_the_next_unit(loop):
    first, _ = scripted("<|listen|>", "<|asr_start|>", hurry_from=0, loop=loop)
    assert not first.segment_opened and first.segment_closed_by == "budget"
    second, _ = scripted("<|listen|>", "cup", "amber", "<|asr_end|>", loop=loop)
    assert second.transcript_text == "amber"
    quiet, _ = scripted("<|listen|>", "cup", hurry_from=0, loop=loop)  # nothing to write, nothing carried
    assert quiet.segment_closed_by is None and not loop.carry_over


def test_listen_in_an_open_turn_becomes_tts_bos_and_forced_listening_closes_the_turn(loop):
    scripted("<|speak|>", "cup", "<|chunk_eos|>", loop=loop)
    assert loop.turn_open
    result, _ = scripted("<|listen|>", "cup", "<|chunk_eos|>", loop=loop)
    assert result.native_ids[0] == T.tts_bos and not result.listening
    forced, _ = scripted("<|speak|>", "<|asr_start|>", "amber", "<|asr_end|>", "cup", loop=loop, force=True)
    assert forced.native_ids == [T.turn_eos, T.listen] and forced.transcript_text == "amber"
    assert forced.listening and not forced.end_of_turn and not loop.turn_open
    again, _ = scripted("<|listen|>", "cup", loop=loop)
    assert again.native_ids == [T.listen]


def test_state_survives_json_and_replay_leaves_the_same_state():
    import json

    config = DuplexConfig(greedy=False, repetition_penalty=1.05)
    straight = UnitLoop(T, TOKENIZER.decode, config)
    broken = UnitLoop(T, TOKENIZER.decode, config)
    logits, never = list(Babbler(3)(4000)), lambda: iter([False] * 100)
    rows, other = iter(logits), iter(logits)
    for unit in range(20):
        one, _ = drive(straight, rows, never(), False)
        two, _ = drive(broken, other, never(), False)
        assert one == two
        saved = json.loads(json.dumps(broken.state_dict()))
        broken = UnitLoop(T, TOKENIZER.decode, config)
        broken.load_state_dict(saved)
        assert broken.next_unit == unit + 1
    replayed = UnitLoop(T, TOKENIZER.decode, config)
    assert not replayed.take_held()[0], "a replayed unit is fed whole"
    steps = replayed.replay(AUDIO_AD, one.tokens)
    assert next(steps).ids[11:] == after_audio(T, one.tokens)[0]
    with pytest.raises(StopIteration) as end:
        steps.send(Reply())
    assert (end.value.value.native_ids, end.value.value.response_text) == (one.native_ids, one.response_text)


def test_a_text_question_is_prefix_transcript_question_and_a_forced_speak():
    layout = text_question_layout(T, [20, 21], [30, 31, 32], [40])
    assert layout.ids == [20, 21, 30, 31, 32, 40, T.speak]
    assert layout.units == [-1, -1, 0, 0, 0, 0, 0]
    assert layout.kinds[:2] == [Kind.PREFIX] * 2 and layout.kinds[-1] is Kind.DECISION
