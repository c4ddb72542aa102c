#!/usr/bin/env bash
# Sets an environment up and runs the main job: SmolLM2-135M and its draft, trained together.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh .venv
exec .venv/bin/python launch/train.py \
  --gin_file=configs/smollm2_135m_arithmetic.gin --workdir="${WORKDIR:-runs/smollm2_135m}" "$@"
