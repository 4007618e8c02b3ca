# gemmule as a server, on the CPU or on NVIDIA GPUs. Build and run:
#
#   docker build --tag gemmule .
#   docker run --gpus all --read-only --tmpfs /tmp --volume gemmule-cache:/home/gemmule/.cache \
#       --publish 8080:8080 gemmule serve --model BAAI/bge-small-en-v1.5 --host 0.0.0.0
#
# The image contains the binary and NVRTC, but no CUDA toolkit. The NVIDIA Container Toolkit provides the host's driver. The server
# writes only to /tmp and to /home/gemmule/.cache, which holds compiled kernels and models of the hub.

FROM rust:1-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --features corpora,shared-cache --bin gemmule \
    && strip --strip-debug -o /usr/local/bin/gemmule target/release/gemmule

FROM python:3.13-slim-bookworm AS nvrtc
COPY deploy/nvrtc.txt /
RUN python -m pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes --target /python -r /nvrtc.txt \
    && mkdir /nvrtc && cp /python/nvidia/cu13/lib/libnvrtc*.so* /nvrtc

FROM debian:bookworm-slim
RUN groupadd --gid 10001 gemmule \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/gemmule --shell /usr/sbin/nologin gemmule \
    && install --directory --owner 10001 --group 10001 /home/gemmule/.cache
COPY --from=nvrtc /nvrtc /usr/local/lib/nvrtc
COPY --from=build /usr/local/bin/gemmule /usr/local/bin/gemmule
COPY LICENSE-APACHE LICENSE-MIT /usr/share/doc/gemmule/
ENV GEMMULE_NVRTC=/usr/local/lib/nvrtc \
    HOME=/home/gemmule \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/gemmule
VOLUME /home/gemmule/.cache
EXPOSE 8080
# bash sends the request, because the image has no HTTP client. Kubernetes ignores HEALTHCHECK and uses its own probes
# (deploy/kubernetes.yaml).
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8080 && printf 'GET /ready HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["gemmule"]
CMD ["doctor"]
