#!/usr/bin/env bash
# Builds Horovod with Gloo for the TensorFlow of a Python environment, and installs it: horovod.sh [PYTHON].
# HOROVOD_GPU_OPERATIONS=NCCL and Horovod's other variables are passed on.
set -euo pipefail
python=$(command -v "${1:-python}")
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO
# CMake 3.26 refuses Horovod's files. From Python 3.12 on, horovodrun takes distutils from setuptools.
"$python" -m pip install --quiet 'cmake<3.26' 'setuptools<81' wheel packaging cloudpickle psutil pyyaml
HOROVOD_CMAKE=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/cmake
export HOROVOD_CMAKE
"$python" -m pip download --quiet --no-deps --no-binary horovod --no-build-isolation --dest "$source" horovod==0.28.1
tar -xzf "$source"/horovod-0.28.1.tar.gz -C "$source" --strip-components 1
# Its XLA operations, off by default, do not compile with TensorFlow 2.21 (horovod #4302).
sed -i /xla_mpi_ops/d "$source/horovod/tensorflow/CMakeLists.txt"
# TensorFlow 2.21 has no AsGpuStreamValue; without it, a build for GPUs would not load.
sed -i 's/^\(GpuStreamHandle AsGpuStreamValue(\)Stream\* stream);/template <class S> \1S* stream) {\n  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n}/' \
  "$source/horovod/tensorflow/mpi_ops.cc"
# A cached wheel would be reused with another TensorFlow.
"$python" -m pip install --quiet --no-cache-dir --no-build-isolation --no-deps "$source"
