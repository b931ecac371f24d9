"""Builds ``tokenizer.json`` from the tokenizer that a GGUF file describes.

Byte-level BPE of the known pre-tokenizers is built here; any other kind is left to transformers,
where that is installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ..core.errors import ModelError
from .gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of a GGUF vocabulary: control tokens are special, user-defined ones only whole."""
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}| ", r"|\p{N}{1,3}| ")
SPLITS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
}
"""How text is cut before merging, by ``tokenizer.ggml.pre``; None: as GPT-2 does."""


def save_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` of ``file`` into ``folder``.

    ``ModelError`` says what to install for a kind that is not known here.
    """
    kind = file.value("tokenizer.ggml.model")
    pre = file.value("tokenizer.ggml.pre", "default")
    if kind is None:
        raise ModelError(f"{file.where}: the file holds no tokenizer; give prompts as token ids")
    if kind == "gpt2" and pre in SPLITS:
        _save_byte_level(file, pre, folder)
    else:
        _save_with_transformers(file, f"{kind}/{pre}", folder)


def _save_byte_level(file: GGUFFile, pre: str, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    from .convert import write_json

    tokens = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = _splitter(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    _add_special(tokenizer, tokens, file.value("tokenizer.ggml.token_type", []))
    special = _special_tokens(file, tokens)
    _add_template(tokenizer, file, special, vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(file, special))


def _splitter(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = SPLITS[pre]
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_special(tokenizer: Any, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    def of_type(wanted: int, special: bool) -> list[AddedToken]:
        chosen = [t for t, kind in zip(tokens, types, strict=False) if kind == wanted]
        return [AddedToken(t, normalized=False, special=special) for t in chosen]

    tokenizer.add_special_tokens(of_type(_CONTROL, True))
    tokenizer.add_tokens(of_type(_USER_DEFINED, False))


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {}
    for name, there in names.items():
        number = file.value(f"tokenizer.ggml.{there}_token_id")
        if number is not None and 0 <= number < len(tokens):
            found[f"{name}_token"] = tokens[number]
    return found


def _add_template(
    tokenizer: Any, file: GGUFFile, special: dict[str, str], vocab: dict[str, int]
) -> None:
    """Puts begin and end tokens around a text where the file asks for them."""
    from tokenizers import processors

    # Llama 3's files say nothing and its tokenizer begins every text; the other kinds do not.
    begins = file.value("tokenizer.ggml.pre") == "llama-bpe"
    first = file.value("tokenizer.ggml.add_bos_token", begins) and special.get("bos_token")
    last = file.value("tokenizer.ggml.add_eos_token", False) and special.get("eos_token")
    if not first and not last:
        return
    used = [token for token in (first, last) if token]
    template = [*([first] if first else []), "$A", *([last] if last else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, vocab[token]) for token in dict.fromkeys(used)]
    )


def _tokenizer_config(file: GGUFFile, special: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    template = file.value("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _save_with_transformers(file: GGUFFile, kind: str, folder: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{file.where}: building a tokenizer of kind {kind} needs transformers: "
            "pip install transformers, or give prompts as token ids"
        )
    from transformers import AutoTokenizer

    path = Path(file.where)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ModelError(f"{path}: transformers cannot build its tokenizer ({error})") from error
    tokenizer.save_pretrained(str(folder))
