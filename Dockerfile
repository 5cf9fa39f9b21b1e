# All processes in one image: user 10001, nothing written outside /tmp and /dev/shm. The chart runs it.
#
#   docker build -t k3-serving:0.1.0 .                                           for CPUs and NVIDIA GPUs
#   docker build -t k3-serving:0.1.0 --build-arg TORCH=cpu --secret id=pip.conf,src=FILE .      for CPUs, small
#
# constraints.txt takes torch's CPU build and its CUDA build; which of them comes is for pip's index to say, and TORCH says
# which it must be. A pip.conf that names another index stays out of every layer.
ARG TORCH=cuda
ARG PYTHON=3.11

FROM python:${PYTHON}-bookworm AS build
ARG TORCH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt .
# torch first and alone: this layer is kept while the sources change.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python -m venv /opt/k3 && /opt/k3/bin/pip install -c constraints.txt torch
RUN /opt/k3/bin/python -c "import sys, torch; built = 'cuda' if torch.version.cuda else 'cpu'; \
    sys.exit(built != '${TORCH}' and f'TORCH=${TORCH}, but pip gave a {built} build: set TORCH={built}, or name another index')"
COPY . .
# The wheel holds the stubs and, here without exception, the native CPU library.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install -c constraints.txt hatchling grpcio-tools \
    && pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/k3/bin/pip install -c constraints.txt "$(echo /wheels/*.whl)[router,engine]" \
    && ls /opt/k3/lib/python*/site-packages/k3_kernels/cpu/lib/*.so

FROM python:${PYTHON}-slim-bookworm AS cpu

FROM cpu AS cuda
# Triton compiles the launcher of each kernel where it runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${TORCH}
RUN groupadd --gid 10001 k3 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp k3
COPY --from=build /opt/k3 /opt/k3
# Libraries keep their caches in HOME.
ENV PATH=/opt/k3/bin:$PATH HOME=/tmp
USER 10001:10001
