#!/bin/sh
# The command line. In NVIDIA's image its own entry point goes first: it says what the image holds,
# and makes an older driver fit.
nvidia=/opt/nvidia/nvidia_entrypoint.sh
if [ -x "$nvidia" ]; then
  exec "$nvidia" merlin-cowclip "$@"
fi
exec merlin-cowclip "$@"
