"""The faults that outsiders found, each with the tests that show the rule. A fault that comes back
is found by its row; a test that is renamed breaks the table.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
RULES = "broker/test_delivery_rules.py"
EDGES = "broker/test_edges.py"

# What was seen, and the tests that show the rule.
TABLE: dict[str, tuple[str, ...]] = {
    "an ack of a frame settled a record that was sent after it": (
        f"{RULES}::test_an_ack_does_not_settle_a_record_that_was_sent_after_its_own",
        f"{RULES}::test_records_come_in_the_order_of_offsets_whatever_their_keys",
    ),
    "an ack settled a record that was nacked and sent again": (
        f"{RULES}::test_a_nack_brings_back_a_record_that_only_another_ack_covered",
        f"{RULES}::test_an_ack_of_a_frame_that_is_not_open_settles_nothing",
    ),
    "a client that acks every tenth record of one key stood still, and its records died": (
        f"{RULES}::test_a_client_that_acks_every_tenth_flows",
    ),
    "a crash on the first record made letters of its neighbours": (
        f"{RULES}::test_a_crash_counts_for_the_record_in_work_alone",
    ),
    "a stopped client used up the tries of records that it never saw": (
        f"{RULES}::test_a_stopped_client_uses_up_no_tries",
    ),
    "restarts of the broker made dead letters": (
        f"{RULES}::test_restarts_of_a_broker_count_as_no_try",
    ),
    "a graceful stop forgot acks that were on their way": (
        f"{RULES}::test_a_graceful_stop_takes_the_acks_that_are_on_their_way",
    ),
    "a broker that stood still gave up on records whose acks it had not read": (
        f"{EDGES}::test_a_late_alarm_lets_the_sockets_be_read_first",
        f"{EDGES}::test_a_late_alarm_lets_the_sockets_be_read_first",
    ),
    "a late ack freed the key while another member worked on the record": (
        "regress/test_found.py::test_a_late_ack_does_not_free_the_key_of_a_record_in_work",
    ),
    "after a power cut new records had offsets that a group had settled": (
        "folder/test_boot.py::test_records_published_after_a_power_cut_are_delivered",
        "folder/test_boot.py::test_a_group_that_is_opened_first_does_not_stand_ahead_of_its_log",
    ),
    "a condition of one subscriber stopped the broker for 33 s": (
        "filters/test_filters.py::test_a_condition_that_needs_too_much_work_is_refused",
        "broker/test_share.py::test_a_costly_condition_gives_the_loop_back",
    ),
    "a regular expression of a JSONPath ran away": (
        "filters/test_filters.py::test_a_regular_expression_of_a_jsonpath_cannot_run_away",
    ),
    "groups that nobody uses kept their descriptors": (
        "store/test_descriptors.py::test_groups_give_their_files_back",
    ),
    "each answer on a kept-alive connection took 44 ms": (
        "broker/test_http.py::test_an_answer_on_a_kept_alive_connection_does_not_wait_for_a_delayed_ack",
    ),
    "an open broker took lists of agents and did not enforce them": (
        "broker/test_operation.py::test_an_open_broker_refuses_lists_of_agents",
    ),
    "a token for one group could read the whole topic": (
        "broker/test_operation.py::test_a_token_for_one_group_reads_nothing_else",
    ),
    "a client handed out records whose lease was over": (
        f"{RULES}::test_a_message_says_for_how_long_it_is_leased",
    ),
    "a process that was stopped ended the subscriptions of others": (
        "store/test_locked.py::test_a_stopped_process_ends_no_subscription",
    ),
    "verify, doctor and get ended in a traceback, hung, or took all memory": (
        "cli/test_damage.py::test_damage_is_named",
        "cli/test_damage.py::test_no_damage_is_too_much",
    ),
    "one failed sync left a segment without a seal, and closing raised something bare": (
        "crash/test_sync_failure.py::test_the_log_goes_on_in_a_new_segment",
        "regress/test_found.py::test_after_a_failed_sync_nothing_acknowledged_is_lost_or_damaged",
    ),
    "a head in one piece was not counted; two hosts, a bad port and foreign frames were taken": (
        f"{EDGES}::test_a_head_that_comes_in_one_piece_is_only_so_long",
        f"{EDGES}::test_a_request_with_two_hosts_is_refused",
        f"{EDGES}::test_a_host_whose_port_is_none_is_refused",
        f"{EDGES}::test_a_frame_of_an_extension_that_nobody_agreed_on_ends_the_connection",
    ),
    "a planted link in the spool was followed": (
        "files/test_spool.py::test_a_link_or_a_fifo_in_the_spool_is_no_event",
    ),
    "readiness said ok when the folder was gone": (
        "broker/test_folder_gone.py::test_readiness_and_health_notice_that_the_folder_is_gone",
    ),
}


@pytest.mark.parametrize("fault", TABLE)
def test_each_fault_has_tests_that_show_the_rule(fault: str) -> None:
    for name in TABLE[fault]:
        path, _, test = name.partition("::")
        tree = ast.parse((TESTS / path).read_text("utf-8"))
        found = [
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert test in found, name
