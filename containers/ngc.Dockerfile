# merlin-cowclip in NVIDIA's Merlin image, whose own packages stay as they are. From the repository's root:
#   docker build -f containers/ngc.Dockerfile -t merlin-cowclip:ngc .

# By tag: no public source names the digest. `docker buildx imagetools inspect nvcr.io/nvidia/merlin/merlin-tensorflow:23.12`
# prints it; build with --build-arg BASE=nvcr.io/nvidia/merlin/merlin-tensorflow@sha256:….
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

# Users and folders as in cpu.Dockerfile. Root until the package is installed: the image's packages are root's.
USER 0
RUN useradd --uid 10001 --create-home --shell /bin/bash cowclip \
 && install -d -m 1777 -o cowclip -g cowclip /home/cowclip /home/cowclip/data /home/cowclip/runs /home/cowclip/notebooks

WORKDIR /src
COPY . .
# The image's versions are constraints, except those that pip cannot compare. The build fails if one changed.
RUN python3 -m pip list --format=freeze | sort > image.txt \
 && grep -E '==([0-9]+!)?[0-9.]+((a|b|rc|\.post|\.dev)[0-9]+)*(\+[A-Za-z0-9.]+)?$' image.txt > image-constraints.txt \
 && python3 -m pip install --no-cache-dir --constraint image-constraints.txt --requirement containers/ngc-requirements.txt \
 && python3 -m pip install --no-cache-dir --no-deps . \
 && python3 -m pip list --format=freeze | sort > built.txt \
 && ! comm -23 image.txt built.txt | grep . \
 && install -m 755 containers/entrypoint.sh /usr/local/bin/merlin-cowclip-entrypoint \
 && install -m 666 -o cowclip -g cowclip workflows/notebooks/*.ipynb /home/cowclip/notebooks \
 && rm -rf /src/*

# Not before: pip would leave root's files in the home. The image's folder for Jupyter's own files is root's.
ENV HOME=/home/cowclip \
    USER=cowclip \
    PYTHONUNBUFFERED=1 \
    JUPYTER_CONFIG_DIR=/home/cowclip/.jupyter \
    JUPYTER_DATA_DIR=/home/cowclip/.jupyter \
    JUPYTER_RUNTIME_DIR=/home/cowclip/.jupyter
USER 10001
WORKDIR /home/cowclip
ENTRYPOINT ["merlin-cowclip-entrypoint"]
CMD ["--help"]
