#!/usr/bin/env bash
# Puts this version of the package on every host.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
command=$(command -v cloverinfer || echo "$here/.venv/bin/cloverinfer")
[ -x "$command" ] || { echo "error: cloverinfer is not installed: run make setup" >&2; exit 1; }
exec "$command" deploy push "$@"
