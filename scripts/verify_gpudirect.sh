#!/bin/bash
# Whether network cards can reach GPU memory here: `cloverinfer verify --transport rdma`, whose
# findings, verdict and exit status these are. Arguments are passed on, such as --json, or
# --listen 0.0.0.0:7700 on one host and --peer HOST:7700 on the other.
set -euo pipefail
command -v cloverinfer >/dev/null || {
  echo "error: no cloverinfer on the PATH: . .venv/bin/activate" >&2
  exit 2
}
exec cloverinfer verify --transport rdma "$@"
