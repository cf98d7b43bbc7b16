"""The vLLM connector: prefill in one vLLM, decode in another, and the KV cache travels between their nodes' daemons.

Made for vLLM 0.32's V1 connector interface, and found by it through ``--kv-transfer-config``::

    {"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd_client.engines.vllm",
     "kv_role": "kv_producer" | "kv_consumer" | "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"socket": "/run/kvd/kvd.sock"}}

:class:`~kvd_client.engines._vllm_plan.Options` lists the keys of the last one. What a request does is in its
``kv_transfer_params``: ``do_remote_decode`` hands its cache over, ``do_remote_prefill`` takes it, as routers for vLLM's
other connectors have them. The prefill engine's answer carries what the decode engine must be given. A router that
names the transfer itself (``kvd_request``, with ``kvd_source`` for the decode side) may ask both engines at once, and
layers cross while prefill runs.

vLLM has no timeout for what a request waits for, and an exception in a hook ends the engine. So every wait here has an
end, no hook raises once the engine has started, and what has not been loaded is reported as such: with the policy
``recompute`` the engine computes it. A mistake in the configuration does end the start, with one sentence.

Importing this imports vLLM; nothing else of :mod:`kvd_client` does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvd_client.client import Client
from kvd_client.engines._vllm_loads import Loads
from kvd_client.engines._vllm_node import Node
from kvd_client.engines._vllm_paged import PagedCache
from kvd_client.engines._vllm_plan import Options, Plan
from kvd_client.engines._vllm_scheduler import SchedulerSide
from kvd_client.engines._vllm_sources import Sources
from kvd_client.errors import KvdError, UnsupportedLayout
from kvd_client.parallel import heads_of
from kvd_client.spec import KVSpec

log = logging.getLogger("vllm.kvd")  # vLLM shows its own tree of loggers only

F = TypeVar("F", bound=Callable[..., Any])


class KvdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan on its way from the scheduler to the workers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def _guarded(default: Callable[[], Any]) -> Callable[[F], F]:
    """A hook that logs what it raises and returns ``default()``: the engine would die of it, with all its requests."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                log.exception("kvd: %s failed; the engine goes on", hook.__name__)
                return default()

        return guarded  # type: ignore[return-value]

    return decorate


class KvdConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One half of the connector: in the scheduler's process, or in a worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises :class:`~kvd_client.errors.InvalidArgument` or :class:`UnsupportedLayout` for what can't be used."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._options = Options.of(config.kv_connector_extra_config)
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedLayout(
                "KvdConnector moves all layers of a rank at once; use tensor instead of pipeline parallelism",
                pipeline_parallel_size=parallel.pipeline_parallel_size,
            )
        kept = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        kinds = [type(spec).__name__ for spec in kept]
        if len(kept) > 1 or not all(isinstance(spec, FullAttentionSpec) for spec in kept):
            raise UnsupportedLayout(
                f"the model's KV cache is {', '.join(kinds)}, and KvdConnector moves full attention's; start with "
                "--disable-hybrid-kv-cache-manager, if the model allows that",
                kinds=kinds,
            )
        self._scheduler: SchedulerSide | None = None
        self._client: Client | None = None
        self._sources: Sources | None = None
        self._loads: Loads | None = None
        if role == KVConnectorRole.SCHEDULER:
            if config.is_kv_consumer and config.kv_load_failure_policy != "recompute":
                log.warning("kvd: a request whose cache does not arrive fails; set kv_load_failure_policy to recompute")
            self._client = Client(self._options.socket, f"vLLM {config.engine_id} scheduler", self._options.timeout_s)
            client = self._client
            self._scheduler = SchedulerSide(
                config.engine_id, vllm_config.cache_config.block_size, lambda: client.status().node,
                produce=config.is_kv_producer, consume=config.is_kv_consumer,
            )  # fmt: skip

    # --- the scheduler's half -------------------------------------------------------------------------------------

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    @_guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    @_guarded(lambda: KvdMetadata(Plan()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KvdMetadata(self._scheduling.plan(scheduler_output))

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.received(connector_output.finished_recving or ())

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.finished(request)

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    # --- a worker's half ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises what is wrong with the caches: the engine does not start."""
        config = self._vllm_config
        rank, ranks = _rank_of(config)
        cache = PagedCache(kv_caches, config.cache_config.block_size, self._options.unit)
        if self._options.unit == "token" and cache.device.type == "cpu":
            raise UnsupportedLayout(
                "vLLM's CPU attention packs the keys of a block together, so a token alone can't be moved; leave unit "
                "out, and give both engines the same --block-size",
                unit="token",
            )
        heads = cache.heads if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
        if heads_of(heads, rank, ranks)[1] != cache.heads:
            raise UnsupportedLayout(
                f"rank {rank} of {ranks} has {cache.heads} of {heads} KV heads, which is not an equal share",
                heads=heads,
                ranks=ranks,
            )
        spec = KVSpec(
            layers=len(cache.layers),
            kv_heads=heads,
            entry_bytes=cache.entry_bytes,
            dtype=_packing(config, cache),
            model=self._options.model or config.model_config.model,
            revision=str(config.model_config.revision or ""),
        ).check()
        self._client = Client(self._options.socket, f"vLLM {_engine(config)} rank {rank}", self._options.timeout_s)
        node = Node(self._client, spec, self._options, rank, ranks)
        self._sources = Sources(node, cache)
        self._loads = Loads(node, cache, self._options.deadline_s)
        try:
            where = f"of node {self._client.status().node}"
        except KvdError as error:  # it may start later, and until then the engine serves by itself
            log.warning("kvd: prompts are computed here until the daemon answers: %s", error)
            where = "that does not answer"
        log.info(
            "kvd: %d layers of %d KV heads with %d bytes in a %s, through a daemon %s",
            spec.layers, heads, spec.entry_bytes, cache.unit, where,
        )  # fmt: skip

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    @_guarded(lambda: None)
    def _begin(self, metadata: Any) -> None:
        if self._sources is not None and self._loads is not None:
            plan: Plan = metadata.plan
            self._sources.drop(plan.drop_saves)
            self._loads.drop(plan.drop_loads)
            self._sources.begin(plan.saves)

    @_guarded(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._loads is not None and self.has_connector_metadata():
            plan: Plan = self._get_connector_metadata().plan
            self._loads.add(plan.loads, plan.rejections)
            plan.loads, plan.rejections = [], []  # once, whoever calls again

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs when all of its layers are there."""

    @_guarded(lambda: None)
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._sources is not None:
            self._sources.put(layer_name)

    @_guarded(lambda: None)
    def wait_for_save(self) -> None:
        if self._sources is not None:
            self._sources.end()

    @_guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._loads is None:
            return None, None
        idle = self.has_connector_metadata() and self._get_connector_metadata().plan.idle
        return None, self._loads.take(idle) or None

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._loads.take_failed_blocks() if self._loads is not None else set()

    @_guarded(lambda: None)
    def shutdown(self) -> None:
        """Ends every transfer. Idempotent."""
        for part in (self._loads, self._sources, self._client):
            if part is not None:
                part.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whole graphs would skip the hook by which layers leave during the pass."""
        return True


def _rank_of(config: Any) -> tuple[int, int]:
    ranks = int(config.parallel_config.tensor_parallel_size)
    if ranks == 1:
        return 0, 1
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()), ranks


def _engine(config: Any) -> str:
    return str(config.kv_transfer_config.engine_id)


def _packing(config: Any, cache: PagedCache) -> str:
    """What must be equal for one engine's entries to be the other's: element type, unit, and for blocks whose insides
    are moved as they are, what has packed them."""
    found = f"{str(cache.dtype).removeprefix('torch.')}, {config.cache_config.cache_dtype}, by {cache.unit}"
    if cache.unit == "token":
        return found
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    packers: set[str] = set()
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        if name in cache.index:
            isa = getattr(layer, "isa", None)  # of the CPU backend, whose packing depends on it
            packers.add(layer.get_attn_backend().get_name() + (f" {isa}" if isa else ""))
    return f"{found} of {cache.unit_tokens} as {' and '.join(sorted(packers))}"
