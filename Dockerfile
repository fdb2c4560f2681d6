# Everything that a federation's server and nodes run: fedagg with Flower, and nginx.
#   docker build -t fedagg .
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends nginx-light \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 fedagg
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
# Torch without CUDA; build with --build-arg TORCH=https://download.pytorch.org/whl/cu126 for nodes with a GPU.
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH" "/src[flower]"
ENV FLWR_TELEMETRY_ENABLED=0 PYTHONUNBUFFERED=1
USER fedagg
WORKDIR /federation
