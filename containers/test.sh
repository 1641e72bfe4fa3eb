#!/usr/bin/env bash
# make containers-test: builds both images without a container engine, and runs the demo in the CPU's as
# its own user. The CPU image on Debian's bookworm instead of python:3.11-slim; NVIDIA's on a stand-in that
# says it holds what containers/ngc-image.txt records. 7 GB in TMPDIR while it runs; as root.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah mmdebstrap; do
  command -v "$tool" >/dev/null || {
    echo "make containers-test needs $tool: on Debian, apt-get install buildah mmdebstrap" >&2
    exit 2
  }
done
if [ "$(id -u)" != 0 ]; then
  echo "make containers-test needs root: buildah changes its root without user namespaces" >&2
  exit 2
fi
say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
store=(buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs)
# What this machine's pip needs, a build's pip needs too.
mounts=()
for path in /etc/pip.conf /etc/ssl/certs; do
  if [ -e "$path" ]; then mounts+=(--volume "$path:$path:ro"); fi
done
build() {  # FILE BASE NAME
  "${store[@]}" bud --quiet --isolation chroot --format docker "${mounts[@]}" \
    --build-arg BASE="$2" --file "containers/$1" --tag "$3" . 2>&1 | sed 's/^/    /'
}
config() {  # NAME FIELD
  "${store[@]}" inspect --type image --format "{{json .Docker.Config.$2}}" "$1"
}
in_image() {  # CONTAINER COMMAND…
  "${store[@]}" run --isolation chroot "$@"
}
expect() {  # WHAT FOUND WANTED
  if [ "$2" != "$3" ]; then
    echo "$1 is $2, not $3" >&2
    exit 1
  fi
}

if command -v hadolint >/dev/null; then
  hadolint --ignore DL3006 containers/*.Dockerfile  # FROM ${BASE}: tests/test_containers.py looks at it
  say "hadolint finds nothing"
fi

mmdebstrap --quiet --variant=essential --include=ca-certificates,passwd,python3,python3-venv bookworm "$work/base.tar"
base=$("${store[@]}" from scratch)
"${store[@]}" add --quiet "$base" "$work/base.tar" / >/dev/null
"${store[@]}" commit --quiet "$base" localhost/bookworm >/dev/null
say "base: Debian bookworm, $("${store[@]}" run --isolation chroot "$base" -- python3 --version)"

build cpu.Dockerfile localhost/bookworm localhost/merlin-cowclip:cpu
say "built cpu.Dockerfile"
expect "the user" "$(config localhost/merlin-cowclip:cpu User)" '"10001"'
expect "the entry point" "$(config localhost/merlin-cowclip:cpu Entrypoint)" '["merlin-cowclip-entrypoint"]'
expect "the health check" "$(config localhost/merlin-cowclip:cpu Healthcheck.Test)" '["CMD","merlin-cowclip","--help"]'
cpu=$("${store[@]}" from localhost/merlin-cowclip:cpu)
expect "who runs" "$(in_image "$cpu" -- id -un)" cowclip
in_image "$cpu" -- merlin-cowclip --help >/dev/null  # the health check
in_image "$cpu" -- merlin-cowclip-entrypoint demo --rows 40000 2>&1 | sed 's/^/    /'
expect "whose run" "$(in_image "$cpu" -- sh -c 'stat -c %U runs/demo-*')" cowclip
say "the demo ran as cowclip"
"${store[@]}" rm "$cpu" >/dev/null

# What needs a whole Python 3.10 to copy: the distribution's is strewn about.
for python in python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python3.10; do
  prefix=$("$python" -c 'import sys; print(sys.base_prefix)' 2>/dev/null) || continue
  if [ "$prefix" != /usr ]; then break; fi
done
if [ "${prefix:-/usr}" = /usr ]; then
  say "no Python 3.10 outside /usr here: ngc.Dockerfile was not built"
  exit
fi
"${store[@]}" add --quiet "$base" "$prefix" /opt/python >/dev/null
python3 containers/stand_in.py containers/ngc-image.txt "$work/site"
"${store[@]}" add --quiet "$base" "$work/site" /opt/python/lib/python3.10/site-packages >/dev/null
"${store[@]}" config --env PATH=/opt/python/bin:/usr/local/bin:/usr/bin:/bin --env LD_LIBRARY_PATH=/opt/python/lib "$base"
in_image "$base" "${mounts[@]}" -- python3 -m pip install --quiet --root-user-action=ignore packaging
"${store[@]}" commit --quiet "$base" localhost/ngc-stand-in >/dev/null
say "stand-in: $(in_image "$base" -- python3 --version) with the recorded versions"
in_image "$base" "${mounts[@]}" --volume "$PWD:/repository:ro" -- sh -c \
  'cp -r /repository /tmp/source && python3 /tmp/source/containers/add.py --dry-run /tmp/source' 2>&1 | sed 's/^/    /'
say "what pip would do there"
build ngc.Dockerfile localhost/ngc-stand-in localhost/merlin-cowclip:ngc
ngc=$("${store[@]}" from localhost/merlin-cowclip:ngc)
expect "who runs" "$(in_image "$ngc" -- id -un)" cowclip
in_image "$ngc" -- merlin-cowclip-entrypoint --help >/dev/null
say "built ngc.Dockerfile; its command line answers as cowclip"
