"""Settings from files, environment and flags: who wins, and what errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloverinfer.config import Config, load_config
from cloverinfer.core.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_records_defaults() -> None:
    assert load_config(environ={}) == Config()


def test_sections_land_where_they_belong(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        model: {model_path: a, max_model_len: 64}
        cluster: {executor: local, num_attention_nodes: 2}
        cache: {block_size: 16, memory_gib: 2}
        scheduler: {num_wavefronts: 2}
        server: {port: 0, served_model_name: m}
        """,
    )
    config = load_config(path, environ={})
    assert (config.model.model_path, config.model.max_model_len) == ("a", 64)
    assert (config.cluster.executor, config.cluster.num_attention_nodes) == ("local", 2)
    assert (config.cluster.cache.block_size, config.cluster.cache.memory_gib) == (16, 2)
    assert config.cluster.scheduler.num_wavefronts == 2
    assert (config.server.port, config.server.served_model_name) == (0, ("m",))


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "cache: {block_size: 16, num_blocks: 5, memory_gib: 3.0}")
    config = load_config(
        path,
        {"cache": {"block_size": 64}},
        environ={"CLOVER_CACHE_BLOCK_SIZE": "128", "CLOVER_CACHE_NUM_BLOCKS": "7"},
        defaults={"cache": {"memory_gib": 9.0, "enable_prefix_caching": False}},
    )
    cache = config.cluster.cache
    assert cache.block_size == 64
    assert cache.num_blocks == 7
    assert cache.memory_gib == 3.0
    assert cache.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("CLOVER_CACHE_ENABLE_PREFIX_CACHING", "off", False),
        ("CLOVER_CACHE_ENABLE_PREFIX_CACHING", "1", True),
        ("CLOVER_CACHE_MEMORY_GIB", "0.5", 0.5),
        ("CLOVER_CACHE_NUM_BLOCKS", "none", None),
        ("CLOVER_CACHE_NUM_BLOCKS", "12", 12),
    ],
)
def test_environment_text_becomes_the_fields_type(variable: str, text: str, value: object) -> None:
    cache = load_config(environ={variable: text}).cluster.cache
    field = variable.removeprefix("CLOVER_CACHE_").lower()
    assert getattr(cache, field) == value


def test_variables_of_other_programs_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    others = {
        "CLOVER": "y", "CLOVER_CACHE": "/c", "CLOVER_LOG_LEVEL": "info",
        "CLOVER_RDMA_DEVICES": "mlx5_0", "CLOVER_PORT": "tcp://10.0.0.1:8000",
        "CLOVER_SERVICE_HOST": "10.0.0.1", "CLOVER_SERVE_SVC_SERVICE_PORT_HTTP": "8000",
        "CLOVER_SERVER_PORT": "tcp://10.0.0.1:80", "CLOVER_SERVER_PORT_80_TCP_PROTO": "tcp",
    }  # fmt: skip
    assert load_config(environ=others) == Config()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("CLOVER_TOPOLOGY", "did you mean CLOVER_CLUSTER_TOPOLOGY?"),
        ("CLOVER_PORT", "did you mean CLOVER_NETWORK_PORT or CLOVER_SERVER_PORT?"),
        ("CLOVER_MAX_NUM_SEQ", "did you mean CLOVER_SCHEDULER_MAX_NUM_SEQS?"),
        ("CLOVER_TOKEN", "is no setting of CloverInfer and changes nothing"),
    ],
)
def test_a_variable_without_its_section_is_told(
    variable: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_config(environ={variable: "1"}) == Config()
    (message,) = caplog.messages
    assert message.startswith(variable)
    assert told in message


def test_a_variable_that_names_a_section_alone_is_told_of_its_settings() -> None:
    message = r"CLOVER_MODEL names a section.*CLOVER_MODEL_MODEL_PATH"
    with pytest.raises(ConfigError, match=message):
        load_config(environ={"CLOVER_MODEL": "smollm2-135m"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "cluster: {num_prefil_workers: 1}",
            [
                "unknown key 'num_prefil_workers'",
                "section cluster",
                "did you mean num_prefill_workers?",
            ],
        ),
        ("clutser: {topology: pd}", ["unknown section 'clutser'", "did you mean cluster?"]),
        ("cluster: {cache: {block_size: 8}}", ["cache is a section of its own"]),
        ("cache: {block_size: big}", ["cache.block_size must be an integer, not 'big'"]),
        ("server: {port: yes}", ["server.port must be an integer, not True"]),
        ("model: {max_model_len: 1.5}", ["model.max_model_len must be an integer or none"]),
        ("cache: {memory_gib: .inf}", ["cache.memory_gib must be a number or none, not inf"]),
        ("cache: {block_size: 24}", ["cache.block_size must be a power of two", "not 24"]),
        ("cluster: {topology: star}", ["cluster.topology must be one of colocated, pd, pda"]),
        ("cluster: {topology: pd, topology: pda}", ["'topology' stands twice"]),
        ("a: [", ["not valid YAML"]),
        ("just words", ["must hold sections"]),
        ("port: 1", ["port is no section but a key of network or of server: put it there"]),
        ("cluster: 3", ["section cluster must hold keys, not 3"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    for part in [str(path), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "part"),
    [
        ("CLOVER_CLUSTER_TOPLOGY", "pd", "did you mean topology?"),
        ("CLOVER_CLUSTRE_TOPOLOGY", "pd", "did you mean cluster?"),
        ("CLOVER_SERVER_PORT", "http", "must be an integer, not 'http'"),
        ("CLOVER_CACHE_ENABLE_PREFIX_CACHING", "2", "must be true or false, not '2'"),
        ("CLOVER_CACHE_MEMORY_GIB", "nan", "must be a number or none, not nan"),
        ("CLOVER_SERVER_PORT", "70000", "must be an integer from 0 to 65535, not 70000"),
    ],
)
def test_a_bad_variable_is_refused_by_name(variable: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={variable: text})
    assert variable in str(caught.value)
    assert part in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml", environ={})


@pytest.mark.parametrize(
    ("topology", "field", "role"),
    [
        ("colocated", "num_prefill_workers", "prefill"),
        ("colocated", "num_decode_dense_nodes", "dense"),
        ("colocated", "num_attention_nodes", "attention"),
        ("pd", "num_attention_nodes", "attention"),
    ],
)
def test_a_count_without_its_nodes_is_refused(topology: str, field: str, role: str) -> None:
    flags = {"cluster": {"topology": topology, field: 1}}
    with pytest.raises(ConfigError, match=f"{field}: topology '{topology}' has no {role} nodes"):
        load_config(overrides=flags, environ={})
    flags = {"cluster": {"topology": topology}}
    assert load_config(overrides=flags, environ={}).cluster.topology == topology
    variables = {f"CLOVER_CLUSTER_{field.upper()}": "2", "CLOVER_CLUSTER_TOPOLOGY": topology}
    with pytest.raises(ConfigError, match=f"CLOVER_CLUSTER_{field.upper()}: "):
        load_config(environ=variables)


def test_a_topology_set_over_counts_leaves_out_those_that_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "cluster: {topology: pda, num_prefill_workers: 3, num_attention_nodes: 2}"
    path = write(tmp_path, text)
    config = load_config(path, {"cluster": {"topology": "pd"}}, environ={})
    cluster = config.cluster
    assert (cluster.topology, cluster.num_prefill_workers, cluster.num_attention_nodes) == (
        "pd",
        3,
        1,
    )
    (message,) = caplog.messages
    assert message.startswith(f"{path}: cluster.num_attention_nodes changes nothing")
    path = write(tmp_path, f"{text}\nmodels: [{{name: a, cluster: {{topology: pd}}}}]")
    (one,) = load_config(path, environ={}).models
    assert (one.cluster.topology, one.cluster.num_attention_nodes) == ("pd", 1)


def test_counts_that_the_topology_has_are_taken() -> None:
    counts = {"num_prefill_workers": 2, "num_decode_dense_nodes": 3}
    config = load_config(overrides={"cluster": {"topology": "pd", **counts}}, environ={})
    assert config.cluster.num_decode_dense_nodes == 3
