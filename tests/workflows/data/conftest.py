"""The log that the tests of counts share; other modules have logs of their own."""

import pytest

from .counted import made, make_log


@pytest.fixture(scope="module")
def log():
    return make_log()


@pytest.fixture(scope="module")
def data(log, tmp_path_factory):
    return made(log, tmp_path_factory.mktemp("toy"))
