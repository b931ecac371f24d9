"""What ``test_ray_hosts`` runs on a host: an engine over the Ray cluster at RAY_ADDRESS.

Takes a model's folder, node counts and prompts as JSON, prints tokens and addresses as JSON.
"""

from __future__ import annotations

import json
import sys

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.errors import CloverError


def main(model: str, counts: str, prompts: str) -> None:
    fields = {"topology": "pda", "executor": "ray", "transport": "tcp"} | json.loads(counts)
    try:
        with LLM(ModelConfig(model_path=model, dtype="float32"), **fields) as llm:
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            tokens = [out.token_ids for out in llm.generate(json.loads(prompts), params)]
            addresses = {node["name"]: node["address"] for node in llm.engine.nodes()}
            print(json.dumps({"tokens": tokens, "addresses": addresses}))
    except CloverError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
