# opd on NVIDIA GPUs, with the locked versions. From the top of a checkout, on x86-64:
#   docker build -f examples/containers/cuda.Dockerfile -t opd:cuda .
# PyTorch brings CUDA; the host needs NVIDIA's driver and container toolkit.
FROM python:3.11-slim-bookworm AS build
ARG EXTRA=core
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/opd
ENV PATH=/opt/opd/bin:$PATH
WORKDIR /src
COPY .ci/requirements .ci/requirements
RUN pip install -r .ci/requirements/torch.txt \
    && pip install --no-deps --require-hashes -r ".ci/requirements/$EXTRA.txt"
COPY pyproject.toml LICENSE ./
COPY docs/install.md docs/
COPY examples/quickstart/recipe.yaml examples/quickstart/
COPY opd opd
COPY kernels kernels
COPY pipelines pipelines
COPY storage storage
COPY teachers teachers
RUN pip install --no-deps --no-build-isolation . \
    && python -c "import torch; assert torch.version.cuda, 'PyTorch without CUDA was installed: check the index'"

FROM python:3.11-slim-bookworm
ARG UID=1000
# Triton compiles what starts its kernels with the system's C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid "$UID" opd
COPY --from=build /opt/opd /opt/opd
ENV PATH=/opt/opd/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER $UID
WORKDIR /work
HEALTHCHECK NONE
ENTRYPOINT ["opd"]
CMD ["--help"]
