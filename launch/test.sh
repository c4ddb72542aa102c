#!/usr/bin/env bash
# Sets a test environment up and runs every test that is not marked exhaustive.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh .venv-test test
exec .venv-test/bin/python -m pytest -q -n 2 --dist loadfile -m "not exhaustive" "$@"
