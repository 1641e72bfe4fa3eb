# merlin-cowclip in NVIDIA's Merlin image, whose own packages stay as they are. From the repository's root:
#   docker build -f containers/ngc.Dockerfile -t merlin-cowclip:ngc .

# By tag: the digest is not known here. `docker buildx imagetools inspect` prints it; --build-arg BASE= takes it.
ARG BASE=nvcr.io/nvidia/merlin/merlin-tensorflow:23.12
FROM ${BASE}

# Git's files are not part of the build: --build-arg VERSION=0.1.dev0+g$(git rev-parse --short HEAD) records the commit.
ARG VERSION=0.1.0.dev0
ARG SETUPTOOLS_SCM_PRETEND_VERSION_FOR_MERLIN_COWCLIP=${VERSION}

LABEL org.opencontainers.image.title="merlin-cowclip" \
      org.opencontainers.image.description="CowClip for NVIDIA Merlin, in NVIDIA's Merlin image" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="nvcr.io/nvidia/merlin/merlin-tensorflow:23.12"

# The user as in cpu.Dockerfile. Root until the package is in: the image's Python packages are root's.
USER 0
RUN useradd --uid 10001 --create-home --shell /bin/bash cowclip \
 && install -d -o cowclip -g cowclip /home/cowclip/data /home/cowclip/runs /home/cowclip/notebooks

WORKDIR /src
COPY . .
RUN python3 containers/add.py . \
 && install -m 755 containers/entrypoint.sh /usr/local/bin/merlin-cowclip-entrypoint \
 && install -m 644 -o cowclip -g cowclip workflows/notebooks/*.ipynb /home/cowclip/notebooks \
 && rm -rf /src/*

# The image's folder for Jupyter's own files is root's.
ENV PYTHONUNBUFFERED=1 \
    JUPYTER_CONFIG_DIR=/home/cowclip/.jupyter \
    JUPYTER_DATA_DIR=/home/cowclip/.jupyter \
    JUPYTER_RUNTIME_DIR=/home/cowclip/.jupyter

USER 10001
WORKDIR /home/cowclip
HEALTHCHECK --interval=1m --timeout=30s CMD ["merlin-cowclip", "--help"]
ENTRYPOINT ["merlin-cowclip-entrypoint"]
CMD ["--help"]
