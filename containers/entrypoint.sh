#!/bin/sh
# Runs the programs listed here and any path; everything else is a command of merlin-cowclip.
case "${1:-}" in
  */* | bash | sh | env | python | python3 | pip | pytest | jupyter | horovodrun | mpirun | nvidia-smi | tritonserver | merlin-cowclip) ;;
  *) set -- merlin-cowclip "$@" ;;
esac
# NVIDIA's entry point selects a CUDA library that fits an older driver.
nvidia=/opt/nvidia/nvidia_entrypoint.sh
if [ -x "$nvidia" ]; then
  set -- "$nvidia" "$@"
fi
exec "$@"
