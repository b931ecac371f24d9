"""Whatever ends a command, no process and no shared memory of it is left."""

import glob
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.processes import start
from tests.tiny_models import make_tiny

SCRIPT = """
import sys
from cloverinfer import LLM, ModelConfig, SamplingParams
with LLM(ModelConfig(model_path=sys.argv[1], dtype="float32"), topology="pda", executor=sys.argv[2],
         num_blocks=64, max_num_seqs=4) as llm:
    print("ready", *[row["pid"] for row in llm.engine.nodes()], flush=True)
    params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    while True:
        llm.generate([[1, 2, 3]] * 4, params)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("m")))


def segments(pids):
    """What these processes have left in shared memory."""
    owners = tuple(f"cloverinfer-{pid}-" for pid in pids)
    return [name for name in os.listdir("/dev/shm") if name.startswith(owners)]


def ray_folders():
    return set(glob.glob("/tmp/cloverinfer-ray-*"))


def gone(pids, seconds=20):
    deadline = time.monotonic() + seconds
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(running(pid) for pid in pids)


def running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("executor", "end"),
    [
        ("process", signal.SIGINT),
        ("process", signal.SIGTERM),
        ("process", signal.SIGKILL),
        ("ray", signal.SIGINT),
    ],
)
def test_nothing_is_left_of_a_script_that_is_ended(model, executor, end):
    before = ray_folders()
    script = start(
        [sys.executable, "-c", SCRIPT, model, executor],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert script.stdout is not None
        line = script.stdout.readline().split()
        assert line[:1] == ["ready"], script.communicate()[1]
        time.sleep(0.5)
        script.send_signal(end)
        _, errors = script.communicate(timeout=60)
    finally:
        script.kill()
    pids = [script.pid, *map(int, line[1:])]
    assert gone(pids), errors
    if end == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert segments(pids) == []
        assert ray_folders() <= before
    else:  # it could not clean up; the next start does
        subprocess.run(
            [
                sys.executable,
                "-c",
                "from cloverinfer.transport import shm; shm.remove_leftovers()",
            ],
            check=True,
        )
        assert segments(pids) == []


def test_an_interrupted_start_leaves_nothing(model):
    script = start(
        [sys.executable, "-c", SCRIPT, model, "process"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (children := children_of(script.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.0)
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=60)
    finally:
        script.kill()
    assert children
    assert gone(children), errors
    assert "KeyboardInterrupt" in errors
    assert segments([script.pid, *children]) == []


def children_of(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
