"""The pitch of tones of known frequency, and sound that goes with motion or against it."""

import numpy as np
import pytest
from omni_reward import Score
from omni_reward.scorers.sound import load_pitch, load_sync, loudest_frequency, named_pitch

RATE = 16_000
FPS = 8


def tone(frequency: float, seconds: float = 0.5, rate: int = RATE, loud: float = 0.3) -> np.ndarray:
    return (loud * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def pitch(sound: np.ndarray, prompt: str, rate: int = RATE, **options: float) -> Score:
    [score] = load_pitch(**options)({"audio": sound[None, :, None]}, [prompt], [{"sample_rate": rate}])
    return score


@pytest.mark.parametrize("frequency", [82.41, 261.63, 440.0, 1234.5, 6000.1])
@pytest.mark.parametrize("rate", [RATE, 48_000])
def test_the_loudest_frequency_is_that_of_the_tone(frequency: float, rate: int) -> None:
    assert loudest_frequency(tone(frequency, rate=rate), rate) == pytest.approx(frequency, abs=0.2)
    mixed = tone(frequency, rate=rate) + tone(frequency * 1.3, rate=rate, loud=0.1) + 0.2  # and a constant
    assert loudest_frequency(mixed, rate) == pytest.approx(frequency, abs=0.5)


@pytest.mark.parametrize(
    ("prompt", "frequency"),
    [
        ("a tone of 440 Hz", 440.0),
        ("a tone of 261.6Hz", 261.6),
        ("the note A4", 440.0),
        ("C4 on a piano", 261.63),  # middle C
        ("F#3, then silence", 185.0),
        ("Bb5", 932.33),
        ("a hum", None),
        ("from 100 Hz to 200 Hz", None),
        ("0 Hz", None),
    ],
)
def test_a_prompt_names_its_pitch_in_hertz_or_as_a_note(prompt: str, frequency: float | None) -> None:
    assert named_pitch(prompt) == frequency


def test_the_score_falls_with_the_distance_in_cents() -> None:
    assert pitch(tone(440), "440 Hz").value == pytest.approx(1, abs=1e-3)
    assert pitch(tone(440 * 2**0.5), "440 Hz").value == pytest.approx(0.5, abs=2e-3)
    assert pitch(tone(440 / 2**0.5), "A4").value == pytest.approx(0.5, abs=2e-3)
    assert pitch(tone(440 * 2 ** (1 / 12)), "440 Hz", zero_at=200).value == pytest.approx(0.5, abs=1e-2)
    assert pitch(tone(1000), "A4").value == 0.0
    assert pitch(tone(440), "A4").details == {"target": 440.0, "heard": pytest.approx(440, abs=0.1)}


def test_silence_misses_every_pitch() -> None:
    assert pitch(np.zeros(8000, np.float32), "440 Hz") == Score(0.0, details={"target": 440.0, "heard": None})
    assert pitch(np.full(8000, 0.5, np.float32), "440 Hz").value == 0.0
    assert pitch(np.ones(3, np.float32), "440 Hz").value == 0.0


def test_a_prompt_without_one_pitch_is_an_abstention() -> None:
    assert pitch(tone(440), "a hum").abstained == "the prompt must name one pitch, such as 440 Hz or A4"


def jumps(moves: list[int]) -> np.ndarray:
    """Clip [T, 64, 64, 3]: a light grows by so many levels between one frame and the next."""
    levels = np.cumsum([0, *moves]) % 256
    return np.broadcast_to(levels[:, None, None, None], (len(levels), 64, 64, 3)).astype(np.uint8)


def clicks(loudness: list[float], num_channels: int = 2) -> np.ndarray:
    """Sound [S, C] with that root mean square in the gaps between frames, and some after the last."""
    gaps = np.repeat([*loudness, 0.0], RATE // FPS).astype(np.float32)
    gaps[1::2] *= -1
    return np.repeat(gaps[:, None], num_channels, axis=1)


MOVES = [0, 10, 0, 30, 0, 5, 20, 0]


def sync(clip: np.ndarray, sound: np.ndarray) -> Score:
    meta: list[dict[str, object]] = [{"fps": FPS, "sample_rate": RATE}]
    [score] = load_sync()({"video": clip[None], "audio": sound[None]}, [""], meta)
    return score


def test_sound_as_loud_as_the_motion_is_in_time() -> None:
    assert sync(jumps(MOVES), clicks([move / 100 for move in MOVES])).value == pytest.approx(1, abs=1e-5)
    assert sync(jumps(MOVES), clicks([0.4 - move / 100 for move in MOVES])).value == pytest.approx(-1, abs=1e-5)


def test_it_is_the_correlation_of_loudness_and_motion() -> None:
    loudness = [0.1, 0.2, 0.3, 0.1, 0.0, 0.2, 0.1, 0.3]
    wanted = np.corrcoef(loudness, MOVES)[0, 1]
    assert sync(jumps(MOVES), clicks(loudness)).value == pytest.approx(wanted, abs=1e-5)


def test_late_sound_is_worse_than_sound_in_time() -> None:
    late = np.roll(clicks([move / 100 for move in MOVES]), RATE // FPS, axis=0)
    value = sync(jumps(MOVES), late).value
    assert value is not None
    assert value < 0.2


def test_silence_and_stills_go_with_nothing() -> None:
    assert sync(jumps(MOVES), clicks([0.0] * 8)).value == 0.0
    assert sync(jumps([0] * 8), clicks([0.1, 0.2] * 4)).value == 0.0


def test_what_lasts_longer_is_cut() -> None:
    sound = clicks([move / 100 for move in MOVES])[: 5 * RATE // FPS]
    assert sync(jumps(MOVES), sound).value == pytest.approx(1, abs=1e-5)
    assert (
        sync(jumps(MOVES), sound[: 2 * RATE // FPS]).abstained == "video and sound have fewer than 4 frames in common"
    )
