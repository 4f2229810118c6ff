"""Processes to start runs from. torch counts devices at a process's first backward pass, and its forks do not again."""

from concurrent.futures import ProcessPoolExecutor

import pytest
from fork_server import forks


@pytest.fixture(scope="session")
def fresh():
    """`fresh(function, *args)` is the function's result in a process that has run no backward pass."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture(scope="module")
def apart():
    """The same in a process of the module's own, which may use the device itself: forks would inherit its bytes."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture
def alone():
    """The same in a process of the test's own, which may run backward passes."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()
