#!/usr/bin/env bash
# A run on several machines without a shared disk: run the same command on each of them.
#   HEAD_NODE=node0 NODES=2 GPUS=8 scripts/cluster/torchrun.sh
# Further arguments go to the trainer. The store's credentials are in the environment or in ~/.aws.
set -euo pipefail
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" --max-restarts 3 --shutdown-timeout 600 \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD_NODE:?one of the machines}:29500" --rdzv-id ocr \
    apps/train_flowgrpo.py --preset qwen-image-ocr --sharding.size "${GPUS:-8}" \
    --prompts my_prompts.txt --eval.prompts my_eval.txt --scorer.url "http://$HEAD_NODE:8100" \
    --checkpoint-url s3://my-bucket/runs/ocr "$@"
