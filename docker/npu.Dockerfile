# omni-rl on Ascend NPUs of the A2 series; the host needs the driver and firmware. From the folder of the clone, on aarch64:
#   docker build -f docker/npu.Dockerfile -t omni-rl:npu .
#   docker run --rm --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#     -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v "$PWD/runs:/omni-rl/runs" omni-rl:npu omni-rl doctor
# Put a wheel torch-2.12.0+cpu for Python 3.12 in wheels/: the default wheel includes CUDA, on aarch64 too.
# If there is no image for 9.1.0 yet: --build-arg CANN=9.1.0-beta.3
ARG CANN=9.1.0
FROM quay.io/ascend/cann:${CANN}-910b-ubuntu22.04-py3.12
WORKDIR /omni-rl
COPY . .
RUN mkdir -p wheels runs
RUN python3 -m pip install --no-cache-dir --find-links wheels -c constraints/npu.txt torch torch_npu pyyaml setuptools ./packages/*
ENTRYPOINT ["bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec \"$@\"", "--"]
CMD ["omni-rl", "--help"]
