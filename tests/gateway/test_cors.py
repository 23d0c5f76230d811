"""CORS: pages of allowed origins may read every answer; nobody is spared a key."""

from pathlib import Path

import pytest

from tests.gateway.house import House, open_house

PAGE = "https://page.example"
PATH = "/v1/chat/completions"
CHAT = [{"role": "user", "content": "Hi"}]
ASKING = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def preflight(house: House, headers: dict[str, str], path: str = PATH):
    async with house.http.options(house.url + path, headers=headers) as response:
        return response.status, response.headers


async def test_nobodys_page_may_unless_told(house: House) -> None:
    status, headers = await preflight(house, ASKING)
    assert status == 405
    async with house.http.get(house.url + "/v1/models", headers={"Origin": PAGE}) as response:
        headers = response.headers
    assert not [name for name in headers if name.startswith("Access-Control") or name == "Vary"]


@pytest.mark.parametrize(("origins", "told"), [((PAGE,), PAGE), (("*",), "*")])
async def test_a_page_that_may_is_told_so(tmp_path: Path, origins, told) -> None:
    async with open_house(tmp_path, allowed_origins=origins, api_key=("sk-x",)) as house:
        status, headers = await preflight(house, ASKING)
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == told
        assert headers["Access-Control-Allow-Headers"] == ASKING["Access-Control-Request-Headers"]
        assert "POST" in headers["Access-Control-Allow-Methods"]
        fields = {"messages": CHAT, "stream": True}
        for sent, status in (({}, 401), ({"Authorization": "Bearer sk-x"}, 200)):
            async with house.http.post(
                house.url + PATH, json=fields, headers={"Origin": PAGE, **sent}
            ) as response:
                assert response.status == status, "a key is needed all the same"
                assert response.headers["Access-Control-Allow-Origin"] == told
                assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
                assert await response.read()


async def test_another_page_is_told_nothing(tmp_path: Path) -> None:
    async with open_house(tmp_path, allowed_origins=(PAGE,)) as house:
        status, headers = await preflight(house, {**ASKING, "Origin": "https://other.example"})
        assert status == 405
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Vary"] == "Origin", "a cache must not give it to the page that may"


async def test_a_client_that_is_no_browser_sees_no_difference(tmp_path: Path) -> None:
    async with open_house(tmp_path, allowed_origins=("*",)) as house:
        async with house.http.get(house.url + "/v1/models") as response:
            assert response.status == 200
            assert "Access-Control-Allow-Origin" not in response.headers
        assert (await preflight(house, {"Origin": PAGE}))[0] == 405, "no preflight: it asks nothing"
