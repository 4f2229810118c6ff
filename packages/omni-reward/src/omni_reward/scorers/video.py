"""Rule-based video scorer: motion smoothness, sharpness and consistency of the frames, without a model.

All three are in [0, 1] and use the luma (0.299 R + 0.587 G + 0.114 B, 0 to 255; ITU-R BT.601). Smoothness and
consistency use small frames g_t: the means over squares of s x s pixels, where s = min(H, W) // 64, at least 1.

    smoothness = 1 - mean_t mean |g_t - m_t| / 255                                                          (1)
    m_t(p) = (g_{t-1}(p - d) + g_{t+1}(p + d)) / 2, d the motion of p's block of 8 x 8
    sharpness = mean_t v_t / (v_t + 100), v_t the variance of the Laplacian of frame t                      (2)
    consistency = mean_{t > 1} (S(g_1, g_t) + S(g_{t-1}, g_t)) / 2                                          (3)

(1) measures how well each frame is predicted from its two neighbors. This is VBench's motion smoothness (Huang et al.,
arXiv 2311.17982) with classical interpolation instead of a network: d is the displacement of up to 4 with the best
agreement of g_{t-1}(p - d) and g_{t+1}(p + d) over the block (bidirectional motion estimation, Choi et al., IEEE TCE
46(3), 2000). A steady motion scores 1, a jerky one less. (2) is the focus measure of Pech-Pacheco et al. (ICPR 2000),
mapped to [0, 1] by the variance that is a common threshold for blur; it uses the full size, so only videos of the same
size are comparable. (3) has the form of VBench's subject consistency, with S the structural similarity over whole
frames (Wang et al., IEEE TIP 13(4), 2004), at least 0, instead of a network's features.

A still video has a smoothness and a consistency of 1, so a reward of only these stops the motion. `parts` has the three
measures and `motion`, the mean speed in frame heights per second, for a reward of motion.

Notation: N samples, T frames, H height, W width, h and w those of small frames, D displacements.
"""

from typing import Any

import numpy as np

from omni_reward.wire import Score, Scorer

MEASURES = ("mean", "smoothness", "sharpness", "consistency")

SMALL = 64  # minimum side of a small frame
BLOCK = 8
REACH = 4  # largest displacement, in small pixels per frame
HALF_SHARP = 100.0  # variance of the Laplacian that scores 1/2
MIN_SIDE = 32
MIN_FRAMES = 3
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_SHIFTS = sorted(  # shortest first: among equal matches, the shortest is chosen
    ((dy, dx) for dy in range(-REACH, REACH + 1) for dx in range(-REACH, REACH + 1)), key=lambda shift: np.hypot(*shift)
)


def load_video(*, measure: str = "mean") -> Scorer:
    """Load the scorer of `video` [N, T, H, W, 3], uint8, RGB, by one of the three measures, or their mean.

    Raises:
        ValueError: the measure does not exist.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {list(MEASURES)}, got {measure!r}")

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        rates: list[Any] = [sample["fps"] for sample in meta]  # numbers above 0, see omni_reward.media
        return [_score_clip(clip, float(fps), measure) for clip, fps in zip(media["video"], rates, strict=True)]

    return Scorer(score, media=("video",))


def _score_clip(clip: np.ndarray, fps: float, measure: str) -> Score:
    num_frames, height, width = clip.shape[:3]
    if num_frames < MIN_FRAMES or min(height, width) < MIN_SIDE:
        return Score(None, abstained=f"the video has fewer than {MIN_FRAMES} frames or {MIN_SIDE} pixels a side")
    gray, small = gray_frames(clip)
    smooth, shift = motion_smoothness(small)
    parts = {"smoothness": smooth, "sharpness": sharpness(gray), "consistency": consistency(small)}
    value = sum(parts.values()) / 3 if measure == "mean" else parts[measure]
    return Score(value, parts=parts | {"motion": shift * fps / small.shape[1]})


def gray_frames(clip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the luma [T, H, W] of a clip [T, H, W, 3], uint8, and its small frames [T, h, w]."""
    gray = np.stack([frame.astype(np.float32) @ _LUMA for frame in clip])
    return gray, shrink(gray, max(1, min(gray.shape[1:]) // SMALL))


def shrink(gray: np.ndarray, factor: int) -> np.ndarray:
    """Reduce frames to [T, h, w] by averaging squares of factor x factor pixels; incomplete squares are dropped."""
    num_frames, height, width = gray.shape
    h, w = height // factor, width // factor
    return gray[:, : h * factor, : w * factor].reshape(num_frames, h, factor, w, factor).mean(axis=(2, 4))


def motion_smoothness(gray: np.ndarray) -> tuple[float, float]:
    """Return smoothness (1) in [0, 1] of frames [T, h, w], and the mean motion, in pixels per frame."""
    triples = zip(gray, gray[1:], gray[2:], strict=False)
    errors, lengths = zip(*(_interpolation_error(*triple) for triple in triples), strict=True)
    return 1 - float(np.mean(errors)) / 255, float(np.mean(lengths))


def _interpolation_error(before: np.ndarray, frame: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Return mean |frame - m| and mean |d| of one frame [h, w] with its neighbors, away from the edges."""
    h, w = ((side - 2 * REACH) // BLOCK * BLOCK for side in frame.shape)

    def window(image: np.ndarray, dy: int, dx: int) -> np.ndarray:
        return image[REACH + dy : REACH + dy + h, REACH + dx : REACH + dx + w]

    pairs = [(window(before, -dy, -dx), window(after, dy, dx)) for dy, dx in _SHIFTS]
    costs = shrink(np.stack([np.abs(first - second) for first, second in pairs]), BLOCK)  # [D, h / 8, w / 8]
    best = costs.argmin(axis=0)
    middles = np.stack([(first + second) / 2 for first, second in pairs])  # [D, h, w]
    chosen = np.take_along_axis(middles, best.repeat(BLOCK, 0).repeat(BLOCK, 1)[None], axis=0)[0]
    return float(np.abs(window(frame, 0, 0) - chosen).mean()), float(np.hypot(*np.array(_SHIFTS)[best].T).mean())


def sharpness(gray: np.ndarray) -> float:
    """Return sharpness (2) in [0, 1) of frames [T, H, W]."""
    variances = np.array([_laplacian(frame).var(dtype=np.float64) for frame in gray])
    return float(np.mean(variances / (variances + HALF_SHARP)))


def _laplacian(x: np.ndarray) -> np.ndarray:
    """Return the four neighbors minus four times the pixel for an image [H, W], without its border."""
    return x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]


def consistency(gray: np.ndarray) -> float:
    """Return consistency (3) in [0, 1] of frames [T, h, w]."""
    later = range(1, len(gray))
    return float(np.mean([(_similarity(gray[0], gray[t]) + _similarity(gray[t - 1], gray[t])) / 2 for t in later]))


def _similarity(x: np.ndarray, y: np.ndarray) -> float:
    """Return the structural similarity of two frames, at least 0, with Wang et al.'s K1 = 0.01 and K2 = 0.03."""
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mean_x, mean_y = x.mean(dtype=np.float64), y.mean(dtype=np.float64)
    covariance = ((x - mean_x) * (y - mean_y)).mean()
    light = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (x.var(dtype=np.float64) + y.var(dtype=np.float64) + c2)
    return max(0.0, float(light * structure))
