"""A server in another time zone shows and filters the same moments, and tells programs UTC."""

import re
import time
from datetime import UTC, datetime, timedelta

import httpx

from app.web.moments import parse_moment, to_words
from tests.support.server import ServerProcess

NS_PER_S = 10**9
HTML = {"accept": "text/html"}


def read_items(client: httpx.Client, query: str = "") -> list[str]:
    return [item["id"] for item in client.get(f"/api/requests{query}").json()["items"]]


def test_a_server_in_new_york_tells_and_filters_the_right_moments() -> None:
    with (
        ServerProcess("--num-blocks", "64", env={"TZ": "America/New_York"}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        model = client.get("/v1/models").json()["data"][0]["id"]
        before_ns = time.time_ns()
        body = {"model": model, "prompt": "The sea", "max_tokens": 3}
        request_id = client.post("/v1/completions", json=body).json()["id"]
        after_ns = time.time_ns()
        deadline = time.monotonic() + 10
        while client.get(f"/api/requests/{request_id}").json().get("status") != "finished":
            assert time.monotonic() < deadline
        life = client.get(f"/api/requests/{request_id}").json()

        told = [life["arrived"], life["ended"], *(event["time"] for event in life["events"])]
        assert all(text.endswith("Z") for text in told)
        assert all(before_ns - NS_PER_S <= parse_moment(text, "") <= after_ns + NS_PER_S for text in told)

        arrived = datetime.fromisoformat(life["arrived"])
        hour_before = (arrived - timedelta(hours=1)).astimezone(UTC)
        plain = hour_before.strftime("%Y-%m-%dT%H:%M")
        assert read_items(client, f"?since={plain}") == [request_id], "without an offset it is UTC"
        assert read_items(client, f"?until={plain}") == []
        with_offset = hour_before.strftime("%Y-%m-%dT%H:%M:%S") + "-05:00"
        assert read_items(client, f"?since={with_offset}") == [], (
            "five hours later than the same clock in UTC"
        )
        assert read_items(client, f"?until={with_offset}") == [request_id]

        words = to_words(parse_moment(life["arrived"], ""))
        for path in ("/requests", f"/r/{request_id}"):
            page = client.get(path, headers=HTML).text
            assert f'<time datetime="{life["arrived"]}">{words}</time>' in page
        sessions = client.get("/sessions", headers=HTML).text
        (shown,) = set(re.findall(r'<time datetime="([^"]+)">', sessions))
        assert parse_moment(shown, "") <= before_ns
        assert before_ns - parse_moment(shown, "") < 3600 * NS_PER_S
