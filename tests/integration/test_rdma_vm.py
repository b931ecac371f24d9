"""The rdma transport in a machine that has a device: a short part of ``make test-rdma``."""

from __future__ import annotations

import importlib.util
import re

import pytest
from tests.rdma_vm.guest import ENGINE, in_guest, prepare, pytest_command

from cloverinfer.transport import missing

LIMIT = 240
"""Seconds that the guest may run; it takes a quarter of it where nothing else runs."""
SHORT = [
    f"{ENGINE}::{name}"
    for name in (
        "test_scattered_blocks_of_one_put_wait_for_room",
        "test_unknown_device_is_refused_with_those_that_there_are",
        "test_closing_a_region_spares_other_puts_of_its_link",
        "test_fenced_peer_is_told_once_and_then_connects_by_itself",
        "test_write_with_a_wrong_key_fails_with_the_card_s_reason",
        "test_downed_link_fails_puts_with_its_reason_and_they_go_on_when_it_is_up",
    )
]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 120)
@pytest.mark.skipif(not missing("rdma"), reason="the rdma tests run on this host's device itself")
def test_short_suite_in_a_guest() -> None:
    reason = prepare()
    if not reason and importlib.util.find_spec("cloverinfer._verbs") is None:
        reason = "the rdma transport was not built"
    if reason:
        pytest.skip(f"RDMA IS NOT TESTED: {reason}")
    done = in_guest(pytest_command(*SHORT), LIMIT)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= len(SHORT), done.stdout
    assert "skipped" not in done.stdout, done.stdout
