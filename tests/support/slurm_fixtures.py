from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def cluster(daemons: SlurmCluster) -> Iterator[SlurmCluster]:
    """A Slurm cluster without jobs; jobs of the test before are ended."""
    yield daemons
    daemons.end_jobs()
