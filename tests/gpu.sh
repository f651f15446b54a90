#!/usr/bin/env bash
# Everything that is to be measured and tested on one GPU, in order of value, within 8 minutes.
#
#   bash tests/gpu.sh [--dry] [--out DIR] [PART ...]
#
# Needs Python (PYTHON=..., default: an active or local environment, else python3) with torch,
# transformers, pyarrow, pyyaml, tensorboard and pytest; installs and downloads nothing.
# `--dry` is a trial with tiny shapes on the CPU; `--help` says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "$PYTHON" -m tests.gpu "$@"
