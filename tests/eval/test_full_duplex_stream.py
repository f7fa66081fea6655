"""What units say, on the input's clock."""

from a2t.eval.full_duplex_bench import Chunk, score_turn
from a2t.eval.full_duplex_stream import output_of, segments_of


def test_a_units_words_are_spoken_in_the_second_after_it() -> None:
    output = output_of(["", "in the", "hall", "", "", "yes"])
    assert [(c["text"], c["timestamp"]) for c in output["chunks"]] == [
        ("in", [2.0, 2.5]),
        ("the", [2.5, 3.0]),
        ("hall", [3.0, 4.0]),
        ("yes", [6.0, 7.0]),
    ]
    assert segments_of(output, 6.5) == {
        "output_seconds": 6.5,
        "segments": [{"start": 2.0, "end": 4.0}, {"start": 6.0, "end": 6.5}],
    }
    assert segments_of(output, 5.0)["segments"] == [{"start": 2.0, "end": 4.0}]
    score = score_turn([Chunk(c["text"], *c["timestamp"]) for c in output["chunks"]], since=1.4)
    assert score.takeover and score.latency is not None and round(score.latency, 6) == 0.6


def test_only_what_follows_an_interruption_counts() -> None:
    assert output_of(["on and on"] * 2 + ["", "yes"], since=2.7)["text"] == "yes"
    assert output_of([""] * 3) == {"text": "", "chunks": []}
