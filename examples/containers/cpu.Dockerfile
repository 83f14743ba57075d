# opd on a CPU, with the locked versions. From the top of a checkout, on x86-64:
#   docker build -f examples/containers/cpu.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=CPU_INDEX -t opd:cpu .
# CPU_INDEX: the CPU index that PyTorch's install page names.
FROM python:3.11-slim-bookworm AS build
ARG EXTRA=core
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/opd
ENV PATH=/opt/opd/bin:$PATH
WORKDIR /src
COPY .ci/requirements .ci/requirements
RUN if [ -z "$PIP_EXTRA_INDEX_URL" ]; then echo "give --build-arg PIP_EXTRA_INDEX_URL" >&2; exit 1; fi \
    && pip install -r .ci/requirements/torch.txt \
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
    && python -c "import torch; assert torch.version.cuda is None, 'PyTorch for CUDA was installed: check the index'"

FROM python:3.11-slim-bookworm
ARG UID=1000
RUN useradd --create-home --uid "$UID" opd
COPY --from=build /opt/opd /opt/opd
# Threads that wait without spinning: stages share the cores.
ENV PATH=/opt/opd/bin:$PATH KMP_BLOCKTIME=0 OMP_WAIT_POLICY=passive
USER $UID
WORKDIR /work
HEALTHCHECK NONE
ENTRYPOINT ["opd"]
CMD ["--help"]
