"""The inventory and what is said of hosts; runs without any host."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cloverinfer.cli import main
from cloverinfer.core.errors import ConfigError
from cloverinfer.deploy import fleet as fleet_module
from cloverinfer.deploy import lifecycle, native, on_host, packages, services, setup, vllm
from cloverinfer.deploy.fleet import Fleet, FleetError
from cloverinfer.deploy.inventory import Inventory, load_inventory
from cloverinfer.deploy.remote import PRELUDE, HostError, Remote, explain

GOOD = """
hosts:
  - {name: gate, address: 192.0.2.1, roles: [prefill, prefill]}
  - {name: other, address: 192.0.2.2, roles: [dense, attention]}
settings:
  model: {model_path: small}
"""


def load(folder: Path, text: str, env: str | None = None) -> Inventory:
    (folder / "cluster.yaml").write_text(text)
    if env is None:
        return load_inventory(folder / "cluster.yaml")
    (folder / ".env").write_text(env)
    return load_inventory(folder / "cluster.yaml", folder / ".env")


def test_room_is_the_sum_over_hosts(tmp_path: Path) -> None:
    inventory = load(tmp_path, GOOD)
    assert (inventory.room("prefill"), inventory.room("attention")) == (2, 1)
    pda = {"prefill": 2, "dense": 1, "attention": 1}
    assert native.topology_of(inventory, pda) == "pda"
    with pytest.raises(ConfigError, match="room for 0 decode nodes, not 1"):
        native.topology_of(inventory, {"prefill": 1, "decode": 1})
    with pytest.raises(ConfigError, match="1 or more, not 0"):
        native.topology_of(inventory, pda | {"prefill": 0})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("hosts: []", "at least one"),
        ("", "Expected `object`"),
        ("hosts: [{name: a, address: 192.0.2.1, rolls: []}]", "unknown field `rolls`"),
        ("hosts: [{name: a, address: 192.0.2.1, roles: [pre]}]", "the role 'pre'; known in mode"),
        ("hosts: [{name: a b, address: 192.0.2.1}]", "plain name"),
        ("hosts: [{name: a, address: -oProxyCommand=x}]", "plain name and an address"),
        ("hosts: [{name: a, address: h}, {name: a, address: i}]", "two hosts have the name 'a'"),
        ("hosts: [{name: a, address: h}, {name: b, address: h}]", "the address 'h'"),
        ("hosts: [{name: a, address: h}]\nmode: other", "mode must be one of"),
        ("hosts: [{name: a, address: h}]\nfolder: /", "folder must be one of its own"),
        ("hosts: [{name: a, address: h}]\nport: 99999", "from 1 to 65535, not 99999"),
        ("hosts: [{name: a, address: h}]\nray_port: 8000", "must differ, both are 8000"),
        ("hosts: [{name: a, address: h}]\nstart_timeout: -1", "start_timeout must be above 0"),
        ("hosts: [{name: a, address: h}]\nenvironment: {'a;b': c}", "'a;b' is no name of a"),
        (
            "hosts: [{name: a, address: h, roles: [dense]}]\nmode: vllm",
            "known in mode vllm are pre",
        ),
        ("hosts: [{name: a, address: h}]\nvllm: {port: 0}", "vllm.port must be from 1 to 65535"),
        (
            "hosts: [{name: a, address: h}]\nvllm: {connector: {secret: s}}",
            "secret is set by deploy",
        ),
        ("hosts: [{name: a, address: h}]\nsettings: {modell: {}}", "settings: unknown section"),
        ("hosts: [{name: a, address: h}]\nsettings: {model: {dtype: int3}}", "model.dtype must be"),
    ],
)
def test_what_is_wrong_with_an_inventory_is_told(tmp_path: Path, wrong: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, wrong)
    assert told in str(error.value)
    assert "cluster.yaml" in str(error.value)


def test_without_an_inventory_it_is_said_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name one by --inventory"):
        load_inventory(tmp_path / "none.yaml")


def test_familiar_names_become_settings_and_the_rest_environment(tmp_path: Path) -> None:
    env = "# ours\nMODEL_NAME='big one'\nexport MAX_MODEL_LEN=512 # tokens\n\nHF_HOME=/data\n"
    inventory = load(tmp_path, GOOD, env + "GPU_MEMORY_UTILIZATION=0.5\n")
    assert inventory.settings == {
        "model": {"model_path": "big one", "max_model_len": 512},
        "cache": {"gpu_memory_utilization": 0.5},
    }
    assert inventory.environment == {"HF_HOME": "/data"}


def test_the_share_of_a_gpu_is_a_setting_and_the_env_file_wins(tmp_path: Path) -> None:
    text = GOOD + "gpu_memory_utilization: 0.7\n"
    assert load(tmp_path, text).settings["cache"] == {"gpu_memory_utilization": 0.7}
    inventory = load(tmp_path, text, "GPU_MEMORY_UTILIZATION=0.5\n")
    assert inventory.settings["cache"] == {"gpu_memory_utilization": 0.5}


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("MODEL_NAME", r"\.env:1: must be NAME=value, without spaces around =$"),
        ("A=1\nB = 2", r"\.env:2: must be NAME=value"),
        ("A='1", r"\.env:1: No closing quotation"),
        ("GPU_MEMORY_UTILIZATION=90", "above 0, at most 1"),
        ("MAX_MODEL_LEN=long", "max_model_len must be"),
    ],
)
def test_what_is_wrong_with_an_env_file_is_told(tmp_path: Path, env: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, GOOD, env)


def test_an_env_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "binary.env").write_bytes(b"\xff\xfe=3")
    load(tmp_path, GOOD)
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_inventory(tmp_path / "cluster.yaml", tmp_path / "binary.env")


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (255, "clv@h: Permission denied (publickey).", "refuses the key"),
        (255, "ssh: connect to host h port 22: Connection refused", "nothing listens"),
        (255, "ssh: connect to host h port 22: Connection timed out", "does not answer"),
        (255, "Warning: Identity file k not accessible\nPermission denied.", "correct its path"),
        (1, "ERROR: c-cp311.whl is not a supported wheel on this platform.", "does not fit"),
        (1, "ModuleNotFoundError: No module named 'cloverinfer'", "run deploy push"),
        (1, "mkdir: cannot create directory '/proc/x': No such file", "a place of the user's"),
        (-9, "", "broken off"),
        (255, "client_loop: send disconnect: Broken pipe", "run the command again"),
        (3, "noise\nclover: the reason\n", "the reason"),
        (1, "OSError: [Errno 28] No space left on device", "its disk is full"),
        (2, "", "exit status 2"),
    ],
)
def test_what_failed_is_one_line_with_what_to_do(status: int, said: str, told: str) -> None:
    assert told in explain(status, said)
    assert "\n" not in explain(status, said)


def test_one_host_fails_and_the_others_go_on(tmp_path: Path) -> None:
    out = io.StringIO()
    fleet = Fleet(load(tmp_path, GOOD), tmp_path / "logs", out=out)

    def step(remote: Remote) -> str:
        if remote.host.name == "gate":
            raise HostError("broken: mend it")
        return "done"

    with pytest.raises(FleetError, match="try failed on gate; the other hosts are unharmed"):
        fleet.on_all("try", step)
    assert "FAIL gate: broken: mend it" in out.getvalue()
    assert "ok   other: done" in out.getvalue()


def test_hosts_that_take_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PROGRESS_SECONDS", 0.01)
    out = io.StringIO()
    fleet = Fleet(load(tmp_path, GOOD), tmp_path / "logs", out=out)
    told = threading.Event()

    def step(remote: Remote) -> str:
        if remote.host.name == "other":
            wait_for(lambda: "waiting for other (" in out.getvalue())
            told.set()
        return "done"

    fleet.on_all("try", step)
    assert told.is_set()


def test_a_signal_does_not_wait_for_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho begun >&2\nexec sleep 600\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    out = io.StringIO()
    fleet = Fleet(load(tmp_path, GOOD), tmp_path / "logs", out=out)
    reached = threading.Barrier(3)

    def step(remote: Remote) -> str:
        reached.wait(30)
        return remote.run("true\n", 600.0)

    def interrupted(self: Fleet, steps: object) -> None:
        reached.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(Fleet, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fleet.on_all("try", step)
    told = out.getvalue()
    assert told.count("run the command again") + told.count("not begun") == 2


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_a_signal_breaks_off_is_stopped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    def broken_off(*_: object) -> None:
        raise end

    monkeypatch.setattr(native, "_start", broken_off)
    fleet = Fleet(load(tmp_path, GOOD), tmp_path / "logs", dry_run=True, out=io.StringIO())
    with pytest.raises(end):
        native.run(fleet, {"prefill": 1, "dense": 1, "attention": 1})
    assert "== stop the entry" in fleet.out.getvalue()  # type: ignore[attr-defined]


def test_a_folder_of_logs_that_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tmp_path, GOOD)
    file = str(tmp_path / "cluster.yaml")
    assert main(["deploy", "status", "--inventory", file, "--logs", f"{file}/logs"]) == 2
    assert "--logs: cannot make" in capsys.readouterr().err


VLLM = """
mode: vllm
hosts:
  - {name: gate, address: 192.0.2.1, roles: [prefill, prefill]}
  - {name: other, address: 'fd00::2', roles: [decode, prefill]}
gpu_memory_utilization: 0.5
vllm: {options: [--enforce-eager], connector: {transport: tcp}}
settings:
  model: {model_path: /models/m, max_model_len: 512}
  server: {served_model_name: m}
"""


def test_instances_are_spread_over_hosts_with_ports_of_their_own(tmp_path: Path) -> None:
    inventory = load(tmp_path, VLLM)
    found = vllm.placed(inventory, {"prefill": 3, "decode": 1})
    told = [(one.host.name, one.role, one.service, one.port, one.kv_port) for one in found]
    assert told == [
        ("gate", "prefill", "vllm-0", 8100, 14579),
        ("other", "prefill", "vllm-0", 8100, 14579),
        ("gate", "prefill", "vllm-1", 8101, 14679),
        ("other", "decode", "vllm-1", 8101, 14679),
    ]
    with pytest.raises(ConfigError, match="room for 1 decode instances, not 2: give more hosts"):
        vllm.placed(inventory, {"prefill": 1, "decode": 2})
    with pytest.raises(ConfigError, match="1 or more, not 0"):
        vllm.placed(inventory, {"prefill": 0, "decode": 1})


def test_an_instance_is_started_with_the_connector_and_announced(tmp_path: Path) -> None:
    *_, decode = vllm.placed(load(tmp_path, VLLM), {"prefill": 1, "decode": 1})
    command = vllm.vllm_command(decode)
    assert command[:3] == ["venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert command[3:7] == ["--model", "/models/m", "--host", "fd00::2"]
    assert json.loads(command[command.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "RDMAConnector",
        "kv_connector_module_path": "cloverinfer.integrations.vllm",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_host": "fd00::2", "kv_port": 14579, "transport": "tcp"},
    }
    text = "--max-model-len 512 --gpu-memory-utilization 0.5 --served-model-name m --enforce-eager"
    assert " ".join(command).endswith(text)
    node = " ".join(vllm.node_command(decode))
    assert "--url http://[fd00::2]:8100 --role decode" in node
    assert "--orchestrator http://192.0.2.1:8000 --kv-address [fd00::2]:14579" in node


def test_settings_that_mode_vllm_would_ignore_are_refused(tmp_path: Path) -> None:
    vllm.check_settings(load(tmp_path, VLLM))
    more = VLLM + "  cache: {num_blocks: 64}\n"
    with pytest.raises(ConfigError, match=r"cache\.num_blocks changes nothing in mode vllm"):
        vllm.check_settings(load(tmp_path, more))
    with pytest.raises(ConfigError, match="set MODEL_NAME"):
        vllm.check_settings(load(tmp_path, VLLM.partition("settings:")[0]))


def test_other_settings_are_another_plan_and_secrets_stand_in_none(tmp_path: Path) -> None:
    inventory = load(tmp_path, GOOD, "CLOVER_SERVER_API_KEY=hush\n")
    plans = []
    for one in (inventory, load(tmp_path, GOOD)):
        fleet = Fleet(one, tmp_path / "logs", dry_run=True, out=io.StringIO())
        start = plans.append
        lifecycle.begin(fleet, {"prefill": 1}, lambda *_: "", start, lambda *_: "")
        assert "hush" not in fleet.out.getvalue()  # type: ignore[attr-defined]
    assert plans[0] != plans[1]
    assert "hush" not in plans[0]
    assert {lifecycle.counts_of(plan) for plan in plans} == {"prefill 1"}


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("{}", "http://192.0.2.1:8000"),
        ("{host: 0.0.0.0}", "http://192.0.2.1:8000"),
        ("{host: 'fd00::9', ssl_certfile: c, ssl_keyfile: k}", "https://[fd00::9]:8000"),
    ],
)
def test_the_entry_is_found_where_the_settings_put_it(
    tmp_path: Path, server: str, url: str
) -> None:
    inventory = load(tmp_path, GOOD + f"  server: {server}\n")
    assert lifecycle.entry_url(inventory) == url


def test_a_proof_brings_the_key_that_the_entry_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLOVER_SERVER_API_KEY", raising=False)
    assert on_host._key() == ""
    (tmp_path / "run").mkdir()
    (tmp_path / on_host.CONFIG).write_text("server: {api_key: [one, two]}\n")
    assert on_host._key() == "one"
    monkeypatch.setenv("CLOVER_SERVER_API_KEY", "first,second")
    assert on_host._key() == "first"


def test_every_package_of_the_environment_is_pinned() -> None:
    lines = packages.pins().splitlines()
    names = {line.partition("==")[0] for line in lines}
    assert {"torch", "msgspec", "ray", "packaging", "click"} <= names
    assert "cloverinfer" not in names
    assert "pytest" not in names
    assert not any("+" in line for line in lines)


def test_a_wheel_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "BUILD_SECONDS", 0.01)
    with pytest.raises(ConfigError, match=r"not built within 0\.01 s: build it"):
        packages.wheel(None, tmp_path)


class HereRemote(Remote):
    """A host that is this one."""

    def __init__(self) -> None:
        pass

    def run(self, script: str, timeout: float = 120.0) -> str:
        done = subprocess.run(
            ["sh", "-s"], input=PRELUDE + script, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise HostError(explain(done.returncode, done.stderr))
        return done.stdout

    def put(self, data: bytes, path: str, timeout: float = 600.0) -> None:
        Path(path).write_bytes(data)


def test_two_pushes_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "host/venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/bin/sh
case "$*" in
  *"pip "*) for wheel; do :; done; cat "$wheel" >> installed;;
  *__version__*) echo 1.0;;
  *) exec {sys.executable} "$@";;
esac
""")
    python.chmod(0o755)
    (tmp_path / "c-1-py3-none-any.whl").write_text("new ")
    said = f"{GOOD}\nfolder: {tmp_path}/host\nwheel: {tmp_path}/c-1-py3-none-any.whl\n"
    fleet = Fleet(load(tmp_path, said), tmp_path / "logs", out=io.StringIO())
    monkeypatch.setattr(Fleet, "remote", lambda *_: HereRemote())
    fleet.inventory = msgspec.structs.replace(fleet.inventory, hosts=fleet.inventory.hosts[:1])
    setup.push(fleet, tmp_path / "work")
    incoming = tmp_path / "host/incoming"
    with (incoming / "lock").open() as elsewhere:
        fcntl.flock(elsewhere, fcntl.LOCK_EX)
        with pytest.raises(FleetError):
            setup.push(fleet, tmp_path / "work")
    assert "another deploy push to this host is under way" in fleet.out.getvalue()
    with (tmp_path / "work/push.lock").open() as here:
        fcntl.flock(here, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is under way: wait for its end"):
            setup.push(fleet, tmp_path / "work")
    setup.push(fleet, tmp_path / "work")
    assert (tmp_path / "host/installed").read_text() == "new new "
    assert [path.name for path in incoming.iterdir()] == ["lock"]


def test_a_dry_run_does_not_say_that_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tmp_path, GOOD)
    files = ["--inventory", str(tmp_path / "cluster.yaml")]
    assert main(["deploy", "run", "1", "1", "1", "--dry-run", *files]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "# a dry run: these are the commands, nothing was started"


def test_a_service_runs_once_is_found_and_ends_with_its_children(tmp_path: Path) -> None:
    def sh(script: str) -> str:
        text = f'set -eu\nfail() {{ echo "clover: $*" >&2; exit 3; }}\n{script}'
        done = subprocess.run(
            ["sh", "-s"], input=text, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    sleeper = ["sh", "-c", 'echo "$COLOUR"; sleep 1000 & sleep 1000']
    (tmp_path / "run").mkdir()
    (tmp_path / services.ENV_FILE).write_text("COLOUR='deep green'\n")
    try:
        assert "one started" in sh(services.start("one", sleeper))
        assert "one runs already" in sh(services.start("one", sleeper))
        wait_for(lambda: sh(services.running()).split() == ["3", "one"])
        assert (tmp_path / "log/one.log").read_text() == "deep green\n"
    finally:
        assert sh(services.stop(["two-*", "o*"])) == "one ended\n"
    assert sh(services.running()) == ""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_scripts_call_the_command(tmp_path: Path) -> None:
    command = tmp_path / "cloverinfer"
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    folder = Path(__file__).parents[2] / "scripts"
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    expected = {
        "install_all_nodes.sh": "deploy install 1 2",
        "smart_deploy.sh": "deploy push 1 2",
        "smart_run.sh": "deploy run 1 2",
        "smart_stop.sh": "deploy stop 1 2",
        "verify_gpudirect.sh": "verify --transport rdma 1 2",
    }
    for name, words in expected.items():
        done = subprocess.run(
            [str(folder / name), "1", "2"], env=environ, capture_output=True, text=True, timeout=30
        )
        assert done.stdout.strip() == words


def test_each_host_is_told_its_own_rdma_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = load(tmp_path, GOOD.replace("prefill, prefill]}", "prefill], nics: [a_0, a_1]}"))
    put: dict[str, str] = {}

    def keep(remote: Remote, data: bytes, path: str) -> None:
        if path.endswith(services.ENV_FILE):
            put[remote.host.name] = data.decode()

    monkeypatch.setattr(Remote, "put", keep)
    monkeypatch.setattr(Remote, "run", lambda remote, script: "")
    lifecycle.configure(Fleet(inventory, tmp_path, out=io.StringIO()), {"A": "b c"}, {}, "plan")
    assert "CLOVER_RDMA_DEVICES=a_0,a_1\n" in put["gate"]
    assert "CLOVER_RDMA_DEVICES" not in put["other"]
    assert all("A='b c'\n" in text for text in put.values())
