"""How the tests themselves run."""

import pytest


def test_every_process_knows_which_tests_belong_together(request: pytest.FixtureRequest) -> None:
    """Otherwise they are spread one by one: module fixtures are made in each process, and tests
    that measure run side by side."""
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@test_suite")
