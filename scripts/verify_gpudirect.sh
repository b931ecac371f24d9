#!/usr/bin/env bash
# Whether network cards can reach GPU memory here: `cloverinfer verify --transport rdma`, whose
# findings, verdict and exit status these are. Arguments are passed on, such as --json, or
# --listen 0.0.0.0:7700 on one host and --peer HOST:7700 on the other.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
command=$(command -v cloverinfer || echo "$here/.venv/bin/cloverinfer")
[ -x "$command" ] || { echo "error: cloverinfer is not installed: run make setup" >&2; exit 1; }
exec "$command" verify --transport rdma "$@"
