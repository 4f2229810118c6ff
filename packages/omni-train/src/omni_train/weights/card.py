"""The model card of exported weights: their base, algorithm, settings, scores and command."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

FACTS = ("base", "algorithm", "settings", "scores", "command")
CARD_FILE = "README.md"

_LORA_USE = """\
pipe = DiffusionPipeline.from_pretrained({base})
pipe.load_lora_weights("PATH/OF/THIS/FOLDER"{option})
"""
_TRANSFORMERS_USE = {
    True: 'model = AutoModel.from_pretrained({base})\nmodel.load_adapter("PATH/OF/THIS/FOLDER")\n',
    False: 'model = AutoModel.from_pretrained("PATH/OF/THIS/FOLDER")\n',
}
_FULL_USE = """\
pipe = DiffusionPipeline.from_pretrained({base})
pipe.{into} = type(pipe.{into}).from_pretrained("PATH/OF/THIS/FOLDER", subfolder="{part}")
"""


def model_card(
    facts: Mapping[str, Any],
    *,
    is_lora: bool,
    part: str = "transformer",
    into: str = "transformer",
    library: Literal["diffusers", "transformers"] = "diffusers",
) -> str:
    """Return a model card in Markdown with the header read by model hubs.

    Args:
        facts: `base` (folder or hub id of the trained model), `algorithm`, `settings` and `scores` (name -> value;
            scores are numbers), `command` (repeats the run). All five are required and not empty.
        is_lora: True for a LoRA adapter, False for full weights.
        part: name of the trained component in the folder.
        into: its name in the pipeline.
        library: library that loads the folder.

    Raises:
        ValueError: a fact is missing, empty or unknown, or a score is not a finite number.
    """
    _check_facts(facts)
    base, algorithm = str(facts["base"]), str(facts["algorithm"])
    kind = "LoRA adapter" if is_lora else f"full weights of the {into}"
    option = "" if into == part else f", load_into_{into}=True"
    use = (_LORA_USE if is_lora else _FULL_USE).format(base=json.dumps(base), part=part, into=into, option=option)
    opens = "from diffusers import DiffusionPipeline"
    if library == "transformers":  # config.json names the model's class
        kind, opens = kind.replace(" of the transformer", ""), "from transformers import AutoModel"
        use = _TRANSFORMERS_USE[is_lora].format(base=json.dumps(base))
    scores = {name: f"{value:.4g}" for name, value in facts["scores"].items()}
    return "\n".join(
        [
            *_header(base, algorithm, is_lora, library),
            f"# {base.rstrip('/').rpartition('/')[2]}, trained with {algorithm}\n",
            f"{kind[0].upper()}{kind[1:]}, trained from `{base}` with {algorithm} by omni-rl.\n",
            f"```python\n{opens}\n\n{use}```\n",
            f"## Scores\n\n{_table('score', scores)}",
            f"## Settings\n\nThose that differ from the defaults.\n\n{_table('setting', facts['settings'])}",
            f"## Command\n\n```\n{facts['command']}\n```\n",
        ]
    )


def _check_facts(facts: Mapping[str, Any]) -> None:
    unknown = sorted(set(facts) - set(FACTS))
    empty = [name for name in FACTS if not facts.get(name)]
    if unknown or empty:
        raise ValueError(f"card must have {', '.join(FACTS)}, none empty; lacks {empty}, does not know {unknown}")
    for name, value in facts["scores"].items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"card's scores must be finite numbers, got {name} = {value!r}")


def _header(base: str, algorithm: str, is_lora: bool, library: str) -> list[str]:
    """Return the YAML that hubs read. A base that is not a hub id is omitted: hubs would treat it as one."""
    base_model = [f"base_model: {json.dumps(base)}"] * bool(re.fullmatch(r"[\w.-]+/[\w.-]+", base))
    tags = [library, "reinforcement-learning", algorithm, *(["lora"] * is_lora)]
    return ["---", f"library_name: {library}", *base_model, f"tags: {json.dumps(tags)}", "---\n"]


def _table(title: str, rows: Mapping[str, Any]) -> str:
    cells = ((name, " ".join(str(value).split()).replace("|", "\\|")) for name, value in rows.items())
    return "".join([f"| {title} | value |\n|---|---|\n", *(f"| {name} | {value} |\n" for name, value in cells)])
