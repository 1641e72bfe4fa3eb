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
config() {  # NAME FIELD…
  "${store[@]}" inspect --type image "$1" | python3 -c '
import json, sys
found = json.load(sys.stdin)["Docker"]["config"]
for field in sys.argv[1:]:
    found = found[field]
print(json.dumps(found))' "${@:2}"
}
in_image() {  # [OPTION…] CONTAINER COMMAND…
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

mmdebstrap --quiet --variant=apt --include=ca-certificates,passwd,python3,python3-venv bookworm "$work/base.tar"
base=$("${store[@]}" from scratch)
"${store[@]}" add --quiet "$base" "$work/base.tar" / >/dev/null
"${store[@]}" commit --quiet "$base" localhost/bookworm >/dev/null
say "base: Debian bookworm, $(in_image "$base" -- python3 --version)"

build cpu.Dockerfile localhost/bookworm localhost/merlin-cowclip:cpu
say "built cpu.Dockerfile"
expect "the user" "$(config localhost/merlin-cowclip:cpu User)" '"10001"'
expect "the entry point" "$(config localhost/merlin-cowclip:cpu Entrypoint)" '["merlin-cowclip-entrypoint"]'
expect "the health check" "$(config localhost/merlin-cowclip:cpu Healthcheck Test)" '["CMD", "merlin-cowclip", "--help"]'
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
"${store[@]}" config --env PATH=/opt/python/bin:/usr/local/bin:/usr/sbin:/usr/bin:/bin --env LD_LIBRARY_PATH=/opt/python/lib "$base"
# packaging for add.py and numpy for --help are there in truth.
in_image "${mounts[@]}" "$base" -- python3 -m pip install --quiet --root-user-action=ignore \
  --disable-pip-version-check packaging "$(grep ^numpy== containers/ngc-image.txt)"
python3 containers/stand_in.py containers/ngc-image.txt "$work/site"
"${store[@]}" add --quiet "$base" "$work/site" /opt/python/lib/python3.10/site-packages >/dev/null
"${store[@]}" commit --quiet "$base" localhost/ngc-stand-in >/dev/null
say "stand-in: $(in_image "$base" -- python3 --version) with the recorded versions"
in_image "${mounts[@]}" --volume "$PWD:/repository:ro" "$base" -- \
  python3 /repository/containers/add.py --dry-run /repository 2>&1 | sed 's/^/    /'
say "what pip would do there"
build ngc.Dockerfile localhost/ngc-stand-in localhost/merlin-cowclip:ngc
ngc=$("${store[@]}" from localhost/merlin-cowclip:ngc)
expect "who runs" "$(in_image "$ngc" -- id -un)" cowclip
listed() { in_image "$1" -- python3 -m pip list --disable-pip-version-check --format=freeze | sort; }
expect "what the build changed" "$(comm -23 <(listed "$base") <(listed "$ngc"))" ""
in_image "$ngc" -- merlin-cowclip-entrypoint --help >/dev/null
say "built ngc.Dockerfile; its command line answers as cowclip"
