#!/usr/bin/env bash
# Makes a virtual environment with a real SGLang that runs on a CPU (1.5 GB, some minutes). Usage: install_sglang.sh FOLDER
# SGLang pins GPU builds of torch and torchvision, so it is installed without its dependencies.
set -euo pipefail
folder=${1:?usage: install_sglang.sh FOLDER}
"${PYTHON:-python3.11}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install -q --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 transformers==5.12.1 numpy dill orjson psutil pybase64 requests pillow msgspec pyzmq IPython \
  aiohttp sentencepiece==0.2.1 loguru gguf uvicorn uvloop fastapi openai==2.6.1 partial-json-parser setproctitle einops \
  jsonschema apache-tvm-ffi==0.1.11 soundfile==0.13.1 python-multipart openai-harmony==0.0.4
"${pip[@]}" --no-deps sglang==0.5.21 torchvision==0.28.0 xgrammar==0.2.7 compressed-tensors==0.18.0
echo "export SLIME_VERLOG_SGLANG=$(cd "$folder" && pwd)"
