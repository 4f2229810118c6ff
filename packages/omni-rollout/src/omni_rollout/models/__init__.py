"""One file per model, independent of algorithms."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from omni_rollout.files import read_json
from omni_rollout.model import Model
from omni_rollout.models.bagel import Bagel
from omni_rollout.models.bagel_think import ThinkingBagel
from omni_rollout.models.flux import Flux1, Flux1Kontext
from omni_rollout.models.flux2 import Flux2, Flux2Klein
from omni_rollout.models.flux3 import Flux3Klein
from omni_rollout.models.hub import local_folder
from omni_rollout.models.hunyuan_image import HunyuanImage
from omni_rollout.models.hunyuan_video import HunyuanVideo15, HunyuanVideo15ImageToVideo
from omni_rollout.models.krea2 import Krea2
from omni_rollout.models.ltx2 import LTX2
from omni_rollout.models.qwen_image import QwenImage
from omni_rollout.models.qwen_image21 import QwenImage21
from omni_rollout.models.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from omni_rollout.models.sd3 import StableDiffusion3
from omni_rollout.models.stable_audio import StableAudio3
from omni_rollout.models.wan import Wan, WanImageToVideo
from omni_rollout.models.z_image import ZImage
from omni_rollout.thoughts import ThinkingModel

# The pipeline of an index, or the architecture of config.json without an index -> the model's class.
# A new model is a new line.
MODELS: dict[str, Callable[[str | Path], Model]] = {
    "QwenImagePipeline": QwenImage,
    "BagelForConditionalGeneration": Bagel,
    "HunyuanImage3ForCausalMM": HunyuanImage,
    "QwenImageEditPipeline": QwenImageEdit,
    "QwenImageEditPlusPipeline": QwenImageEditPlus,
    "QwenImage21Pipeline": QwenImage21,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "Krea2Pipeline": Krea2,
    "ZImagePipeline": ZImage,
    "WanPipeline": Wan,
    "WanImageToVideoPipeline": WanImageToVideo,
    "LTX2Pipeline": LTX2,
    "HunyuanVideo15Pipeline": HunyuanVideo15,
    "HunyuanVideo15ImageToVideoPipeline": HunyuanVideo15ImageToVideo,
    "StableAudio3Pipeline": StableAudio3,
    "FluxPipeline": Flux1,
    "FluxKontextPipeline": Flux1Kontext,
    "Flux2KleinPipeline": Flux2Klein,
    "Flux2Pipeline": Flux2,
    "Flux3ModularPipeline": Flux3Klein,
}
THINKING_MODELS: dict[str, Callable[[str | Path], ThinkingModel]] = {"BagelForConditionalGeneration": ThinkingBagel}
INDEXES = ("model_index.json", "modular_model_index.json")
REFUSED = {  # pipelines that users might expect -> why they are not supported
    "Flux3DistilledModularPipeline": "its net takes the level at which a step ends; klein-base is a model here",
    "MiniMaxH3ModularPipeline": "its frames and its sound have separate schedules, and a trajectory here has one",
    "HunyuanVideoPipeline": "HunyuanVideo 1.0 has other text encoders and another net than 1.5, which is a model here",
    "StableAudioPipeline": "Stable Audio Open 1.0 denoises by another equation than a flow's",
}


def open_model(path: str | Path) -> Model:
    """Return the model of a checkpoint, which is a folder or a hub id. No weight is read.

    Raises:
        ValueError: the folder does not exist, holds another pipeline, or has a damaged configuration file.
    """
    kind, folder = _kind(path)
    if not isinstance(kind, str) or kind not in MODELS:
        why = f": {REFUSED[kind]}" if isinstance(kind, str) and kind in REFUSED else ""
        if not why and str(kind).endswith("ModularPipeline"):
            other = str(kind).replace("ModularPipeline", "Pipeline")
            why = f": it is modular, and no parts of it are read with diffusers {version('diffusers')}"
            why += f"; load its {other} and save_pretrained" if other in MODELS else ""
        raise ValueError(f"model must not be a {kind!r:.80}, which {folder} holds{why}: known are {', '.join(MODELS)}")
    return MODELS[kind](path)


def open_thinking_model(path: str | Path) -> ThinkingModel:
    """Return the model of a checkpoint that writes a thought before it generates an image. No weight is read.

    Raises:
        ValueError: as `open_model`, or the checkpoint's model does not write thoughts.
    """
    kind, folder = _kind(path)
    if not isinstance(kind, str) or kind not in THINKING_MODELS:
        raise ValueError(f"model must be the folder of a {' or '.join(THINKING_MODELS)}, {folder} holds a {kind!r:.80}")
    return THINKING_MODELS[kind](path)


def _kind(path: str | Path) -> tuple[object, Path]:
    """Return the pipeline or architecture that a checkpoint names, and its folder."""
    folder = local_folder(path)
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if (folder / "config.json").is_file() and not index:
        config = read_json(folder / "config.json")
        architectures, part = config.get("architectures"), config.get("_class_name")
        if part and not architectures:
            hint = "give the folder above it, which has the index"
            raise ValueError(f"model must be a whole pipeline, got {folder}, which holds a {part!r:.80}: {hint}")
        kind = architectures[0] if isinstance(architectures, list) and architectures else architectures
    else:
        kind = read_json(index or folder / INDEXES[0]).get("_class_name")
    return kind, folder
