import pytest

from services.scheduler import server as server_module
from tests.scheduler.world import World


@pytest.fixture
async def world(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.01)
    world = World(tmp_path)
    yield world
    await world.close()
