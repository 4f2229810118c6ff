# omni-rl on CPUs. From the folder of the clone:
#   docker build -f docker/cpu.Dockerfile -t omni-rl:cpu .
#   docker run --rm -v "$PWD/runs:/omni-rl/runs" omni-rl:cpu make demo
# Uses a wheel torch-2.13.0+cpu for Python 3.11 in wheels/ if present; otherwise torch comes with CUDA, 2.7 GB instead of 0.2.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home trainer && install -d -o trainer /omni-rl
USER trainer
WORKDIR /omni-rl
COPY --chown=trainer . .
RUN mkdir -p wheels runs
ENV UV_FIND_LINKS=/omni-rl/wheels UV_NO_DEV=1
RUN scripts/env true
ENV PATH="/omni-rl/.venv/bin:$PATH"
CMD ["omni-rl", "--help"]
