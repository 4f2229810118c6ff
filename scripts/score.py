"""Print the mean OCR score of a model's signs, its standard error, and the share of boards with the right color.

    python scripts/score.py
    python scripts/score.py --weights runs/demo/weights

Signs are sampled without injected noise. The words of data/tiny-signs/test.txt occur neither in training nor in the
evaluations logged by a run.
"""

import argparse
from pathlib import Path

ROOT = Path(__file__).parents[1]
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "tiny-signs-qwen-image"))
    parser.add_argument("--weights", type=Path, help="folder written by a trainer; by default the base model is used")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "tiny-signs" / "test.txt")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    if args.weights and not args.weights.is_dir():
        parser.error(f"--weights must be a folder that a trainer wrote, got {args.weights}")

    import numpy as np  # imported only now, as torch takes seconds
    import torch
    from omni_reward import Score
    from omni_reward.scorers.color import load_color
    from omni_reward.scorers.ocr import load_ocr
    from omni_rollout import Params, Prompt
    from omni_rollout.engines.diffusers import DiffusersEngine
    from omni_rollout.models import open_model
    from omni_train.prompts.files import load_prompts
    from omni_train.prompts.sampler import sample_seed
    from omni_train.weights.full import check_weights, load_weights

    try:
        model = open_model(args.model)
        records = load_prompts(args.prompts)
        if args.weights:
            check_weights(model.empty_net(), args.weights)
    except (OSError, ValueError) as exc:
        parser.error(str(exc))
    parts = model.load(device="cpu", dtype=torch.float32)
    if args.weights:
        load_weights(parts.net, args.weights)
    engine, ocr, color = DiffusersEngine(model, parts), load_ocr(reading="line"), load_color()
    prompts = [
        Prompt(r.text, group=i, index=i, seed=sample_seed(args.seed, -1, r.index, 0)) for i, r in enumerate(records)
    ]
    values: list[float] = []
    colors: list[bool] = []
    for i in range(0, len(prompts), BATCH):
        batch = engine.generate(prompts[i : i + BATCH], Params(10, height=32, width=96))
        images = batch.media["image"].numpy()
        texts = [prompt.text for prompt in batch.prompts]
        words, boards = (
            [s for s in score({"image": images}, texts, [{}] * len(texts)) if isinstance(s, Score)]
            for score in (ocr, color)
        )
        values += [s.value for s in words if s.value is not None]
        colors += [s.details["most"] == s.details["named"] for s in boards if s.value is not None]
    error = np.std(values) / len(values) ** 0.5
    print(f"score {np.mean(values):.3f} standard error {error:.3f} over {len(values)} images")
    print(f"{np.mean(colors):.3f} of {len(colors)} boards in the right color")


if __name__ == "__main__":
    main()
