"""From a ``ModelConfig`` to a model that can be loaded, and from that to its parts.

Resolving finds the files, settles type and length, and prepares the cache; it reads no weights,
so it is cheap enough for every node to do.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _native
from ..attention import gpus
from ..config import ModelConfig
from ..core.errors import ConfigError, ModelError
from .arch import arch_from_config
from .base import DenseHalf, ModelArch
from .cache import Progress, is_whole, silent
from .compiled import CompiledHalf, Manifest, check_dtype, is_compiled, read_manifest
from .convert import CONFIG, GENERATION, dtype_file, ensure_dtype, folder_for_gguf
from .fp8 import check_fp8
from .hub import KNOWN_MODELS, known_folder, known_gguf, unknown_model
from .native import native_serves
from .registry import create_half
from .tokenizer import Tokenizer
from .weights import (
    CPU,
    SAFETENSORS,
    Checkpoint,
    DummySource,
    SafetensorsSource,
    WeightSource,
    open_weights,
    weight_files,
)

log = logging.getLogger(__name__)
_CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
MAX_PATH = 4000
"""Characters; the system refuses longer paths with an error of its own."""
_SAMPLE = 1 << 16
"""Bytes at the start, middle and end of a weight file that its identity is taken from."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model whose files are here and whose settings are settled."""

    name: str
    """As the user gave it."""
    path: Path
    """Folder with ``config.json``."""
    arch: ModelArch
    dtype: str
    """float32, bfloat16 or float16."""
    quantization: str | None
    """int8, gguf or None."""
    load_format: str
    """safetensors, pt, converted (a folder made from a GGUF file), dummy, or compiled (a folder
    that the compiler made)."""
    fingerprint: str
    """The same for the same shape and weights, on any host."""
    max_model_len: int
    """Longest prompt plus output in tokens."""
    eos_token_ids: tuple[int, ...]
    lowering: str = "eager"
    """How the graphs of a compiled model run."""


def resolve_model(
    config: ModelConfig, progress: Progress | None = None, device: str = "cpu"
) -> ResolvedModel:
    """Finds, fetches and converts what ``config`` names; ``progress`` hears of what takes long.
    ``device``: where it will compute, cpu or cuda, which decides what type auto is.

    ``ModelError`` for what is unknown, missing, damaged or not supported; ``ConfigError`` for a
    length that the model does not have.
    """
    progress = progress or silent
    folder, load_format = _locate(config, progress)
    if is_compiled(folder):
        return _resolve_compiled(config, folder)
    arch = _native_arch(config, folder)
    dtype = _dtype(config, arch, device)
    if arch is None:
        return _resolve_compiled(config, _compile(config, folder, load_format, dtype, progress))
    if config.lowering != "eager":
        progress(f"note: model.lowering {config.lowering} changes nothing: no graphs are run")
    if load_format == "converted" and config.quantization != "gguf":
        ensure_dtype(folder, getattr(torch, dtype), progress)
    return ResolvedModel(
        name=config.model_path,
        path=folder,
        arch=arch,
        dtype=dtype,
        quantization=config.quantization,
        load_format=load_format,
        fingerprint=_fingerprint(_described(arch, config), folder, load_format, config.seed),
        max_model_len=_limit(config, arch),
        eos_token_ids=arch.eos_token_ids,
        lowering=config.lowering,
    )


def _native_arch(config: ModelConfig, folder: Path) -> ModelArch | None:
    """The model as a dense half of ours serves it; None where the compiler is to make one."""
    if config.model_impl == "compiled":
        return None
    described = _read_config(folder)
    try:
        return arch_from_config(*described)
    except ModelError:
        if config.model_impl == "native" or not _can_compile():
            raise
        return None


def _limit(config: ModelConfig, arch: ModelArch) -> int:
    limit = config.max_model_len or arch.max_position
    if limit > arch.max_position:
        raise ConfigError(
            f"model.max_model_len is {limit}, but {config.model_path} goes to {arch.max_position} "
            "tokens: lower it, or leave it out"
        )
    return limit


def _can_compile() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _compile(
    config: ModelConfig, folder: Path, load_format: str, dtype: str, progress: Progress
) -> Path:
    """The artifact, made by the compiler, which is a room above this one: imported by name."""
    ensure = importlib.import_module("cloverinfer.compiler.ensure")
    source = _source_fields(config, folder, load_format, dtype)
    made: Path = ensure.ensure_compiled(ensure.Source(**source), progress)
    return made


def source_of(config: ModelConfig, progress: Progress) -> dict[str, Any]:
    """What the compiler must know of the model that ``config`` names: its ``Source``'s fields."""
    folder, load_format = _locate(config, progress)
    if is_compiled(folder):
        raise ModelError(f"{folder} is compiled already: give the folder of the model itself")
    device = "cuda" if gpus()[0] else "cpu"
    dtype = _native_dtype(device) if config.dtype == "auto" else config.dtype
    return _source_fields(config, folder, load_format, dtype)


def _source_fields(
    config: ModelConfig, folder: Path, load_format: str, dtype: str
) -> dict[str, Any]:
    described, generation = _read_config(folder)
    return {
        "name": config.model_path,
        "folder": folder,
        "fingerprint": _fingerprint(described, folder, load_format, config.seed),
        "load_format": load_format,
        "dtype": dtype,
        "seed": config.seed if load_format == "dummy" else None,
        "generation": generation,
    }


def _resolve_compiled(config: ModelConfig, folder: Path) -> ResolvedModel:
    manifest = read_manifest(folder)
    if config.quantization:
        raise _not_quantized(config)
    if config.model_impl == "native":
        raise ConfigError(
            f"model.model_impl is native, but {folder} holds a compiled model: give the folder of "
            f"the model itself, or model_impl compiled"
        )
    check_dtype(folder, manifest, config.dtype)
    _refuse_stale(folder, manifest)
    arch = manifest.model_arch()
    return ResolvedModel(
        name=config.model_path,
        path=folder,
        arch=arch,
        dtype=manifest.dtype,
        quantization=None,
        load_format="compiled",
        fingerprint=manifest.identity(),
        max_model_len=_limit(config, arch),
        eos_token_ids=arch.eos_token_ids,
        lowering=config.lowering,
    )


def _refuse_stale(folder: Path, manifest: Manifest) -> None:
    """Where the model it was made from is at hand, it must still be that model."""
    source = Path(manifest.source)
    if not (source / CONFIG).is_file() or manifest.seed is not None:
        return
    now = _fingerprint(_read_config(source)[0], source, manifest.source_format, 0)
    if now != manifest.source_fingerprint:
        raise ModelError(f"{folder}: stale: {source} has changed since: compile the model again")


def load_half(
    model: ResolvedModel,
    seed: int = 0,
    device: torch.device = CPU,
    batch_invariant: bool = False,
) -> DenseHalf:
    """The dense half with its weights on ``device``; ``seed`` is that of random ones.

    ``batch_invariant``: a token's result does not depend on what else is computed with it, for
    bfloat16 on GPUs of compute capability 9.0.
    """
    if model.load_format == "compiled":
        if batch_invariant:
            log.warning("cluster.batch_invariant changes nothing for a compiled model's products")
        with torch.inference_mode():
            return CompiledHalf(model.path, model.lowering, device)
    checkpoint = _checkpoint(model, seed, device)
    checkpoint.batch_invariant = batch_invariant
    with torch.inference_mode():
        return create_half(model.arch, checkpoint, model.max_model_len)


def _dtype(config: ModelConfig, arch: ModelArch | None, device: str) -> str:
    """``ConfigError`` where it does not go with the quantisation; ``arch`` None: a compiled one."""
    if config.quantization is None:
        return _auto_dtype(arch, device) if config.dtype == "auto" else config.dtype
    if config.dtype not in ("auto", "bfloat16"):
        raise ConfigError(
            f"model.quantization {config.quantization} needs model.dtype bfloat16, "
            f"not {config.dtype}: leave either out"
        )
    if not _is_packed(arch):
        raise _not_quantized(config)
    return "bfloat16"


def _is_packed(arch: ModelArch | None) -> bool:
    """Whether a CPU's native stages can serve it: a model of Llama's family, not compiled."""
    return arch is not None and arch.family != "opt"


def _auto_dtype(arch: ModelArch | None, device: str) -> str:
    """As ``_native_dtype``, and bfloat16 through the native stages where they have AVX2 alone: half
    the bytes of float32 to read, which PyTorch multiplies no faster there."""
    if device == "cpu" and _is_packed(arch) and _native.dense_isas()[-1] == "avx2":
        return "bfloat16"
    return _native_dtype(device)


def _not_quantized(config: ModelConfig) -> ConfigError:
    return ConfigError(
        f"model.quantization {config.quantization} serves models of Llama's family that are not "
        f"compiled, which {config.model_path} is not: leave it out"
    )


def _checkpoint(model: ResolvedModel, seed: int, device: torch.device) -> Checkpoint:
    dtype = getattr(torch, model.dtype)
    if model.quantization == "fp8":
        check_fp8(dtype, device)
        return Checkpoint(_source(model, seed, device), dtype, device=device, fp8=True)
    if model.quantization and not native_serves(dtype, device):
        raise ModelError(f"model.quantization {model.quantization} needs a CPU with AVX2")
    if model.quantization != "gguf":
        int8 = model.quantization == "int8"
        return Checkpoint(_source(model, seed, device), dtype, int8, device)
    from .gguf_codes import GGUFCheckpoint
    from .gguf_file import GGUFFile

    path = Path(model.name).expanduser()
    path = path if path.is_file() else known_gguf(model.name)
    return GGUFCheckpoint(GGUFFile(path), dtype)


def load_tokenizer(model: ResolvedModel) -> Tokenizer:
    """The model's tokenizer; ``ModelError`` where it has none (prompts can be token ids)."""
    return Tokenizer.from_folder(model.path)


def _locate(config: ModelConfig, progress: Progress) -> tuple[Path, str]:
    """The folder and how its weights are stored."""
    path, wanted = Path(config.model_path).expanduser(), config.load_format
    if config.quantization == "gguf" and (path.is_dir() or wanted == "dummy"):
        raise ModelError(f"{path}: quantization 'gguf' needs a GGUF file's weights")
    if len(config.model_path) > MAX_PATH or "\0" in config.model_path:
        raise unknown_model(config.model_path[:80])
    if path.is_dir():
        if wanted == "gguf":
            raise ModelError(f"{path}: load_format 'gguf' needs the path of a GGUF file")
        return path, wanted if wanted == "dummy" else _stored_format(path, wanted)
    if path.is_file() or config.model_path in KNOWN_MODELS:
        if path.is_file() and path.suffix.lower() != ".gguf":
            raise ModelError(f"{path}: neither a folder nor a GGUF file (*.gguf)")
        if wanted in ("safetensors", "pt"):
            raise ModelError(
                f"{config.model_path}: a GGUF file has no weights of format {wanted!r}"
            )
        known = not path.is_file()
        folder = (
            known_folder(config.model_path, progress) if known else folder_for_gguf(path, progress)
        )
        return folder, "dummy" if wanted == "dummy" else "converted"
    raise unknown_model(config.model_path)


def _stored_format(folder: Path, wanted: str) -> str:
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: there is no {CONFIG}; give the folder of a Hugging Face model")
    if wanted != "auto":
        return wanted
    files = weight_files(folder, wanted)
    if files and files[0].name.startswith(SAFETENSORS):
        return "safetensors"
    if not files:
        open_weights(folder, wanted)  # says what was looked for
    return "pt"


def _source(model: ResolvedModel, seed: int, device: torch.device) -> WeightSource:
    if model.load_format == "dummy":
        return DummySource(seed, device)
    if model.load_format == "converted":
        name = dtype_file(model.path, getattr(torch, model.dtype))
        if not is_whole(model.path, [name]):
            raise ModelError(f"{model.path / name} has changed since it was made: delete it")
        return SafetensorsSource.of_file(model.path / name)
    return open_weights(model.path, model.load_format)


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """``config.json``, and ``generation_config.json`` where there is one."""
    generation = _read_json(folder / GENERATION) if (folder / GENERATION).is_file() else None
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: there is no {CONFIG}; give the folder of a Hugging Face model")
    return _read_json(folder / CONFIG), generation


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


@functools.lru_cache
def _native_dtype(device: str) -> str:
    """bfloat16 on GPUs and where the processor multiplies it natively, else float32."""
    if device != "cpu":
        return "bfloat16"  # every GPU that is served multiplies it
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has products of it, rather than widening its numbers first."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return bool(_CPU_BF16_FLAGS & set(flags.split()))


def _described(arch: ModelArch, config: ModelConfig) -> dict[str, Any]:
    """Quantised otherwise is another model: its keys and values differ."""
    described = asdict(arch)
    return described | {"quantization": config.quantization} if config.quantization else described


def _fingerprint(described: dict[str, Any], folder: Path, load_format: str, seed: int) -> str:
    """A hash of what describes the shape, and the weights' sizes and samples of their bytes."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    if load_format == "dummy":
        digest.update(f"dummy:{seed}".encode())
        return digest.hexdigest()
    stored = "safetensors" if load_format == "converted" else load_format
    for path in weight_files(folder, stored):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - _SAMPLE)):
                file.seek(at)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
