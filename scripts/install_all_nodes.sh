#!/usr/bin/env bash
# Makes an environment with all that the package needs on every host of deploy/cluster.yaml.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
command=$(command -v cloverinfer || echo "$here/.venv/bin/cloverinfer")
[ -x "$command" ] || { echo "error: cloverinfer is not installed: run make setup" >&2; exit 1; }
exec "$command" deploy install "$@"
