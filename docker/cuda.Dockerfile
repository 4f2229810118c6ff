# omni-rl on NVIDIA GPUs; the host needs the driver and NVIDIA's container toolkit. From the folder of the clone:
#   docker build -f docker/cuda.Dockerfile -t omni-rl:cuda .
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/omni-rl/runs" omni-rl:cuda make gpu-check
# torch's wheel includes CUDA; torch's compiler needs g++ to build kernels.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home trainer && install -d -o trainer /omni-rl
USER trainer
WORKDIR /omni-rl
COPY --chown=trainer . .
RUN mkdir -p runs
ENV UV_NO_DEV=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN scripts/env true
ENV PATH="/omni-rl/.venv/bin:$PATH"
CMD ["omni-rl", "--help"]
