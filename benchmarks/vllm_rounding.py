"""Whether a prompt that another vLLM server computed is answered otherwise, and what else does so.

Each prompt is answered greedily by one server that computes it at once; by the same server with the
prompt cached, so that it computes the last token only; by one that computes it in chunks; and by a
pair, where decode has the first server's blocks and computes the last token. The rows say how many
answers are the same, token for token, and by how much the first token's log-probability differs at
most. Needs ``make test-vllm``'s environment.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Row, describe_run, finish, parser
from _vllm import (
    PYTHON,
    Clover,
    HandOver,
    Server,
    body_of,
    free_port,
    model_folder,
    running,
    tokens_of,
)
from cloverinfer.config.cluster import ModelConfig
from cloverinfer.models import resolve_model

CHUNK = 384
COMPARED = [
    ("last token alone", "at once"),
    (f"chunks of {CHUNK}", "at once"),
    ("pair", "at once"),
    ("pair", "last token alone"),
]


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    logprob: float
    """Of the first token."""


def said(answer: dict[str, Any]) -> Said:
    return Said(tokens_of(answer), float(answer["choices"][0]["logprobs"]["token_logprobs"][0]))


def ways(pair: Clover, prompt: list[int], tokens: int) -> dict[str, Said]:
    """What each way answers; prefill computes at once, decode in chunks."""
    more = {"logprobs": 0}

    def alone(server: Server) -> Said:
        return said(server.ask(body_of(prompt, tokens) | more).json())

    found = {"at once": alone(pair.prefill), "last token alone": alone(pair.prefill)}
    answer = HandOver(pair.prefill, pair.decode, prompt, tokens, more=more).answer()
    assert answer["kv_transfer_params"]["computed_prompt_tokens"] == 1
    found["pair"] = said(answer)
    pair.forget()
    found[f"chunks of {CHUNK}"] = alone(pair.decode)
    pair.forget()
    return found


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--tokens", type=int, default=1025, help="of each prompt")
    made.add_argument("--answer-tokens", type=int, default=64)
    made.add_argument("--prompts", type=int, default=8)
    args = made.parse_args()
    if not PYTHON.exists():
        print("vLLM is not installed (make test-vllm installs it): nothing to measure")
        return
    if args.quick:
        args.prompts, args.answer_tokens = 2, 16
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with this
    print(describe_run(1))
    draw = random.Random(0)
    prompts = [
        [draw.randrange(1000, 30000) for _ in range(args.tokens)] for _ in range(args.prompts)
    ]
    with tempfile.TemporaryDirectory() as here:
        folder = model_folder(resolve_model(ModelConfig(dtype="float32")).path, Path(here) / "m")
        pair = Clover(folder, free_port(4), "auto")
        pair.prefill.dtype = pair.decode.dtype = args.dtype
        pair.decode.options = ["--max-num-batched-tokens", str(CHUNK)]
        with running(pair.prefill, pair.decode):
            found = [ways(pair, prompt, args.answer_tokens) for prompt in prompts]
    params = {"dtype": args.dtype, "tokens": args.tokens}
    finish(
        [row for one, other in COMPARED for row in rows_of(found, one, other, params)], args.json
    )


def rows_of(
    found: list[dict[str, Said]], one: str, other: str, params: dict[str, Any]
) -> list[Row]:
    pairs = [(each[one], each[other]) for each in found]
    params = {"answered": one, "compared with": other} | params
    same = sum(a.tokens == b.tokens for a, b in pairs)
    apart = max(abs(a.logprob - b.logprob) for a, b in pairs)
    return [
        Row("same answers", same, f"of {len(pairs)}", params),
        Row("log-probability apart", apart, "at most", params),
    ]


if __name__ == "__main__":
    main()
