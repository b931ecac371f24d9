"""vLLM's own class of connectors as its versions declare it: names and parameters, read from the
sources of 0.23.0, 0.32.0 and 0.33.0, and as strict about calls.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

VERSIONS = ("0.23.0", "0.32.0", "0.33.0")
ALWAYS = {
    "register_kv_caches": "kv_caches",
    "set_host_xfer_buffer_ops": "copy_operation",
    "handle_preemptions": "kv_connector_metadata",
    "start_load_kv": "forward_context **kwargs",
    "wait_for_layer_load": "layer_name",
    "save_kv_layer": "layer_name kv_layer attn_metadata **kwargs",
    "wait_for_save": "",
    "clear_connector_metadata": "",
    "get_finished": "finished_req_ids",
    "get_block_ids_with_load_errors": "",
    "get_kv_connector_stats": "",
    "get_kv_connector_kv_cache_events": "",
    "get_handshake_metadata": "",
    "get_finished_count": "",
    "build_connector_worker_meta": "",
    "shutdown": "",
    "bind_gpu_block_pool": "gpu_block_pool",
    "on_new_request": "request",
    "get_num_new_matched_tokens": "request num_computed_tokens",
    "update_state_after_alloc": "request blocks num_external_tokens",
    "build_connector_meta": "scheduler_output",
    "update_connector_output": "connector_output",
    "request_finished": "request block_ids",
    "take_events": "",
    "reset_cache": "",
}
FIRST_ALONE = {"register_cross_layers_kv_cache": "kv_cache attn_backend"}
SINCE_THEN = {
    "has_pending_push_work": "",
    "has_pending_block_frees": "",
    "get_loaded_kv_cache_group_ids": "request",
    "get_external_cache_hit_sources": "request num_external_tokens",
    "bind_kv_cache_manager": "kv_cache_manager",
    "register_finished_partial_tail": "request block_ids partial_tail_offloads",
    "get_mem_pool_context": "",
    "finish_forward": "",
    "reset_capture_state": "",
}
LAST_ALONE = {"unregister_kv_caches": "", "restore_kv_caches": ""}


class Base:
    """What all have with a body that matters."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.metadata = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Any) -> bool:
        return False


def _results(self: Any, finished_req_ids: set[str]) -> Any:
    """Since 0.32 sent and received come as one object, which vLLM makes of what is finished."""
    sent, received = self.get_finished(finished_req_ids)
    return SimpleNamespace(finished_sending=sent or set(), finished_recving=received or set())


def base_of(version: str) -> type:
    """The class as one of ``VERSIONS`` has it."""
    more = FIRST_ALONE if version == VERSIONS[0] else SINCE_THEN
    last = LAST_ALONE if version == VERSIONS[-1] else {}
    members: dict[str, Any] = {
        name: _method(words.split()) for name, words in (ALWAYS | more | last).items()
    }
    if version != VERSIONS[0]:
        members["get_transfer_results"] = _results
    return type(f"Base{version}", (Base,), members)


def _method(words: list[str]) -> Any:
    kinds = inspect.Parameter
    made = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
    for word in words:
        kind = kinds.VAR_KEYWORD if word.startswith("**") else kinds.POSITIONAL_OR_KEYWORD
        made.append(kinds(word.lstrip("*"), kind))
    signature = inspect.Signature(made)

    def method(*args: Any, **kwargs: Any) -> None:
        signature.bind(*args, **kwargs)

    method.__signature__ = signature  # type: ignore[attr-defined]
    return method
