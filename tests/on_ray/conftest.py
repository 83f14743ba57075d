"""One cluster for all tests of this folder."""

import os
import tempfile

import pytest
from cluster_process import QUIET, running_cluster

os.environ.update(QUIET)  # Ray reads it when it is imported


@pytest.fixture(scope="session")
def cluster():
    pytest.importorskip("ray")
    with (
        tempfile.TemporaryDirectory(prefix="opd-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        running_cluster(8, folder) as found,
    ):
        yield found
