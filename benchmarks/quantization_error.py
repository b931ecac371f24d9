"""What weights in fewer bits cost in quality: the same text read by each, against float32.

Reads the first tokens of a text and compares the log-probability of every token with float32's:
the mean and the largest difference, and the perplexity.

    python benchmarks/quantization_error.py --text docs/architecture.md
"""

from __future__ import annotations

import math
from pathlib import Path

from _common import Row, describe_run, finish, model_parser
from cloverinfer import LLM, ModelConfig, SamplingParams

WEIGHTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}
"""fp8 is computed on the CPU too, where it rounds what a GPU rounds in calls of many rows."""


def read(model: ModelConfig, text: str, tokens: int, threads: int | None) -> list[float]:
    """Log-probability of every token but the first, by the model."""
    with LLM(model, topology="colocated", executor="local", threads=threads) as llm:
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.encode(text)[:tokens]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (answer,) = llm.generate([prompt], params)
    assert answer.prompt_logprobs is not None
    return [one.logprob for one in answer.prompt_logprobs if one is not None]


def main() -> None:
    made = model_parser(__doc__ or "")
    made.add_argument("--text", type=Path, default=Path("docs/architecture.md"))
    made.add_argument("--tokens", type=int, default=512)
    args = made.parse_args()
    print(describe_run(args.threads))
    text = args.text.read_text(encoding="utf-8")
    rows, reference = [], []
    for name, fields in WEIGHTS.items():
        model = ModelConfig(model_path=args.model, **fields)
        scores = read(model, text, args.tokens, args.threads)
        reference = reference or scores
        off = [abs(mine - exact) for mine, exact in zip(scores, reference, strict=True)]
        params = {"weights": name, "tokens": len(scores)}
        rows.append(Row("mean difference of log-probabilities", sum(off) / len(off), "", params))
        rows.append(Row("largest difference", max(off), "", params))
        rows.append(Row("perplexity", math.exp(-sum(scores) / len(scores)), "", params))
    finish(rows, args.json)


if __name__ == "__main__":
    main()
