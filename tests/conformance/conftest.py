import pytest

# Before any test imports them, so that what they assert is explained as in test modules.
pytest.register_assert_rewrite(
    "kvd.fabric.conformance", "tests.conformance.kernel_helpers", "tests.conformance.tcp_peer"
)
