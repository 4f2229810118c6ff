"""Processes to start runs from. torch counts devices at a process's first backward pass; its forks do not repeat it."""

from concurrent.futures import ProcessPoolExecutor

import pytest
from fork_server import forks


@pytest.fixture(scope="session")
def fresh():
    """`fresh(function, *args)` returns the function's result in a process that has run no backward pass."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture(scope="module")
def apart():
    """Like `fresh`, in the module's own process, which may use the device itself: forks would inherit its bytes."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture
def alone():
    """Like `fresh`, in the test's own process, which may run backward passes."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()
