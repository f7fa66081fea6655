"""The packaged aligner against word times that are known: espeak-ng's own."""

import numpy as np
import pytest
from scipy.signal import resample_poly

from a2t.data.aligner import Aligner, sounds_of
from a2t.data.espeak import Espeak
from a2t.data.findings import Findings
from jobs import check_aligner


def test_known_times_are_found_again_and_the_same_each_time():
    said = Espeak().say("hello grobnik it's eight again", "en-us+m1", 165)
    pcm_S = resample_poly(said.pcm_S, 320, 441).astype(np.float32)
    aligner, findings = Aligner(), Findings()
    words = ["Hello,", "Grobnik!", "—", "It’s", "8", "again."]
    found = aligner.align(pcm_S, words, "u", findings)
    assert found is not None and [i.label for i in found] == ["hello", "grobnik", "it's", "8", "again"]
    assert dict(findings.counts) == {"spelled by rule": 2}
    assert [i.end for i in found] == pytest.approx(said.ends, abs=0.1)
    assert [i.start for i in found] == pytest.approx(said.starts, abs=0.1)
    aligner.align(pcm_S[: len(pcm_S) // 2], ["hello"], "other", findings)
    assert aligner.align(pcm_S, words, "u", Findings()) == found == Aligner().align(pcm_S, words, "u", Findings())


def test_what_cannot_be_aligned():
    aligner, findings = Aligner(), Findings()
    hiss_S = np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    assert aligner.align(np.zeros(16000, np.float32), ["hello"], "u", findings) is None
    assert aligner.align(hiss_S, ["слово"], "u", findings) is None
    assert aligner.align(hiss_S, ["—"], "u", findings) is None
    assert aligner.align(hiss_S[:200], "far too many words for so little".split(), "u", findings) is None
    assert sounds_of("night9") == "N AY T N AY N" and sounds_of("слово") == ""


def test_the_check_prints_how_exact_it_is(capsys):
    assert check_aligner.main(["--utterances", "6"]) == 0
    said = capsys.readouterr().out
    assert "6 utterances" in said and "word ends: mean error" in said
    mean_ms = float(said.partition("word ends: mean error ")[2].split()[0])
    assert mean_ms < 40
