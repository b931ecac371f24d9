"""``docs/orchestrate.md`` knows every setting, policy, stage, endpoint and metric."""

from __future__ import annotations

import re
from pathlib import Path

from cloverinfer.config import OrchestratorConfig
from cloverinfer.config.orchestrator import POLICIES, ROLES
from cloverinfer.core.clock import monotonic
from cloverinfer.gateway.announcements import PATH
from cloverinfer.gateway.app import _routes
from cloverinfer.gateway.asked import CHAT, COMPLETIONS
from cloverinfer.gateway.instances import Registry
from cloverinfer.gateway.metrics import OUTCOMES, PREFIX, OrchestratorMetrics
from cloverinfer.gateway.router import Router
from cloverinfer.gateway.stages import Stages
from cloverinfer.gateway.status import Status
from cloverinfer.server.door import Door

TEXT = (Path(__file__).parents[2] / "docs" / "orchestrate.md").read_text(encoding="utf-8")
TOLD = set(re.findall(r"[\w/{}.-]+", " ".join(re.findall(r"`([^`\n]+)`", TEXT))))


def test_every_setting_policy_and_stage_is_told() -> None:
    stages = Stages(lambda: 0.0, 0.0).told()
    known = {*OrchestratorConfig.__struct_fields__, *POLICIES, *ROLES, *OUTCOMES, *stages}
    assert known - TOLD == set()


def test_every_endpoint_and_metric_is_told() -> None:
    settings = OrchestratorConfig()
    registry = Registry(monotonic, settings)
    metrics = OrchestratorMetrics(registry)
    status = Status(registry, Router(registry, settings.policy), Door(1.0), settings.policy)
    routes = _routes(status, metrics).routes
    own = {getattr(route, "path", "").replace(":path", "") for route in routes}
    assert {"/v1/cluster", "/ready"} <= own
    assert {*own, COMPLETIONS, CHAT, PATH} - TOLD == set()
    page = metrics.page().body.decode()
    names = set(re.findall(rf"^# TYPE {PREFIX}(\w+)", page, re.MULTILINE))
    assert {"requests_total", "stage_seconds", "instance_up"} <= names
    assert {name for name in names if not name.endswith("_created")} - TOLD == set()
