# merlin-cowclip for CPUs, with the exact versions that its tests run on. From the repository's root:
#   docker build -f containers/cpu.Dockerfile -t merlin-cowclip:cpu .

# The digest is docker-library/repo-info's for this tag, of 2026-08-25.
ARG BASE=docker.io/library/python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b
FROM ${BASE}

# Git's files are not part of the build: --build-arg VERSION=0.1.dev0+g$(git rev-parse --short HEAD) records the commit.
ARG VERSION=0.1.0.dev0
ARG SETUPTOOLS_SCM_PRETEND_VERSION_FOR_MERLIN_COWCLIP=${VERSION}

LABEL org.opencontainers.image.title="merlin-cowclip" \
      org.opencontainers.image.description="CowClip for NVIDIA Merlin, on CPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11-slim-bookworm"

# A numeric user, so that Kubernetes sees that it is not root. With --user, any other user has the same
# home and can write to its folders and to new volumes mounted there.
RUN useradd --uid 10001 --create-home --shell /bin/bash cowclip \
 && install -d -m 1777 -o cowclip -g cowclip /home/cowclip /home/cowclip/data /home/cowclip/runs

# A virtual environment: Debian's own Python refuses pip.
ENV PATH=/opt/merlin-cowclip/bin:${PATH}
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/merlin-cowclip \
 && pip install --no-cache-dir --constraint constraints.txt '.[all]' \
 && install -m 755 containers/entrypoint.sh /usr/local/bin/merlin-cowclip-entrypoint \
 && rm -rf /src/*

# Not before: pip would leave root's files in the home.
ENV HOME=/home/cowclip \
    USER=cowclip \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/cowclip
ENTRYPOINT ["merlin-cowclip-entrypoint"]
CMD ["--help"]
