"""Forked children: they have no connection and no memory of the parent's, and do not keep it from being missed."""

from __future__ import annotations

from kvd_client import Client
from tests.integration.api_entries import SPEC
from tests.integration.api_harness import WAIT_S
from tests.integration.children import in_child, kill, process


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(server):
    with Client(server.path) as client, client.decode("r", SPEC, [5]) as sink:
        view = sink.layer(0)
        view[:] = 1
        for do in (
            client.status,
            lambda: client.prefill("s", SPEC, [1]),
            lambda: sink.poll_ready(0),
            lambda: sink.wait_ready(0, 1),
            sink.abort,
            sink.release,
            lambda: sink.layer(0),
        ):
            answer = in_child(do)
            assert answer.startswith("InvalidArgument")
            assert "after the fork" in answer
        assert in_child(lambda: view.any()) == "False"
        assert in_child(lambda: Client(server.path).status().node) == "test"
        assert client.status().node == "test"
        assert (view == 1).all()


def test_a_child_does_not_hide_its_parents_death(server, tmp_path):
    code = f"""
import os, sys
from kvd_client import Client
client = Client({server.path!r}, name="parent")
client.status()
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
os.waitpid(child, 0)
"""
    with process("-c", code) as parent:
        kill(parent)
        # The child still runs, since its standard input is open.
        assert server.service.lost.get(timeout=WAIT_S).name == "parent"
        parent.stdin.close()


def test_a_client_made_before_a_fork_and_not_used_yet_says_so(server):
    client = Client(server.path)
    assert "make a new Client after the fork" in in_child(client.status)
    assert client.status().node == "test"
    client.close()
