import pytest

# Before any test imports it, so that its failures are explained as those of test modules are.
pytest.register_assert_rewrite("kvd.fabric.conformance")
