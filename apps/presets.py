"""Presets of the trainers: what `--preset NAME` sets; all else is the default.

`tiny-signs` and what begins with it teach the shipped model to spell on a CPU; those of train_flowgrpo.py and its
siblings that docs/leaderboard.md compares draw equally many images. The others hold published settings, of verl-omni's
recipes for Qwen-Image or of a paper's own code; where that was published for another model, a comment says for which.
They name files of prompts that you bring.
"""

from typing import Any

Presets = dict[str, dict[str, Any]]

SIGNS = {"height": 32, "width": 96, "weight_decay": 0.0, "ema_decay": 0.9, "shard": "ddp"}
OCR = {"prompts": "data/ocr/train.txt", "eval_prompts": "data/ocr/test.txt"}
PICKSCORE = {"prompts": "data/pickscore/train.txt", "eval_prompts": "data/pickscore/test.txt"}
QWEN_IMAGE = {"model": "Qwen/Qwen-Image", "dtype": "bfloat16", "gradient_checkpointing": True}

# 1. train_flowgrpo.py

SIGNS_GRPO = SIGNS | {
    "prompts_per_step": 8, "group_size": 8, "window_low": 1, "window_high": 4, "clip_range": 1e-3, "lr": 1.2e-4,
    "lr_decay": True, "steps": 60, "eval_every": 30,
}  # fmt: skip
QWEN_IMAGE_GRPO = QWEN_IMAGE | OCR | {
    "guidance_scale": 4.0, "noise_level": 1.2, "window_size": 2, "window_high": 5, "lora_rank": 64,
    "updates_per_step": 2, "eval_every": 30, "eval_num_steps": 50,
}  # fmt: skip
SD35_GRPO = QWEN_IMAGE | {  # of flow_grpo, published for SD3.5-M on 32 accelerators
    "prompts_per_step": 48, "group_size": 24, "batch_size": 9, "guidance_scale": 4.5, "noise_level": 0.7,
    "adv_correction": 0, "drop_zero_signal": True, "updates_per_step": 2, "lora_rank": 32, "lora_alpha": 64,
    "ema_decay": 0.9, "eval_every": 60, "eval_num_steps": 40,
}  # fmt: skip
FLUX_DANCE = QWEN_IMAGE | {  # of DanceGRPO, published for FLUX.1 on 16 accelerators
    "algo": "dancegrpo", "height": 720, "width": 720, "num_steps": 16, "noise_level": 0.3, "window_size": 9,
    "prompts_per_step": 16, "group_size": 12, "batch_size": 4, "adv_std": "group", "updates_per_step": 3, "lr": 1e-5,
    "share_noise": True, "eval_num_steps": 16, "shard": "fsdp2",
}  # fmt: skip
FLUX_MIX = FLUX_DANCE | {  # of MixGRPO, published for FLUX.1 on 32 accelerators
    "algo": "mixgrpo", "num_steps": 25, "noise_level": 0.7, "window_size": 4, "window_iters": 25,
    "prompts_per_step": 32, "updates_per_step": 4, "eval_num_steps": 25,
}  # fmt: skip

SIGNS_SDE = SIGNS_GRPO | {"noise_level": 0.4, "window_high": 3, "lr": 8e-5}

FLOWGRPO: Presets = {
    "tiny-signs": SIGNS | {  # the demonstration
        "name": "tiny-signs", "algo": "flowgrpo-cps", "noise_level": 0.5, "window_low": 1, "window_high": 4,
        "prompts_per_step": 8, "group_size": 8, "lr": 1.2e-4, "lr_decay": True, "ema_decay": 0.95, "clip_range": 1e-3,
        "steps": 320, "eval_every": 80},
    "tiny-signs-flowgrpo": SIGNS_SDE | {"name": "tiny-signs-flowgrpo"},
    "tiny-signs-cps": SIGNS_GRPO | {"name": "tiny-signs-cps", "algo": "flowgrpo-cps", "noise_level": 0.5},
    "tiny-signs-fast": SIGNS_GRPO | {
        "name": "tiny-signs-fast", "algo": "flowgrpo-cps", "noise_level": 0.5, "window_size": 2, "share_noise": True},
    "tiny-signs-dancegrpo": SIGNS_SDE | {
        "name": "tiny-signs-dancegrpo", "algo": "dancegrpo", "noise_level": 0.6, "adv_std": "group", "window_high": 4,
        "window_size": 2, "share_noise": True},
    "tiny-signs-mixgrpo": SIGNS_GRPO | {
        "name": "tiny-signs-mixgrpo", "algo": "mixgrpo", "noise_level": 0.25, "window_size": 2, "window_iters": 5,
        "share_noise": True, "lr": 6e-5},
    "tiny-signs-mixgrpo-flash": SIGNS_GRPO | {
        "name": "tiny-signs-mixgrpo-flash", "algo": "mixgrpo", "noise_level": 0.25, "window_size": 2, "window_iters": 5,
        "share_noise": True, "lr": 6e-5, "flash_ratio": 0.4},
    "tiny-signs-grpo-guard": SIGNS_SDE | {
        "name": "tiny-signs-grpo-guard", "algo": "grpo-guard", "clip_range": 2e-4},
    "tiny-signs-flow-dppo": SIGNS_SDE | {
        "name": "tiny-signs-flow-dppo", "algo": "flow-dppo", "updates_per_step": 2, "lr": 5e-5},
    "tiny-signs-tempflow": SIGNS_SDE | {
        "name": "tiny-signs-tempflow", "window_size": 1, "share_noise": True, "step_weights": "tempflow"},
    "qwen-image-ocr-lora": QWEN_IMAGE_GRPO | {"name": "qwen-image-ocr-lora", "clip_range": 1e-5},
    "qwen-image-ocr": QWEN_IMAGE_GRPO | {  # all weights, without guidance
        "name": "qwen-image-ocr", "clip_range": 1e-5, "guidance_scale": 1.0, "lr": 3e-5, "lora_rank": 0,
        "shard": "fsdp2"},
    "qwen-image-ocr-mixgrpo": QWEN_IMAGE_GRPO | {  # with a random window, not a sliding one
        "name": "qwen-image-ocr-mixgrpo", "seed": 42, "steps": 150},
    "qwen-image-ocr-guard": QWEN_IMAGE_GRPO | {
        "name": "qwen-image-ocr-guard", "algo": "grpo-guard", "clip_range": 2e-6},
    "qwen-image-ocr-dppo": QWEN_IMAGE_GRPO | {"name": "qwen-image-ocr-dppo", "algo": "flow-dppo"},
    "flowgrpo-ocr": SD35_GRPO | OCR | {  # our KL is theirs over the length of a step, 0.1 on average
        "name": "flowgrpo-ocr", "kl_coef": 0.04 * 0.1},
    "flowgrpo-fast-pickscore": SD35_GRPO | PICKSCORE | {  # with the shared prefix of its first version
        "name": "flowgrpo-fast-pickscore", "prompts_per_step": 64, "group_size": 18,
        "algo": "flowgrpo-cps", "guidance_scale": 1.0, "noise_level": 0.8,
        "window_size": 3, "window_high": 5, "clip_range": 1e-5, "share_noise": True},
    "guard-ocr": SD35_GRPO | OCR | {
        "name": "guard-ocr", "algo": "grpo-guard", "clip_range": 2e-6, "adv_std": "group", "lr": 1e-4},
    "dancegrpo-pickscore": FLUX_DANCE | PICKSCORE | {"name": "dancegrpo-pickscore"},
    "dancegrpo-best-of-n": FLUX_DANCE | PICKSCORE | {  # with the numbers published for HunyuanVideo
        "name": "dancegrpo-best-of-n", "noise_level": 0.25, "group_size": 24, "best_of_n": 8, "updates_per_step": 2},
    "mixgrpo-pickscore": FLUX_MIX | PICKSCORE | {"name": "mixgrpo-pickscore"},
    "mixgrpo-flash-pickscore": FLUX_MIX | PICKSCORE | {
        "name": "mixgrpo-flash-pickscore", "window_iters": 20, "flash_ratio": 0.4},
    "mixgrpo-flash-star-pickscore": FLUX_MIX | PICKSCORE | {  # Flash*: the window stays at the start
        "name": "mixgrpo-flash-star-pickscore", "window_high": 4, "flash_ratio": 0.2},
}  # fmt: skip

# 2. train_nft.py

SIGNS_NFT = SIGNS | {
    "prompts_per_step": 8, "group_size": 8, "train_levels": 5, "nft_beta": 0.1, "lr": 1e-4, "steps": 60,
    "eval_every": 30,
}  # fmt: skip
QWEN_IMAGE_NFT = QWEN_IMAGE | OCR | {"lora_rank": 64, "eval_every": 20, "eval_num_steps": 40}

NFT: Presets = {
    "tiny-signs": SIGNS_NFT | {"name": "tiny-signs-nft"},
    "tiny-signs-awm": SIGNS_NFT | {"name": "tiny-signs-awm", "algo": "awm"},
    "qwen-image-ocr-lora": QWEN_IMAGE_NFT | {  # DiffusionNFT
        "name": "qwen-image-ocr-nft", "prompts_per_step": 24, "batch_size": 12, "updates_per_step": 2, "nft_beta": 0.1,
        "kl_coef": 1e-4, "old_schedule": "delayed_linear", "old_every": 2},
    "nft-ocr": QWEN_IMAGE_NFT | {  # DiffusionNFT's own, published for SD3.5-M
        "name": "nft-ocr", "prompts_per_step": 48, "group_size": 24, "batch_size": 9, "updates_per_step": 2,
        "nft_beta": 0.1, "kl_coef": 1e-4, "old_schedule": "delayed_linear", "train_high": 9, "adv_correction": 0,
        "lora_rank": 32, "lora_alpha": 64, "ema_decay": 0.9},
    "awm-ocr": QWEN_IMAGE_NFT | {  # AWM's own, published for SD3.5-M; our loss is 5 times theirs, so are KLs
        "name": "awm-ocr", "algo": "awm", "prompts_per_step": 72, "group_size": 24, "batch_size": 6, "num_steps": 14,
        "sample_with": "policy", "old_schedule": "linear", "old_decay_max": 0.3, "train_levels": 6, "train_low": 1,
        "train_high": 12, "kl_coef": 5 * 0.003, "old_kl_coef": 5 * 1.0, "lora_rank": 32, "lora_alpha": 64,
        "adv_correction": 0, "ema_decay": 0.99},
}  # fmt: skip

# 3. train_dpo.py

SIGNS_DPO = SIGNS | {
    "prompts_per_step": 8, "group_size": 8, "batch_size": 8, "dpo_beta": 100.0, "levels_per_pair": 8, "lr": 1e-4,
    "steps": 60, "eval_every": 30,
}  # fmt: skip
QWEN_IMAGE_DPO = QWEN_IMAGE | OCR | {
    "num_steps": 35, "dpo_beta": 100.0, "updates_per_step": 2, "lora_rank": 64, "eval_every": 20, "eval_num_steps": 50,
}  # fmt: skip

DPO: Presets = {
    "tiny-signs": SIGNS_DPO | {"name": "tiny-signs-dpo"},
    "tiny-signs-offline": SIGNS_DPO | {"name": "tiny-signs-dpo-offline", "prompts_per_step": 16, "group_size": 2},
    "qwen-image-ocr-lora": QWEN_IMAGE_DPO | {"name": "qwen-image-ocr-dpo"},  # online
    "dpo-pickscore": QWEN_IMAGE_DPO | PICKSCORE | {  # flow_grpo's own, online, published for SD3.5-M on 8 accelerators
        "name": "dpo-pickscore", "prompts_per_step": 8, "group_size": 24, "batch_size": 24, "num_steps": 40,
        "guidance_scale": 4.5, "levels_per_pair": 39, "level_shift": 3.0, "updates_per_step": 1, "eval_every": 60,
        "eval_num_steps": 40},
    "dpo-offline": QWEN_IMAGE_DPO | {  # published for SD3.5-M; bring a preference file
        "name": "dpo-offline", "prompts_per_step": 16, "group_size": 2, "batch_size": 8, "guidance_scale": 4.0,
        "level_shift": 3.0, "updates_per_step": 4, "lr": 2e-4, "lora_rank": 32, "lora_alpha": 64, "steps": 1000},
}  # fmt: skip

# 4. train_srpo.py

SRPO: Presets = {
    "tiny-signs": SIGNS | {
        "name": "tiny-signs-srpo", "num_steps": 10, "threshold": 1.0, "max_grad_norm": 1.0, "lr": 1e-4, "steps": 120,
        "eval_every": 60},
    "qwen-image-pickscore": QWEN_IMAGE | PICKSCORE | {  # SRPO's own, published for FLUX.1
        "name": "qwen-image-pickscore", "reward": "clip", "reward_model": "yuvalkirstain/PickScore_v1",
        "positive_words": "Natural-lighting,Detail,Detailed,Real",
        "negative_words": "Concept art,Painting,Anime,Flat,Oil", "batch_size": 1, "height": 720, "width": 720,
        "level_low": 0.667, "level_high": 0.964, "discount_high": 0.5, "inversion_discount_low": 0.6,
        "shard": "fsdp2"},
}  # fmt: skip
