#!/usr/bin/env bash
# A run on several Slurm machines, with one torchrun on each:  sbatch scripts/cluster/slurm.sh
# Five minutes before its time limit, the run saves and stops, and the job is queued again to continue it.
# Further arguments go to the trainer. The store's credentials are in the environment or in ~/.aws.
#SBATCH --job-name=ocr
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

read -r HEAD_NODE < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

stop_and_queue_again() {
    trap '' TERM
    kill -TERM "$run" # srun passes it on to every torchrun
    wait "$run" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 --shutdown-timeout 280 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:29500" --rdzv-id "$SLURM_JOB_ID" \
    apps/train_flowgrpo.py --preset qwen-image-ocr --sharding.size 8 \
    --prompts my_prompts.txt --eval.prompts my_eval.txt --scorer.url "http://$HEAD_NODE:8100" \
    --checkpoint-url s3://my-bucket/runs/ocr "$@" &
run=$!
trap stop_and_queue_again TERM
wait "$run"
