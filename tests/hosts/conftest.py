"""Two hosts in one machine, which this package's tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tools.namespaces import TwoHosts


@pytest.fixture(scope="package")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    pytest.importorskip("ray")
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    hosts = TwoHosts(tmp_path_factory.mktemp("hosts"))
    try:
        try:
            hosts.link()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
