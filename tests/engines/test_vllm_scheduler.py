"""The scheduler's half of the vLLM connector, on plain data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvd_client.engines._vllm_plan import MAX_HANDLES, Board, Options, Plan, Rejection, prompt_digest
from kvd_client.engines._vllm_scheduler import RETRY_S, SchedulerSide
from kvd_client.errors import DaemonUnreachable, InvalidArgument

BLOCK = 16
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {"do_remote_prefill": True, "kvd_request": "r", "kvd_source": "prefill-0", "kvd_handle": "h"}


class Status(enum.Enum):
    RUNNING = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()


@dataclasses.dataclass
class Request:
    """What the connector reads of vLLM's."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    status: Status = Status.RUNNING
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()


class Step:
    """vLLM's ``SchedulerOutput``, as far as the connector reads it."""

    def __init__(self) -> None:
        self.num_scheduled_tokens: dict[str, int] = {}
        self.scheduled_new_reqs: list[Any] = []
        self.scheduled_cached_reqs = SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        )

    def new(self, name: str, blocks: list[int], computed: int, tokens: int) -> Step:
        self.scheduled_new_reqs.append(SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed))
        self.num_scheduled_tokens[name] = tokens
        return self

    def again(self, name: str, blocks: list[int] | None, computed: int, tokens: int, *, resumed: bool = False) -> Step:
        cached = self.scheduled_cached_reqs
        cached.req_ids.append(name)
        cached.new_block_ids.append(None if blocks is None else (blocks,))
        cached.num_computed_tokens.append(computed)
        if resumed:
            cached.resumed_req_ids.add(name)
        self.num_scheduled_tokens[name] = tokens
        return self


def side(node: Callable[[], str] = lambda: "node-0", board: Board | None = None, **given: Any) -> SchedulerSide:
    options: dict[str, Any] = {"produce": True, "consume": True, **given}
    return SchedulerSide("engine", BLOCK, node, board=board or Board(), **options)


def prefilled(scheduler: SchedulerSide, request: Request) -> None:
    tokens = len(request.prompt_token_ids or ())
    blocks = list(range(-(-tokens // BLOCK)))
    scheduler.allocated(request, blocks, 0)
    scheduler.plan(Step().new(request.request_id, blocks, 0, tokens))


def test_a_prompt_in_one_step_leaves_whole() -> None:
    scheduler, request = side(), Request("a", list(range(40)), dict(PREFILL))
    scheduler.allocated(request, [3, 4, 5], 0)
    (save,) = scheduler.plan(Step().new("a", [3, 4, 5], 0, 40)).saves
    assert (save.blocks, save.anew, save.computed, save.tokens) == ([3, 4, 5], True, 40, 40)
    assert save.transfer == "engine:a"
    request.status = Status.FINISHED_LENGTH_CAPPED
    params = scheduler.finished(request)
    assert params is not None
    assert params["do_remote_prefill"]
    assert not params["do_remote_decode"]
    assert (params["kvd_request"], params["kvd_source"]) == ("engine:a", "node-0")
    assert "kvd_handle" not in params  # a worker in another process has it
    assert scheduler.plan(Step()).drop_saves == []


def test_chunks_and_a_prefix_hit() -> None:
    scheduler, request = side(), Request("a", list(range(100)), dict(PREFILL))
    scheduler.allocated(request, [0, 1, 2, 3], 0)
    (save,) = scheduler.plan(Step().new("a", [0, 1, 2, 3], 32, 32)).saves  # two blocks were there
    assert (save.blocks, save.anew, save.computed) == ([0, 1, 2, 3], True, 64)
    (save,) = scheduler.plan(Step().again("a", [9, 8, 7], 64, 36)).saves
    assert (save.blocks, save.anew, save.computed) == ([9, 8, 7], False, 100)
    assert scheduler.plan(Step().again("a", None, 100, 1)).saves == []  # the prompt has left, a token follows


def test_a_preempted_prompt_leaves_from_its_new_blocks() -> None:
    scheduler, request = side(), Request("a", list(range(100)), dict(PREFILL))
    scheduler.allocated(request, [0, 1], 0)
    scheduler.plan(Step().new("a", [0, 1], 0, 32))
    scheduler.allocated(request, [5, 6, 7], 0)
    (save,) = scheduler.plan(Step().again("a", [5, 6, 7], 0, 48, resumed=True)).saves
    assert (save.blocks, save.anew, save.computed) == ([5, 6, 7], True, 48)


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_STOPPED])
def test_a_prompt_that_is_not_computed_is_dropped(status: Status) -> None:
    scheduler, request = side(), Request("a", list(range(100)), dict(PREFILL))
    scheduler.allocated(request, [0, 1], 0)
    scheduler.plan(Step().new("a", [0, 1], 0, 32))
    request.status = status
    assert scheduler.finished(request) is None
    assert scheduler.plan(Step()).drop_saves == ["a"]
    assert scheduler.plan(Step()).drop_saves == []
    assert scheduler.finished(request) is None  # a second end does nothing


def test_vllm_29906_an_abort_at_the_end_of_prefill_drops_what_nobody_was_told_of() -> None:
    scheduler, request = side(), Request("a", list(range(40)), dict(PREFILL))
    prefilled(scheduler, request)
    request.status = Status.FINISHED_ABORTED
    assert scheduler.finished(request) is None
    assert scheduler.plan(Step()).drop_saves == ["a"]


def test_vllm_48633_a_sink_loads_behind_its_own_prefix() -> None:
    scheduler, request = side(), Request("a", list(range(100)), dict(DECODE))
    assert scheduler.matched(request, 32) == (68, True)
    assert scheduler.matched(request, 32) == (68, True)  # asking changes nothing
    scheduler.allocated(request, [0, 1, 2, 3, 4, 5, 6, 7], 68)
    plan = scheduler.plan(Step())
    (load,) = plan.loads
    assert (load.blocks, load.held, load.tokens) == ([0, 1, 2, 3, 4, 5, 6], 32, 100)
    assert (load.transfer, load.source, load.handle) == ("r", "prefill-0", "h")
    assert scheduler.matched(request, 32) == (0, False)  # while it loads, and after a failure
    scheduler.received(["a"])
    assert scheduler.matched(request, 0) == (0, False)
    scheduler.allocated(request, [0, 1, 2, 3, 4, 5, 6, 7], 0)
    assert scheduler.plan(Step()) == Plan(idle=True)


def test_a_sink_that_has_the_prompt_rejects_it() -> None:
    scheduler, request = side(), Request("a", list(range(33)), dict(DECODE))
    assert scheduler.matched(request, 32) == (0, False)  # the last token is computed in any case
    scheduler.allocated(request, [0, 1, 2], 0)
    (rejection,) = scheduler.plan(Step()).rejections
    assert rejection == Rejection("r", "prefill-0", "h", "this engine has the prompt already")


def test_vllm_41269_a_request_that_ends_before_admission_frees_its_source() -> None:
    scheduler, request = side(), Request("a", list(range(33)), dict(DECODE), Status.FINISHED_ABORTED)
    assert scheduler.finished(request) is None
    (rejection,) = scheduler.plan(Step()).rejections
    assert rejection.handle == "h"
    # once more, under the same id: a new request
    scheduler.matched(request, 0)
    scheduler.allocated(request, [0, 1, 2], 33)
    assert len(scheduler.plan(Step()).loads) == 1


def test_an_abort_while_it_loads_is_told_to_the_worker_once() -> None:
    scheduler, request = side(), Request("a", list(range(33)), dict(DECODE))
    scheduler.allocated(request, [0, 1, 2], 33)
    scheduler.plan(Step())
    request.status = Status.FINISHED_ABORTED
    scheduler.finished(request)
    assert scheduler.plan(Step()).drop_loads == ["a"]
    assert scheduler.plan(Step()).drop_loads == []


def test_an_end_after_loading_drops_nothing() -> None:
    scheduler, request = side(), Request("a", list(range(33)), dict(DECODE))
    scheduler.allocated(request, [0, 1, 2], 33)
    scheduler.plan(Step())
    scheduler.received(["a", "somebody else's"])
    request.status = Status.FINISHED_STOPPED
    assert scheduler.finished(request) is None
    assert scheduler.plan(Step()) == Plan(idle=True)


def test_the_router_names_the_transfer() -> None:
    scheduler = side()
    source = Request("a", list(range(20)), {**PREFILL, "kvd_request": "mine", "kvd_sink": "decode-3"})
    scheduler.allocated(source, [0, 1], 0)
    (save,) = scheduler.plan(Step().new("a", [0, 1], 0, 20)).saves
    assert (save.transfer, save.sink) == ("mine", "decode-3")


def test_a_handle_is_told_where_the_worker_is_near() -> None:
    board = Board()
    scheduler, request = side(board=board), Request("a", list(range(20)), dict(PREFILL))
    prefilled(scheduler, request)
    board.put("engine:a", "node-0/boot/1/secret")
    request.status = Status.FINISHED_STOPPED
    params = scheduler.finished(request)
    assert params is not None
    assert params["kvd_handle"] == "node-0/boot/1/secret"
    assert board.handle("engine:a") == ""


def test_decode_is_not_sent_where_nothing_is() -> None:
    board = Board()
    scheduler, request = side(board=board), Request("a", list(range(20)), dict(PREFILL))
    prefilled(scheduler, request)
    board.put("engine:a", None)
    request.status = Status.FINISHED_STOPPED
    assert scheduler.finished(request) == {"do_remote_prefill": False, "do_remote_decode": False}


def test_a_daemon_that_does_not_answer_is_not_asked_at_each_end() -> None:
    asked, now = [], [100.0]

    def node() -> str:
        asked.append(now[0])
        if len(asked) == 1:
            raise DaemonUnreachable("nobody is there")
        return "node-0"

    scheduler = side(node, clock=lambda: now[0])

    def end(name: str) -> Any:
        request = Request(name, list(range(20)), dict(PREFILL))
        prefilled(scheduler, request)
        request.status = Status.FINISHED_STOPPED
        return scheduler.finished(request)

    assert not end("a")["do_remote_prefill"]
    assert not end("b")["do_remote_prefill"]
    now[0] += RETRY_S
    assert end("c")["do_remote_prefill"]
    assert end("d")["do_remote_prefill"]
    assert len(asked) == 2


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": True}, {**DECODE, "kvd_handle": 7}, {**DECODE, "kvd_request": "x" * 600}],
)
def test_requests_without_a_transfer_are_served_without_one(params: dict[str, Any] | None) -> None:
    scheduler, request = side(), Request("a", list(range(33)), params)
    assert scheduler.matched(request, 0) == (0, False)
    scheduler.allocated(request, [0, 1, 2], 0)
    assert scheduler.plan(Step().new("a", [0, 1, 2], 0, 33)) == Plan()
    request.status = Status.FINISHED_STOPPED
    assert scheduler.finished(request) is None


def test_embeddings_have_no_transfer() -> None:
    scheduler = side()
    for params in (PREFILL, DECODE):
        request = Request("a", None, dict(params))
        assert scheduler.matched(request, 0) == (0, False)
        scheduler.allocated(request, [0], 0)
        assert scheduler.plan(Step()) == Plan(idle=True)


def test_roles() -> None:
    producer, consumer = side(consume=False), side(produce=False)
    assert producer.matched(Request("a", list(range(33)), dict(DECODE)), 0) == (0, False)
    request = Request("a", list(range(33)), dict(PREFILL))
    consumer.allocated(request, [0, 1, 2], 0)
    assert consumer.plan(Step().new("a", [0, 1, 2], 0, 33)).saves == []


def test_what_decides_a_cache_is_in_its_digest() -> None:
    tokens = [1, 2, 3]
    found = {
        prompt_digest(tokens), prompt_digest([1, 2]), prompt_digest([1, 2, 4]), prompt_digest(tokens, "adapter"),
        prompt_digest(tokens, "ad", "apter"), prompt_digest(tokens, "", "adapter"),
    }  # fmt: skip
    assert len(found) == 6
    assert prompt_digest((1, 2, 3)) == prompt_digest(tokens)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sokcet": "/x"}, "sokcet"),
        ({"unit": "page"}, "unit"),
        ({"peer_ranks": -1}, "peer_ranks"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Options.of(given)


def test_the_board_is_bounded() -> None:
    board = Board()
    for number in range(MAX_HANDLES + 10):
        board.put(str(number), None)
    assert not board.has_failed("9")
    assert board.has_failed("10")
    assert not board.has_failed("never")


def test_a_step_of_another_form_keeps_no_load_from_its_worker() -> None:
    scheduler, request = side(), Request("a", list(range(33)), dict(DECODE))
    scheduler.allocated(request, [0, 1, 2], 33)
    assert len(scheduler.plan(SimpleNamespace(num_scheduled_tokens={"b": 1})).loads) == 1
