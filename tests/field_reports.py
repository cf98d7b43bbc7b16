"""What people reported of this kind of software, and the tests that hold kvd to the right behaviour.

Each row is an instance of a kind, and its tests are of the kind. ``unit/test_field_report_list.py`` checks that every
test named here exists; a row without tests says what is missing.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One line of the list of reports."""

    reports: tuple[str, ...]
    happened: str
    tests: tuple[str, ...]
    """``file::test``, below ``tests/``; classes by name in between."""
    missing: str = ""


ROWS = (
    Row(
        ("vllm#21570",),
        "blocks read after their lease had ended, and the wrong text with HTTP 200",
        (
            "integration/test_field_reports.py::test_vllm_21570_memory_is_not_read_after_its_lease",
            "unit/test_memory_pool.py::test_a_lease_that_has_gone_back_can_not_be_used",
            "conformance/test_fabric_tcp.py::TestTcpFaults",
            "simulation/test_simulation.py::test_the_worlds_find",
        ),
    ),
    Row(
        ("vllm#29906", "vllm#25067"),
        "an abort races the end of prefill, blocks pinned for minutes",
        (
            "simulation/test_commands.py::test_hours_of_load_leave_nothing",
            "integration/test_transfer.py::test_vllm_29906_abort_at_completion_twice",
            "unit/test_transfer_ends.py::test_vllm_29906_abort_at_completion_does_nothing_and_release_frees_at_once",
            "unit/test_transfer_ends.py::test_vllm_29906_abort_races_delivered",
        ),
    ),
    Row(
        ("vllm#41269",),
        "decode rejects before admission; the source stays pinned for 480 s",
        (
            "integration/test_transfer.py::test_vllm_41269_a_rejected_transfer_frees_the_source",
            "unit/test_transfer_ends.py::test_vllm_41269_a_rejected_transfer_frees_its_source",
        ),
    ),
    Row(
        ("vllm#48633",),
        "a partial prefix hit aligned at the wrong end",
        (
            "integration/test_transfer.py::test_vllm_48633_held_tokens_are_local_and_never_sent",
            "unit/test_transfer_delivery.py::test_vllm_48633_what_the_sink_holds_is_never_sent",
        ),
    ),
    Row(
        ("vllm#44238",),
        "source hash stable, destination differs under load",
        (
            "integration/test_transfer.py::test_vllm_44238_many_transfers_at_once_keep_their_bytes",
            "integration/test_security.py::test_vllm_44238_a_flipped_bit_on_the_wire_ends_that_transfer_alone",
            "integration/test_security.py::test_without_checksums_the_bit_would_have_been_taken",
        ),
    ),
    Row(
        ("vllm#49238",),
        "a restart of the source ends the sink with a segmentation fault",
        (
            "integration/test_faults.py::test_vllm_49238_a_handle_of_an_earlier_boot",
            "unit/test_transfer_ends.py::test_vllm_49238_the_session_is_lost_in_every_state",
            "integration/test_peers_ends.py::test_a_restarted_peer_ends_its_earlier_session",
        ),
    ),
    Row(
        ("sglang#40108", "LMCache#4642"),
        "a dead peer stays registered for ever; a restart between heartbeats goes unseen",
        (
            "integration/test_faults.py::test_kill_a_daemon",
            "unit/test_transfer_core.py::test_sglang_40108_a_lost_announcement_is_made_again",
            "integration/test_peers_ends.py::test_after_a_loss_the_next_caller_dials_again_at_once",
        ),
    ),
    Row(
        ("Mooncake#1084",),
        "expiry of one client unmaps everybody's memory",
        ("integration/test_faults.py::test_mooncake_1084_the_death_of_one_client_leaves_the_others_mapping",),
    ),
    Row(
        ("vllm#42839",),
        "the key was an engine-local request id; hang",
        (
            "integration/test_transfer.py::test_vllm_42839_different_request_ids_meet_by_handle",
            "unit/test_transfer_core.py::test_vllm_42839_vllm_49238_a_bad_handle_is_refused_at_once",
        ),
    ),
    Row(
        ("vllm#27083",),
        "the side channel's host was not set, and the wrong engine answered",
        (
            "unit/test_config_check.py::TestPeers::test_remote_peers_are_not_told_localhost",
            "integration/test_peers_refusals.py::test_an_address_with_another_node_names_both",
            "unit/test_handshake.py::test_another_node_than_the_dialled_one_names_both",
        ),
    ),
    Row(
        ("vllm#29503", "vllm#23587", "vllm#55776"),
        "version, backend or model revision differs: crash, endless wait, or accepted",
        (
            "unit/test_transfer_core.py::test_vllm_29503_vllm_14952_a_misfit_is_refused_with_what_differs_and_both_live_on",
            "integration/test_transfer.py::test_model_revisions_that_differ_are_named_and_the_right_sink_still_works",
            "unit/test_handshake.py::test_another_wire_version_is_told_to_both_before_anything_is_decoded",
            "integration/test_security.py::test_levels_that_differ_are_refused_with_both",
        ),
    ),
    Row(
        ("vllm#14952", "vllm#50765", "TensorRT-LLM#6507", "vllm#42895"),
        "tensor-parallel or block-size mismatch: hang, crash, wrong output, or healthy and then each request fails",
        (
            "integration/test_transfer.py::test_vllm_14952_ranks_that_do_not_fit_are_refused",
            "unit/test_plan.py::test_layouts_that_differ_in_more_than_capacity_are_refused",
        ),
    ),
    Row(
        ("vllm#20965", "vllm#25059", "ray#57757"),
        "port taken: a thread dies, the process lives on",
        ("integration/test_field_reports.py::test_vllm_20965_a_taken_port_ends_the_daemon_and_is_named",),
    ),
    Row(
        ("Mooncake#1382", "Mooncake#281", "Mooncake#351", "Mooncake#983"),
        "ENOMEM, EFAULT, a bare maximum at registration",
        (
            "unit/test_memory_arena.py::test_a_size_the_system_refuses_becomes_an_error_with_a_fix",
            "unit/test_memory_arena.py::test_more_than_the_machine_has_is_refused_before_anything_is_taken",
            "unit/test_memory_pool.py::test_no_room_says_what_there_is",
            "unit/test_memory_pool.py::test_a_fabric_that_refuses_an_arena_leaves_nothing_behind",
        ),
    ),
    Row(
        ("ucx#11259", "Mooncake#1026"),
        "the far NIC is used, half the bandwidth",
        (),
        "nothing chooses a NIC by its distance to the memory: `fabric.device` names it",
    ),
    Row(
        ("Mooncake#553", "ATOM#1866"),
        'no fallback; "tcp" still opened RDMA',
        (
            "unit/test_fabric_choice.py::test_tcp_never_makes_verbs",
            "unit/test_fabric_choice.py::test_auto_falls_back_with_one_line",
            "unit/test_fabric_choice.py::test_verbs_without_a_device_fails",
            "verbs/test_daemons.py::test_tcp_opens_no_device",
        ),
    ),
    Row(
        ("Mooncake troubleshooting",),
        "TIME_WAIT eats the ports",
        ("integration/test_peers.py::test_five_thousand_uses_take_no_further_socket",),
    ),
    Row(
        ("sglang#39400",),
        "an unauthenticated route can be taken over",
        (
            "integration/test_hosts.py::test_sglang_39400_a_peer_with_another_key_is_refused",
            "integration/test_peers_ends.py::test_a_claimant_without_the_key_ends_nothing",
        ),
    ),
    Row(
        ("vllm#17192",),
        "pickle on open ports: remote code execution (and five further CVEs)",
        (
            "integration/test_field_reports.py::test_vllm_17192_nothing_that_runs_what_it_reads_is_imported",
            "integration/test_peers_refusals.py::test_foreign_bytes_close_their_connection_with_a_logged_reason_and_no_other",
            "fuzz/test_parsers.py::test_parser",
            "fuzz/test_listeners.py::test_nothing_that_listeners_are_sent_harms_anybody",
        ),
    ),
    Row(
        ("LMCache#5128",),
        "listens on all addresses by default, runs scripts",
        (
            "integration/test_security.py::"
            "test_lmcache_5128_nothing_listens_beyond_loopback_and_others_can_not_use_the_socket",
            "integration/test_peers_refusals.py::test_beyond_this_machine_a_key_is_needed",
        ),
    ),
    Row(
        ("vllm#21784", "vllm#32340", "vllm#43903"),
        "no metrics, or unclear ones",
        (
            "integration/test_field_reports.py::test_vllm_21784_counters_equal_what_was_sent_and_failures_are_counted",
            "unit/test_transfer_delivery.py::test_vllm_21784_ends_are_counted_by_role_and_code",
        ),
    ),
    Row(
        ("dynamo#3493", "Mooncake#1078", "Mooncake#2246"),
        "a blip of the metadata store restarts everything; stale records",
        (),
        "peers are configured statically here, so there is no store to fail",
    ),
    Row(
        ("vllm#55434", "vllm#23780", "sglang#5450", "Mooncake#826"),
        "112,000 to 270,000 descriptors a transfer, milliseconds to launch, 15 MB/s when fragmented",
        (
            "unit/test_plan.py::test_a_full_batch_of_equal_capacity_is_one_descriptor",
            "conformance/test_fabric_tcp.py::TestTcpOnUvloop",
        ),
    ),
    Row(
        ("vllm#26744", "vllm#30358", "vllm#46204"),
        "block 16 to 128, block counts differ, forced HND permutes the wrong axis",
        (
            "unit/test_layout_named.py::test_ranks_and_blocks_that_differ",
            "unit/test_layout_named.py::test_caches_of_engines",
            "integration/test_tensor_transfers.py::test_straight_into_a_paged_cache_by_its_block_table",
        ),
    ),
)
