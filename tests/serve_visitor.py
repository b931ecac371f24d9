"""What ``test_ray_serve`` runs where Ray Serve is installed.

``check`` reads a Serve configuration as JSON and builds its applications, and starts nothing.
``run`` deploys it the way KubeRay has it deployed, on a Ray of its own in ``folder`` that has room
for a node of each role, and ends when its standard input does.
"""

from __future__ import annotations

import json
import pkgutil
import sys

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

ROOM = {"clover_prefill": 1, "clover_dense": 1, "clover_attention": 1}


def check(config: ServeDeploySchema) -> None:
    for one in config.applications:
        application = pkgutil.resolve_name(one.import_path)(one.args)
        deployment = application._bound_deployment
        assert [deployment.name] == [other.name for other in one.deployments]
        print(deployment.name, deployment.num_replicas, flush=True)


def run(config: ServeDeploySchema, folder: str) -> None:
    ray.init(
        address="local",
        num_cpus=1,
        resources=ROOM,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        options = config.http_options
        serve.start(http_options={"host": options.host, "port": options.port})
        _get_global_client().deploy_apps(config, _blocking=True)
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        print("closed", flush=True)
        ray.shutdown()


if __name__ == "__main__":
    given = ServeDeploySchema(**json.loads(sys.argv[2]))
    check(given) if sys.argv[1] == "check" else run(given, *sys.argv[3:])
