#!/usr/bin/env bash
# make containers-test: builds both images without a container engine and runs them as several users. The CPU image
# is built on Debian's bookworm; NVIDIA's on a Python 3.10 with some of its packages. As root; 12 GB in TMPDIR.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah mmdebstrap; do
  command -v "$tool" >/dev/null || { echo "Install $tool first (Debian: apt-get install buildah mmdebstrap)." >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "Run this as root: buildah needs it to change the root folder." >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
store=(buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs)
mounts=()  # pip's settings of this machine
for path in /etc/pip.conf /etc/ssl/certs; do
  if [ -e "$path" ]; then mounts+=(--volume "$path:$path:ro"); fi
done
say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }
build() {  # NAME BASE
  "${store[@]}" bud --quiet --isolation chroot --format docker "${mounts[@]}" --build-arg BASE="$2" \
    --file "containers/$1.Dockerfile" --tag "localhost/$1" . 2>&1 | sed 's/^/    /'
  container=$("${store[@]}" from "localhost/$1")
  "${store[@]}" inspect --type image "localhost/$1" | python3 -c '
import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
assert config["User"] == "10001" and config["Entrypoint"] == ["merlin-cowclip-entrypoint"], config
assert "Healthcheck" not in config, config'
  say "built $1"
}
in_image() {  # [OPTION…] CONTAINER COMMAND…
  "${store[@]}" run --isolation chroot "$@"
}
as_users() {  # COMMAND…: through the entry point, as the image's user and as two that it does not know
  for user in 10001 12345:0 12345:12345; do
    in_image --user 0 "$container" -- rm -rf /home/cowclip/.cache /home/cowclip/.config  # as in a new container
    in_image --user "$user" "$container" -- merlin-cowclip-entrypoint "$@" 2>&1 | sed 's/^/    /'
    say "as $user: $*"
  done
}

mmdebstrap --quiet --variant=apt --include=ca-certificates,passwd,python3,python3-venv bookworm "$work/base.tar"
base=$("${store[@]}" from scratch)
"${store[@]}" add --quiet "$base" "$work/base.tar" / >/dev/null
"${store[@]}" commit --quiet "$base" localhost/bookworm >/dev/null
build cpu localhost/bookworm
as_users bash -c 'touch data/"$$" && id'
as_users demo --rows "${ROWS:-40000}"
"${store[@]}" rm "$container" >/dev/null

# A Python 3.10 in one folder, as pyenv's. The distribution's cannot be copied.
for python in python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python3.10; do
  prefix=$("$python" -c 'import sys; print(sys.base_prefix)' 2>/dev/null) || continue
  if [ "$prefix" != /usr ]; then break; fi
done
[ "${prefix:-/usr}" != /usr ] || { say "no Python 3.10 outside /usr: ngc.Dockerfile is not built"; exit; }
"${store[@]}" add --quiet "$base" "$prefix" /opt/python >/dev/null
"${store[@]}" config --env PATH=/opt/python/bin:/usr/local/bin:/usr/sbin:/usr/bin:/bin --env LD_LIBRARY_PATH=/opt/python/lib "$base"
sed '/^#/d' constraints-ngc.txt > "$work/constraints.txt"
in_image "${mounts[@]}" --volume "$work:/versions:ro" "$base" -- python3 -m pip install --quiet --no-deps --constraint \
  /versions/constraints.txt numpy pandas pyarrow dask distributed click pyyaml protobuf merlin-core merlin-dataloader merlin-models
"${store[@]}" commit --quiet "$base" localhost/ngc-base >/dev/null
build ngc localhost/ngc-base
as_users --help
as_users bash -c 'touch notebooks/"$$" && id'
