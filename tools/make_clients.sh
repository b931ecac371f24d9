#!/usr/bin/env bash
# make_clients.sh PYTHON FOLDER: a virtual environment for each client that tests/clients run, made
# anew only where its requirements changed. Each sees the packages of PYTHON's environment as well.
set -euo pipefail

python=$1
folder=$2
here=$(cd "$(dirname "$0")/../tests/clients" && pwd)
# Where the project's packages are: the folder that holds PyTorch.
packages=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')

make_one() {
    local name=$1
    shift
    local venv=$folder/$name wanted=$here/$name.txt
    if cmp --silent "$wanted" "$venv/made-from.txt"; then
        return
    fi
    echo "==> installing the client $name"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    echo "$packages" > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/zz_project.pth"
    # A client that cannot be had is told of, and its test skipped: the others still run.
    if "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@" -r "$wanted"; then
        cp "$wanted" "$venv/made-from.txt"
    else
        echo "warning: the client $name cannot be installed here; its test will be skipped" >&2
    fi
}

mkdir -p "$folder"
make_one schemathesis
make_one lm-eval
make_one vllm --no-deps
