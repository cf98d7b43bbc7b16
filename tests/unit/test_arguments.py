"""What callers give as numbers: every library's numbers are taken, and what is none is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvd_client.activations import receive_tensor, send_tensor
from kvd_client.arguments import deadline_of, seconds, whole, whole_numbers
from kvd_client.arrays import bytes_of
from kvd_client.client import Client
from kvd_client.errors import InvalidArgument
from kvd_client.framing import decode_request, encode_request
from kvd_client.protocol import LENGTH, MAX_FRAME, Abort, Fetch, OpenSource
from kvd_client.spec import KVSpec, MetadataSpec, part_layout

SPEC = KVSpec(layers=1, kv_heads=1, entry_bytes=4, dtype="f16", model="m")


def opened(**changed):
    fields = {
        "request": "r", "spec": SPEC, "lengths": [4], "capacity": 4, "rank": 0, "ranks": 1, "head_start": 0,
        "head_count": 1, "sink": "", "deadline_s": 0.0,
    }  # fmt: skip
    return OpenSource(**(fields | changed))


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_every_library_are_plain_ones(value):
    found = whole("n", value)
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("value", [1.5, 3.0, "3", None, b"3", [3], math.nan, np.float32(3)])
def test_what_is_no_whole_number_is_named(value):
    with pytest.raises(InvalidArgument, match=r"capacity is .*; it must be a whole number"):
        whole("capacity", value)


@pytest.mark.parametrize("values", [[4, 5], (4, 5), np.array([4, 5]), torch.tensor([4, 5]), iter([4, 5])])
def test_lists_of_numbers_come_as_anything_that_has_elements(values):
    assert whole_numbers("lengths", values) == [4, 5]


@pytest.mark.parametrize("values", [4, None, "45", np.array(4), torch.tensor(4)])
def test_what_is_no_list_is_named(values):
    with pytest.raises(InvalidArgument, match=r"lengths is .*; it must be a list of whole numbers"):
        whole_numbers("lengths", values)


def test_the_element_that_is_no_number_is_named():
    with pytest.raises(InvalidArgument, match=r"lengths\[1\] is 'x'"):
        whole_numbers("lengths", [1, "x"])


@pytest.mark.parametrize("value", ["5", None, math.nan, b"5", [], 10**400])
def test_what_is_no_time_is_named(value):
    with pytest.raises(InvalidArgument, match=r"timeout_s is .*; it must be a number of seconds"):
        seconds("timeout_s", value)


def test_times_without_end_are_times():
    assert seconds("timeout_s", np.float32(math.inf)) == math.inf
    assert deadline_of(None) is None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (opened(request=5), "request"),
        (opened(request=b"r"), "request"),
        (opened(lengths=[1.5]), r"lengths\[0\]"),
        (opened(spec=KVSpec(layers=1, kv_heads=1, entry_bytes=4, dtype=None, model="m")), "spec.dtype"),
        (opened(deadline_s="5"), "deadline_s"),
        (opened(request="\udcff"), "OpenSource"),
        (opened(sink=object()), "OpenSource"),
        (opened(request="x" * 100_000), "OpenSource"),
        (Abort(transfer=1 << 70), "Abort"),
    ],
)
def test_a_request_that_the_daemon_would_hang_up_on_is_refused_before_it_is_sent(message, field):
    with pytest.raises(InvalidArgument, match=f": {field} can't be sent: "):
        encode_request(message)


def test_numbers_of_other_libraries_cross_as_plain_ones():
    sent = opened(lengths=[np.int32(4)], capacity=np.int64(4), deadline_s=np.float32(0.5))
    frame = encode_request(sent)
    assert decode_request(frame[LENGTH.size :]) == opened(deadline_s=0.5)


def test_a_request_with_as_many_bytes_as_a_frame_has_is_sent():
    index = bytes(MAX_FRAME - 100)
    frame = encode_request(Fetch(transfer=1, layer=0, slot=0, counts=b"", index=index))
    assert decode_request(frame[LENGTH.size :]).index == index


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((1, 2), object), "Python objects"),
        ([[1], [1, 2]], "inhomogeneous"),
        (torch.zeros(2, 2).to_sparse(), "dense"),
        (torch.zeros(2, 2, device="meta"), "dense"),
        ("abc", "got a str"),
        (3, "got a int"),
    ],
)
def test_what_has_no_bytes_is_no_array(value, said):
    with pytest.raises(InvalidArgument, match=said):
        bytes_of(value)


def test_a_request_too_large_for_a_frame_is_the_callers_mistake():
    with pytest.raises(InvalidArgument, match="exceeds the frame limit"):
        encode_request(Fetch(transfer=1, layer=0, slot=0, counts=bytes(MAX_FRAME), index=b""))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(8, dtype=torch.float64).reshape(1, 2, 1, 4).transpose(2, 3),
        torch.ones(1, 2, 4, 1, dtype=torch.complex64).conj(),
        torch.ones(1, 2, 4, 2, dtype=torch.complex64).conj().imag,
        torch.ones(1, 1, 1, 1, dtype=torch.float16).expand(1, 2, 4, 4),
    ],
    ids=["an axis of one element", "conjugated", "negated", "repeated"],
)
def test_tensors_that_are_views_are_taken_by_their_values(tensor):
    whole_tensor = torch.from_numpy(tensor.resolve_conj().resolve_neg().numpy().copy())
    assert bytes_of(tensor).tobytes() == whole_tensor.numpy().tobytes()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda tensor: torch.nested.nested_tensor([tensor])])
def test_tensors_without_dense_values_are_refused(make):
    tensor = make(torch.ones(2, 3))
    with pytest.raises(InvalidArgument, match="expected a dense tensor"):
        bytes_of(tensor)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32])
def test_layouts_of_small_integers_do_not_overflow(kind):
    spec = KVSpec(layers=kind(40), kv_heads=kind(2), entry_bytes=kind(64), dtype="f16", model="m")
    plain = KVSpec(layers=40, kv_heads=2, entry_bytes=64, dtype="f16", model="m")
    metadata = (MetadataSpec(name="a", layer_bytes=kind(100)),)
    given = part_layout(spec, heads=kind(2), rows=1, capacity=120, landing_entries=kind(4), metadata=metadata)
    assert (
        given.nbytes == part_layout(plain, heads=2, rows=1, capacity=120, landing_entries=4, metadata=metadata).nbytes
    )
    assert type(given.nbytes) is int


@pytest.mark.parametrize("windows", [None, np.array([1, 2]), (x for x in [1])])
def test_windows_are_a_tuple(windows):
    with pytest.raises(InvalidArgument, match=r"spec\.windows is"):
        KVSpec(layers=1, kv_heads=1, entry_bytes=4, dtype="f16", model="m", windows=windows).check()


@pytest.mark.parametrize("value", [5, None, np.ones(()), np.ones((2, 0)), np.array([object()])])
def test_what_is_no_tensor_is_not_sent(value):
    with pytest.raises(InvalidArgument):
        send_tensor(Client("/nonexistent"), "t", value, dtype="f32")


@pytest.mark.parametrize("wrong", [{"shape": 5}, {"shape": (2, 1.5)}, {"shape": ()}, {"item_bytes": "4"}], ids=repr)
def test_what_is_no_tensors_shape_is_not_asked_for(wrong):
    with pytest.raises(InvalidArgument):
        receive_tensor(Client("/nonexistent"), "t", **({"shape": (2, 2), "dtype": "f32", "item_bytes": 4} | wrong))


@pytest.mark.parametrize("name", ["dtype", "model", "revision"])
def test_names_have_a_length_that_logs_and_files_can_bear(name):
    with pytest.raises(InvalidArgument, match=rf"spec\.{name} has 1025 characters"):
        KVSpec(
            **({"layers": 1, "kv_heads": 1, "entry_bytes": 4, "dtype": "f16", "model": "m"} | {name: "x" * 1025})
        ).check()
