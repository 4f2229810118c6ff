"""Two rule-based scorers of sound: the pitch of a tone, and the synchrony of a sound with the motion in its video.

    pitch = max(0, 1 - |1200 log2(f / target)| / zero_at)                                                   (1)
    sync = correlation over t of the loudness between frames t and t + 1 with mean |g_{t+1} - g_t|          (2)

In (1) f is the loudest frequency: the peak of the spectrum with a Hann window, interpolated by a parabola through the
logarithms of three bins (Smith and Serra, ICMC 1987). A cent is a hundredth of a semitone. A prompt names its target as
`440 Hz` or as a note such as `A4`, in equal temperament with A4 = 440 Hz.

In (2), which is in [-1, 1], loudness is the root mean square and g the luma. Like AV-Align (Yariv et al., arXiv
2309.16429) it compares the energy of the sound with the motion, but over all frames instead of at peaks.

Silence and a still video score 0.

Notation: N samples, T frames, S points in time, C channels.
"""

import re
from typing import Any

import numpy as np

from omni_reward.media import Arrays, Meta
from omni_reward.scorers.video import gray_frames
from omni_reward.wire import Score, Scorer

SILENCE = 1e-4  # of full scale
SEMITONES = {"C": -9, "D": -7, "E": -5, "F": -4, "G": -2, "A": 0, "B": 2}  # relative to A of the same octave
MIN_GAPS = 3  # fewest intervals between frames for a correlation


def load_pitch(*, zero_at: float = 1200.0) -> Scorer:
    """Load the scorer of `audio` [N, S, C], float32, by the distance of the loudest frequency from the prompt's.

    Args:
        zero_at: distance in cents from which the score is 0.

    Raises:
        ValueError: zero_at is not above 0.
    """
    if not zero_at > 0:
        raise ValueError(f"zero_at must be > 0, got {zero_at}")

    def score_sound(sound: np.ndarray, prompt: str, rate: float) -> Score:
        target, measured = named_pitch(prompt), loudest_frequency(sound.mean(axis=1), rate)
        if target is None:
            return Score(None, abstained="the prompt must name one pitch, such as 440 Hz or A4")
        if not measured:
            return Score(0.0, details={"target": target, "heard": None})
        cents = 1200 * np.log2(measured / target)
        return Score(max(0.0, 1 - abs(float(cents)) / zero_at), details={"target": target, "heard": round(measured, 2)})

    def score(media: Arrays, prompts: list[str], meta: Meta) -> list[Score]:
        rates: list[Any] = [sample["sample_rate"] for sample in meta]  # numbers above 0, see omni_reward.media
        return [score_sound(*args) for args in zip(media["audio"], prompts, rates, strict=True)]

    return Scorer(score, media=("audio",))


def named_pitch(prompt: str) -> float | None:
    """Return the frequency, in Hz, that the prompt names, or None unless it names exactly one."""
    pitches = [float(number) for number in re.findall(r"(\d+(?:\.\d+)?) ?Hz\b", prompt)]
    for letter, sign, octave in re.findall(r"\b([A-G])([#b]?)(\d)\b", prompt):
        semitones = SEMITONES[letter] + {"#": 1, "b": -1, "": 0}[sign] + 12 * (int(octave) - 4)
        pitches.append(round(440 * 2 ** (semitones / 12), 2))
    return pitches[0] if len(pitches) == 1 and pitches[0] > 0 else None


def loudest_frequency(sound: np.ndarray, rate: float) -> float:
    """Return the peak frequency of a sound's [S] spectrum, in Hz; 0 for silence."""
    sound = sound.astype(np.float64) - sound.mean(dtype=np.float64)
    if len(sound) < 8 or np.sqrt(np.mean(sound**2)) < SILENCE:
        return 0.0
    power = np.log(np.abs(np.fft.rfft(sound * np.hanning(len(sound)))) ** 2 + 1e-20)
    peak = 1 + int(power[1:-1].argmax())
    left, top, right = power[peak - 1 : peak + 2]
    return float((peak + 0.5 * (left - right) / min(left - 2 * top + right, -1e-12)) * rate / len(sound))


def resample(sound: np.ndarray, rate: float, target_rate: float) -> np.ndarray:
    """Resample a sound [S]; exact for tones below half of both rates that are periodic over its length."""
    count = max(1, round(len(sound) * target_rate / rate))
    if count == len(sound):
        return sound
    return np.fft.irfft(np.fft.rfft(sound), count) * (count / len(sound))


def load_sync() -> Scorer:
    """Load the scorer of `video` [N, T, H, W, 3], uint8, RGB, with `audio` [N, S, C], float32."""

    def score(media: Arrays, prompts: list[str], meta: Meta) -> list[Score]:
        rates: list[tuple[Any, Any]] = [(sample["sample_rate"], sample["fps"]) for sample in meta]
        return [
            score_pair(clip, sound, points / frames)
            for clip, sound, (points, frames) in zip(media["video"], media["audio"], rates, strict=True)
        ]

    def score_pair(clip: np.ndarray, sound: np.ndarray, rate: float) -> Score:
        edges = np.round(np.arange(len(clip)) * rate).astype(int)
        edges = edges[edges <= len(sound)]  # within the common duration
        if len(edges) <= MIN_GAPS or rate < 2:
            return Score(None, abstained=f"video and sound have fewer than {MIN_GAPS + 1} frames in common")
        motion = np.abs(np.diff(gray_frames(clip)[1][: len(edges)], axis=0)).mean(axis=(1, 2))
        energy = np.add.reduceat(np.square(sound.mean(axis=1), dtype=np.float64)[: edges[-1]], edges[:-1])
        loudness = np.sqrt(energy / np.diff(edges))
        if loudness.std() < SILENCE or motion.std() < 1e-3:
            return Score(0.0)
        return Score(float(np.corrcoef(loudness, motion)[0, 1]))

    return Scorer(score, media=("audio", "video"))
