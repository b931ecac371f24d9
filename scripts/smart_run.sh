#!/usr/bin/env bash
# smart_run.sh P D [A]: starts P prefill, D dense and A attention nodes, and proves that they work.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
command=$(command -v cloverinfer || echo "$here/.venv/bin/cloverinfer")
[ -x "$command" ] || { echo "error: cloverinfer is not installed: run make setup" >&2; exit 1; }
exec "$command" deploy run "$@"
