"""The facade that vLLM loads: one class, of which vLLM makes one object per half.

Passes vLLM's calls on in the connector's own words and holds nothing itself. The only module that
imports vLLM.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from ...core.errors import ConfigError
from .describe import block_size_of, check_config, engine_of
from .plan import Loaded, StepPlan
from .scheduler import SchedulerHalf
from .settings import settings_from
from .versions import check_version
from .worker import WorkerHalf

log = logging.getLogger(__name__)
_WorkerMeta: Any = getattr(vllm_base, "KVConnectorWorkerMetadata", object)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What crosses from half to half with each step."""

    plan: StepPlan


@dataclass
class LoadResults(_WorkerMeta):  # type: ignore[misc]
    """What comes back, where vLLM has a way for it."""

    loaded: dict[str, Loaded] = field(default_factory=dict)

    def aggregate(self, other: LoadResults) -> LoadResults:
        """Of several workers a failure counts, else the last to be whole."""
        merged = dict(self.loaded)
        for name, result in other.loaded.items():
            mine = merged.get(name, result)
            merged[name] = max(mine, result, key=lambda one: (bool(one.error), one.seconds))
        return LoadResults(merged)


class RDMAConnector(KVConnectorBase_V1):
    """Prefill's KV cache put straight into decode's blocks, layer by layer.

    See docs/vllm.md for its settings and for what requests must carry. It does not support vLLM's
    hybrid KV cache manager, which vLLM then switches off by itself.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        # vLLM shows what its own loggers say.
        logging.getLogger("cloverinfer").parent = logging.getLogger("vllm")
        check_version(vllm.__version__, KVConnectorBase_V1, type(self))
        check_config(vllm_config)
        if "kv_cache_config" in inspect.signature(KVConnectorBase_V1.__init__).parameters:
            super().__init__(vllm_config, role, kv_cache_config)
        else:
            super().__init__(vllm_config, role)
        transfer = vllm_config.kv_transfer_config
        self._config = vllm_config
        self._cache = kv_cache_config
        self._settings = settings_from(transfer.kv_connector_extra_config or {})
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                block_size_of(vllm_config, kv_cache_config),
                sends=transfer.is_kv_producer,
                loads=transfer.is_kv_consumer,
            )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are pushed from between them, which a graph of the whole model would skip."""
        return True

    # -- the scheduler half

    @property
    def _planner(self) -> SchedulerHalf:
        assert self._scheduler is not None, "the scheduler's call came to the worker half"
        return self._scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._planner.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._planner.build(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._planner.finished(request)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        self._planner.reported(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            meta.loaded if isinstance(meta, LoadResults) else {},
        )

    def has_pending_push_work(self) -> bool:
        return self._planner.pending

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    # -- the worker half

    @property
    def _courier(self) -> WorkerHalf:
        assert self._worker is not None, "no KV cache has been registered"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        rank = _rank(self._config)
        engine = engine_of(self._config, self._cache, rank, kv_caches)
        worker = WorkerHalf(self._settings, engine)
        worker.register(kv_caches)
        self._worker = worker

    def register_cross_layers_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("this connector takes a tensor per layer")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Comes before the step's forward in every version; ``start_load_kv`` does not."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._courier.begin_step(connector_metadata.plan)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._courier.preempt(kv_connector_metadata.plan.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads are expected since ``bind_connector_metadata``, and arrive by
        themselves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled once its whole load is proven."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._courier.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Waits for nothing: blocks stay the request's until they are pushed."""
        self._courier.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, loaded = self._courier.take_finished()
        return sent or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._courier.take_bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        results = self._courier.take_results()
        return LoadResults(results) if results else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _rank(config: Any) -> int:
    if config.parallel_config.tensor_parallel_size == 1:
        return 0
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
