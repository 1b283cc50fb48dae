import os
from collections.abc import Iterator

import pytest
import redis


@pytest.fixture(scope="session")
def client() -> Iterator[redis.Redis]:
    with redis.from_url(os.environ["REDIS_URL"]) as client:
        yield client
