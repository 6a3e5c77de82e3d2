"""One deployment with one run for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from stages.home import MotleyHome
from tests.helpers.page_runs import client_of, free_access, write_run


@pytest.fixture(scope="session")
def page_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages")
    write_run(MotleyHome(path))
    return path


@pytest.fixture
def client(page_home: Path) -> TestClient:
    return client_of(page_home, free_access(iterations={"scheduled__iter-1": 1}))
