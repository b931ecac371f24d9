"""How far an engine's log-probabilities are from float32's, along given tokens: by teacher forcing.

The reference reads the engine's own tokens, so each position is compared after the same past.
transformers in the engine's type, over the same tokens, tells what rounding alone costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.logprobs import TokenLogprobs

TOP = 20
"""Log-probabilities of a position that are compared: the engine's likeliest."""
MEAN, LARGEST = 1.25, 2.0
"""The tolerance: times the error of transformers in bfloat16, of the mean and of the largest."""


@dataclass(frozen=True)
class Errors:
    """Absolute differences from float32, at every compared place."""

    ours: torch.Tensor
    theirs: torch.Tensor
    behind: torch.Tensor
    """By how much less likely than the likeliest float32 holds each chosen token."""

    def check(self) -> None:
        told = (
            f"mean {self.ours.mean():.4f} (transformers {self.theirs.mean():.4f}), largest "
            f"{self.ours.max():.3f} (transformers {self.theirs.max():.3f}), chosen tokens behind "
            f"by {self.behind.max():.3f}"
        )
        print(told)
        assert self.ours.isfinite().all()
        assert self.ours.mean() <= MEAN * self.theirs.mean(), told
        assert self.ours.max() <= LARGEST * self.theirs.max(), told
        # A token that float32 would not have chosen was one of two that are as good.
        assert self.behind.max() <= 2 * self.ours.max(), told


class Reference:
    """transformers, in float32 and in the type that is judged."""

    def __init__(self, folder: str, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=one).eval().to(device)
            for one in (torch.float32, dtype)
        ]

    @torch.inference_mode()
    def scores(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities ``[t, vocab]`` after each token, float32's and the other's."""
        ids = torch.tensor([list(tokens)], device=self._models[0].device)
        exact, rounded = (model(ids).logits[0].float().log_softmax(-1) for model in self._models)
        return exact.cpu(), rounded.cpu()


def errors_of_reading(
    folder: str, prompts: Sequence[list[int]], device: str, **fields: Any
) -> Errors:
    """Of what is said of each token of the prompts."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=TOP)
    with _engine(folder, device, fields) as llm:
        answers = llm.generate(prompts, params)
    said = [answer.prompt_logprobs[1:] for answer in answers]
    return _errors(Reference(folder, device), prompts, [0] * len(prompts), said)


def errors_of_writing(
    folder: str, prompts: Sequence[list[int]], tokens: int, device: str, **fields: Any
) -> Errors:
    """Of what is said of each token of answers to the prompts, one decode step each."""
    greedy = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    with _engine(folder, device, fields) as llm:
        answers = llm.generate(prompts, SamplingParams(**greedy, logprobs=TOP))
        bare = llm.generate(prompts, SamplingParams(**greedy))  # chosen where the logits are
    texts = [p + a.token_ids for p, a in zip(prompts, answers, strict=True)]
    reference = Reference(folder, device)
    starts = [len(prompt) - 1 for prompt in prompts]
    found = _errors(reference, texts, starts, [answer.logprobs for answer in answers])
    behind = [
        _behind(reference, prompt, answer.token_ids)
        for prompt, answer in zip(prompts, bare, strict=True)
    ]
    return Errors(found.ours, found.theirs, torch.cat([found.behind, *behind]))


def _engine(folder: str, device: str, fields: dict[str, Any]) -> LLM:
    own = {key: value for key, value in fields.items() if key in ModelConfig.__struct_fields__}
    model = ModelConfig(model_path=folder, dtype="bfloat16", **own)
    common = {"topology": "colocated", "executor": "local", "device": device}
    return LLM(model, **{k: v for k, v in (common | fields).items() if k not in own})


def _errors(
    reference: Reference,
    texts: Sequence[list[int]],
    starts: Sequence[int],
    said: Sequence[Sequence[TokenLogprobs]],
) -> Errors:
    """``said[i]``: of the tokens of a text after its position ``starts[i]``, one after another."""
    ours, theirs = [], []
    for text, start, scores in zip(texts, starts, said, strict=True):
        assert len(scores) == len(text) - 1 - start
        exact, rounded = (each[start:-1] for each in reference.scores(text))
        ids = torch.tensor([one.top_ids for one in scores])
        mine = torch.tensor([one.top_logprobs for one in scores])
        exact, rounded = exact.gather(1, ids), rounded.gather(1, ids)
        ours.append((mine - exact).abs().flatten())
        theirs.append((rounded - exact).abs().flatten())
    return Errors(torch.cat(ours), torch.cat(theirs), torch.zeros(1))


def _behind(reference: Reference, prompt: list[int], tokens: Sequence[int]) -> torch.Tensor:
    scores = reference.scores([*prompt, *tokens])[0][len(prompt) - 1 : -1]
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return scores.max(-1).values - chosen
