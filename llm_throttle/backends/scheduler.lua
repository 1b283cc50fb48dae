-- The waiting room of one upstream as one script: the twin of scheduling/scheduler.py.
--
-- The classes and functions below are those of scheduling/, under the same names and in the same
-- order; what they decide is explained there. Comments here are about the store. A test drives
-- both twins with the same commands and compares answers and books.
--
-- KEYS, all with one hash tag:
--   1 core     string  clock, policy, tiers and counters, packed (ledger.load)
--   2 tickets  hash    ticket -> packed record
--   3 queue    zset    all who can be served, of all tiers: score = tier number * 2^42 + turn,
--                      member = lap order_at "!" order_worker "!" order_seq "!" ticket
--   4 timers   zset    ticket by due_at
--   5 owned    zset    worker "!" mark "!" ticket, all with score 0
--   6 flows    hash    flow -> packed record
--   7 workers  hash    worker -> packed record
--   8 holds    list    recent holds, "at:held_ms"
--   9...       lists   inboxes of workers, named in the same order in ARGV
--
-- ARGV: verb, now_ms (0 = the server's clock), worker, seq, acked, server, beat_ms, worker_ttl_ms,
--   recovery_ms, blind_ms, the workers whose inboxes are in KEYS, then what the verb takes:
--   enqueue     ticket, tier, flow, wait_ms ("" = the whole budget), is_known
--   confirm     tickets...
--   release     ticket, is_abnormal
--   cancel      ticket, keep_place, has_expired
--   attach      ticket, flow
--   revoke      ticket, force
--   beat        waiting, ack, label, number of held, (ticket, tier, flow, held_ms)..., seen...
--   reassert    after, upto, is_last, (ticket, tier, flow, waited_ms, left_ms, seq, is_known)...
--   positions   number of tickets, tickets..., flows...
--   set_policy  version, digest, capacity, queue_depth, max_hold_ms, drain_ms, grace_ms,
--               is_paused, (slug, cap, reserved, weight, wait_budget_ms, queue_depth,
--               depth_per_user, usable slots)...
--   tick, sign_off, snapshot: nothing
--
-- Returns {kind, has_more, {worker, kind, ticket, reason, retry_ms, ...}, what the kind has...}:
--   the notices for the caller and for workers without an inbox here, flat; then
--   granted ticket · queued ticket, ahead, wait_ms · refused reason, retry_ms · gone tickets... ·
--   done after_ms · need_policy · policy_stamp version, digest, is_current ·
--   beat_reply number, wants_waiting, version, digest, {granted}, {revoked}, {gone}, {lost},
--   {workers} · places {ticket, flow, ahead, low_ms, high_ms, ...}, {granted}, version,
--   is_recovering · overview capacity, version, digest, in_flight, waiting, is_recovering,
--   {tiers}, {holders}, {workers}, each flat.
--
-- Strings are never compared with "<": that depends on the server's locale (see precedes).
-- Integers stay below 2^53, where doubles are exact, and leave as RESP integers.

local CORE, TICKETS, QUEUE, TIMERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local OWNED, FLOWS, WORKERS, HOLDS = KEYS[5], KEYS[6], KEYS[7], KEYS[8]

local KEEP_MS = 3600000 -- an upstream that no worker speaks of any more leaves nothing behind
local TURNS = 2 ^ 42 -- turns per tier in a score: 2^53 leaves room for 2,048 tiers
local CHUNK = 500 -- fields per HSET: Lua's unpack is bounded by its C stack

local store, pack, unpack_all = redis.call, cmsgpack.pack, cmsgpack.unpack
local floor, min, max = math.floor, math.min, math.max
local format = string.format

-- Raised where an index names what has no record: part of the books was evicted or deleted.
local FORGOTTEN = {}

-- Building a function costs 0.1 us in every call, so each class is built when it is first used.
local function rarely(define)
  return setmetatable({}, {
    __index = function(class, name)
      setmetatable(class, nil)
      define(class)
      return class[name]
    end,
  })
end

-- Byte order, as Python's and the sorted sets' own.
local function precedes(one, other)
  local length = min(#one, #other)
  for i = 1, length do
    local a, b = one:byte(i), other:byte(i)
    if a ~= b then
      return a < b
    end
  end
  return #one < #other
end

local function index_of(list, item)
  for i = 1, list and #list or 0 do
    if list[i] == item then
      return i
    end
  end
  error(FORGOTTEN)
end

local function remove(list, item)
  table.remove(list, index_of(list, item))
end

local ledger = {}
local shares = {}
local workforce = {}
local scheduler = {}

-- estimates.py ------------------------------------------------------------------------------

local MAX_HOLDS = 64
local HOLD_MEMORY_MS = 300000
local REFRESH_MS = 500
local MIN_HOLDS = 20
local BUCKET_MS = 10000
local BUCKETS = 6
local MIN_GRANTS = 5
local DEFAULT_GAP_MS = 1000

local hold_times = rarely(function(hold_times)
  function hold_times.record(now, held_ms)
    local length = store("RPUSH", HOLDS, format("%d:%d", now, held_ms))
    if length >= 2 * MAX_HOLDS then
      store("LTRIM", HOLDS, -MAX_HOLDS, -1)
    end
    local holds = ledger.holds
    if holds.count < MIN_HOLDS or now - holds.refreshed_at >= REFRESH_MS then
      hold_times._refresh(now)
    end
  end

  function hold_times.is_telling(now)
    local holds = ledger.holds
    return holds.count >= MIN_HOLDS and now - holds.refreshed_at < HOLD_MEMORY_MS
  end

  function hold_times._refresh(now)
    local times = {}
    for _, item in ipairs(store("LRANGE", HOLDS, -MAX_HOLDS, -1)) do
      local at, held = item:match("^(.+):(.+)$")
      if tonumber(at) > now - HOLD_MEMORY_MS then
        times[#times + 1] = tonumber(held)
      end
    end
    table.sort(times)
    local holds = ledger.holds
    holds.count = #times
    holds.refreshed_at = now
    holds.p10 = times[floor(#times * 10 / 100) + 1]
    holds.p50 = times[floor(#times * 50 / 100) + 1]
    holds.p90 = times[floor(#times * 90 / 100) + 1]
  end
end)

local grant_rate = {}

function grant_rate.record(rate, now)
  local counts = grant_rate._turn_to(rate, now)
  if grant_rate._sum(counts) == 0 then
    rate.first_at = now
  end
  counts[BUCKETS] = counts[BUCKETS] + 1
end

function grant_rate.gap_ms(rate, now)
  local grants = grant_rate._sum(grant_rate._turn_to(rate, now))
  if grants < MIN_GRANTS then
    return DEFAULT_GAP_MS
  end
  local span = min(now - rate.first_at, (BUCKETS - 1) * BUCKET_MS + now % BUCKET_MS)
  return max(1, floor(span / grants))
end

function grant_rate._turn_to(rate, now)
  local bucket, counts = floor(now / BUCKET_MS), rate.counts
  for _ = 1, min(bucket - rate.bucket, BUCKETS) do
    table.remove(counts, 1)
    counts[BUCKETS] = 0
  end
  rate.bucket = bucket
  return counts
end

function grant_rate._sum(counts)
  local sum = 0
  for i = 1, BUCKETS do
    sum = sum + counts[i]
  end
  return sum
end

-- records.py, and how each record lies in the store -----------------------------------------

local WAITING, PARKED, AWAY = "waiting", "parked", "away"
local GRANTED, REVOKING, DRAINING = "granted", "revoking", "draining"
local ENDED = "ended"

local IN_LINE = { [WAITING] = true, [PARKED] = true, [AWAY] = true }
local IN_FLIGHT = { [GRANTED] = true, [REVOKING] = true, [DRAINING] = true }

local function new_ticket(id, state, worker, seq, tier, flow)
  return {
    id = id,
    state = state,
    worker = worker,
    seq = seq,
    tier = tier or "",
    flow = flow or "",
    due_at = 0,
    order_at = 0,
    order_worker = "",
    order_seq = 0,
    turn = 0,
    lap = 0,
    deadline_at = 0,
    granted_at = 0,
    is_confirmed = false,
    named_in = 0,
    is_known = false,
  }
end

local function pack_ticket(t)
  return pack(
    t.state, t.worker, t.seq, t.tier, t.flow, t.due_at, t.order_at, t.order_worker, t.order_seq,
    t.turn, t.lap, t.deadline_at, t.granted_at, t.is_confirmed, t.named_in, t.is_known
  )
end

local timed = {} -- ticket -> the due_at that the timers have for it

local function unpack_ticket(id, record)
  local state, worker, seq, tier, flow, due_at, order_at, order_worker, order_seq, turn, lap,
    deadline_at, granted_at, is_confirmed, named_in, is_known = unpack_all(record)
  timed[id] = due_at
  return {
    id = id,
    state = state,
    worker = worker,
    seq = seq,
    tier = tier,
    flow = flow,
    due_at = due_at,
    order_at = order_at,
    order_worker = order_worker,
    order_seq = order_seq,
    turn = turn,
    lap = lap,
    deadline_at = deadline_at,
    granted_at = granted_at,
    is_confirmed = is_confirmed,
    named_in = named_in,
    is_known = is_known,
  }
end

-- Whether one ticket comes after another by order of arrival.
local function is_later(one, other)
  if one.order_at ~= other.order_at then
    return one.order_at > other.order_at
  end
  if one.order_worker ~= other.order_worker then
    return precedes(other.order_worker, one.order_worker)
  end
  return one.order_seq > other.order_seq
end

local function pack_flow(flow)
  return pack(flow.held, flow.lines, flow.away)
end

local function unpack_flow(_, record)
  local held, lines, away = unpack_all(record)
  return { held = held, lines = lines, away = away }
end

local function depth(flow)
  local count = #flow.held - #flow.away
  for _, line in pairs(flow.lines) do
    count = count + #line
  end
  return count
end

local function pack_worker(w)
  return pack(
    w.beat_at, w.label, w.seq, w.beat_seq, w.past_beat_seq, w.mismatches,
    w.is_suspect, w.is_dead, w.has_left, w.has_parked
  )
end

local function unpack_worker(id, record)
  local beat_at, label, seq, beat_seq, past_beat_seq, mismatches, is_suspect, is_dead, has_left,
    has_parked = unpack_all(record)
  return {
    id = id,
    beat_at = beat_at,
    label = label,
    seq = seq,
    beat_seq = beat_seq,
    past_beat_seq = past_beat_seq,
    mismatches = mismatches,
    is_suspect = is_suspect,
    is_dead = is_dead,
    has_left = has_left,
    has_parked = has_parked,
  }
end

-- A hash as a table of records, each read when it is first asked for; false = there is none.
local function opened(key, unpack_record)
  local raw = {}
  local cache = setmetatable({}, {
    __index = function(cache, id)
      local record = store("HGET", key, id)
      raw[id] = record
      cache[id] = record and unpack_record(id, record)
      return cache[id]
    end,
  })
  return cache, raw
end

-- Write back the records that differ from what was read.
local function save(key, cache, raw, pack_record)
  local changed, deleted = {}, {}
  for id, item in pairs(cache) do
    if item then
      local record = pack_record(item)
      if record ~= raw[id] then
        changed[#changed + 1] = id
        changed[#changed + 1] = record
      end
    elseif raw[id] then
      deleted[#deleted + 1] = id
    end
  end
  for i = 1, #changed, CHUNK do
    store("HSET", key, unpack(changed, i, min(i + CHUNK - 1, #changed)))
  end
  for i = 1, #deleted, CHUNK do
    store("HDEL", key, unpack(deleted, i, min(i + CHUNK - 1, #deleted)))
  end
end

-- fair_queue.py -----------------------------------------------------------------------------

local FIRST_LAP, SECOND_LAP = 0, 1

local fair_queue = rarely(function(fair_queue)
  -- Tickets that lie before those of this tier in the common sorted set.
  function fair_queue._base(tier)
    local count = 0
    for _, other in pairs(ledger.tiers) do
      if other.number < tier.number then
        count = count + other.ready
      end
    end
    return count
  end

  function fair_queue._member(ticket)
    return format(
      "%d%014d!%s!%012d!%s",
      ticket.lap, ticket.order_at, ticket.order_worker, ticket.order_seq, ticket.id
    )
  end

  function fair_queue._score(tier, ticket)
    return format("%.0f", tier.number * TURNS + ticket.turn)
  end

  function fair_queue.at(tier, rank)
    local index = fair_queue._base(tier) + rank
    local member = store("ZRANGE", QUEUE, index, index)[1]
    return ledger.known(member and member:match("[^!]*$"))
  end

  function fair_queue.ahead(tier, ticket)
    local member = fair_queue._member(ticket)
    local rank = store("ZRANK", QUEUE, member)
    if not rank then -- one that cannot be served now: look where it would stand
      store("ZADD", QUEUE, fair_queue._score(tier, ticket), member)
      rank = store("ZRANK", QUEUE, member)
      store("ZREM", QUEUE, member)
    end
    return rank - fair_queue._base(tier)
  end

  function fair_queue.join(tier, ticket, line)
    local last = line[#line] and ledger.known(line[#line])
    local turn = max(tier.turn, last and last.turn or tier.turn) + 1
    local index = #line + 1
    while index > 1 and is_later(ledger.known(line[index - 1]), ticket) do
      index = index - 1
    end
    local places = fair_queue._places(line, index)
    places[#places + 1] = { turn, last and SECOND_LAP or FIRST_LAP }
    table.insert(line, index, ticket.id)
    fair_queue._assign(tier, line, places, index)
    tier.in_line = tier.in_line + 1
  end

  function fair_queue.leave(tier, ticket, line)
    local index = index_of(line, ticket.id)
    local places = fair_queue._places(line, index)
    fair_queue.pause(tier, ticket)
    table.remove(line, index)
    fair_queue._assign(tier, line, places, index)
    tier.in_line = tier.in_line - 1
  end

  function fair_queue.serve(tier, ticket, line)
    fair_queue.pause(tier, ticket)
    remove(line, ticket.id)
    tier.turn = max(tier.turn, ticket.turn)
    if line[1] and ledger.known(line[1]).turn <= tier.turn then
      fair_queue._catch_up(tier, line)
    end
    tier.in_line = tier.in_line - 1
  end

  function fair_queue.resume(tier, ticket)
    if ticket.state == WAITING then
      local score, member = fair_queue._score(tier, ticket), fair_queue._member(ticket)
      tier.ready = tier.ready + store("ZADD", QUEUE, score, member)
    end
  end

  function fair_queue.pause(tier, ticket)
    tier.ready = tier.ready - store("ZREM", QUEUE, fair_queue._member(ticket))
  end

  function fair_queue._catch_up(tier, line)
    local last, places = tier.turn, {}
    for i, place in ipairs(fair_queue._places(line, 1)) do
      last = max(place[1], last + 1)
      places[i] = { last, place[1] == last and place[2] or SECOND_LAP }
    end
    fair_queue._assign(tier, line, places, 1)
  end

  -- The places from ``start`` on: those before it do not change.
  function fair_queue._places(line, start)
    local places = {}
    for i = start, #line do
      local ticket = ledger.known(line[i])
      places[#places + 1] = { ticket.turn, ticket.lap }
    end
    return places
  end

  function fair_queue._assign(tier, line, places, start)
    for i = start, #line do
      local ticket, place = ledger.known(line[i]), places[i - start + 1]
      if ticket.turn ~= place[1] or ticket.lap ~= place[2] then
        fair_queue.pause(tier, ticket)
        ticket.turn, ticket.lap = place[1], place[2]
        fair_queue.resume(tier, ticket)
      end
    end
  end
end)

-- policy.py ---------------------------------------------------------------------------------

local UNLIMITED = 2 ^ 31 - 1

local function unpack_policy(record)
  local version, digest, capacity, queue_depth, max_hold_ms, drain_ms, grace_ms, is_paused, tiers =
    unpack_all(record)
  local policy = {
    version = version,
    digest = digest,
    capacity = capacity,
    queue_depth = queue_depth,
    max_hold_ms = max_hold_ms,
    drain_ms = drain_ms,
    grace_ms = grace_ms,
    is_paused = is_paused,
    tiers = {},
    by_slug = {},
  }
  for i, t in ipairs(tiers) do
    policy.tiers[i] = {
      slug = t[1],
      cap = t[2],
      reserved = t[3],
      weight = t[4],
      wait_budget_ms = t[5],
      queue_depth = t[6],
      depth_per_user = t[7],
      usable_slots = t[8],
    }
    policy.by_slug[t[1]] = policy.tiers[i]
  end
  return policy
end

-- ledger.py ---------------------------------------------------------------------------------

local MAX_AWAY_UNBOUNDED = 100
local TOMBSTONE_BEATS = 2

local tickets_raw, flows_raw, workers_raw

function ledger.load(timing)
  ledger.timing = timing
  timed = {}
  ledger.tickets, tickets_raw = opened(TICKETS, unpack_ticket)
  ledger.flows, flows_raw = opened(FLOWS, unpack_flow)
  ledger.workers, workers_raw = opened(WORKERS, unpack_worker)
  ledger.notices, ledger.has_more, ledger.has_all_workers = {}, 0, false
  ledger.tiers = {}
  local record = store("GET", CORE)
  scheduler.is_new = not record
  if not record then
    store("DEL", unpack(KEYS, 1, 8))
    record = pack(0, 0, "", 0, 0, 0, 0, 0, false, false, 0, 0, 0, 0, 0, {})
  end
  local clock, offset, server, passed, judge_at, edited_at, in_flight, away, recovery, policy,
    count, p10, p50, p90, refreshed_at, tiers = unpack_all(record)
  ledger.now, ledger.in_flight, ledger.away = clock, in_flight, away
  ledger.policy_record = policy
  ledger.policy = policy and unpack_policy(policy)
  ledger.holds = { count = count, p10 = p10, p50 = p50, p90 = p90, refreshed_at = refreshed_at }
  ledger.edited_at = edited_at
  scheduler.offset, scheduler.server = offset, server
  shares.passed = passed
  workforce.judge_at = judge_at
  workforce.recovery = recovery
    and { since = recovery[1], awaited = recovery[2], heard = recovery[3] }
  for _, t in ipairs(tiers) do
    ledger.tiers[t[1]] = {
      slug = t[1],
      number = t[2],
      passed = t[3],
      in_flight = t[4],
      waiting = t[5],
      ready = t[6],
      in_line = t[7],
      turn = t[8],
      return_at = t[9],
      rate = { bucket = t[10], first_at = t[11], counts = t[12] },
    }
  end
end

function ledger.save()
  save(TICKETS, ledger.tickets, tickets_raw, pack_ticket)
  save(FLOWS, ledger.flows, flows_raw, pack_flow)
  save(WORKERS, ledger.workers, workers_raw, pack_worker)
  ledger._save_timers()
  local tiers = {}
  for slug, t in pairs(ledger.tiers) do
    tiers[#tiers + 1] = {
      slug, t.number, t.passed, t.in_flight, t.waiting, t.ready, t.in_line, t.turn, t.return_at,
      t.rate.bucket, t.rate.first_at, t.rate.counts,
    }
  end
  local holds, recovery = ledger.holds, workforce.recovery
  local record = pack(
    ledger.now, scheduler.offset, scheduler.server, shares.passed, workforce.judge_at,
    ledger.edited_at, ledger.in_flight, ledger.away,
    recovery and { recovery.since, recovery.awaited, recovery.heard }, ledger.policy_record,
    holds.count, holds.p10, holds.p50, holds.p90, holds.refreshed_at, tiers
  )
  store("SET", CORE, record, "PX", KEEP_MS)
end

function ledger._save_timers()
  local set, unset = {}, {}
  for id, ticket in pairs(ledger.tickets) do
    local due_at, was = ticket and ticket.due_at or 0, timed[id] or 0
    if due_at ~= was and due_at ~= 0 then
      set[#set + 1] = due_at
      set[#set + 1] = id
    elseif due_at ~= was then
      unset[#unset + 1] = id
    end
  end
  for i = 1, #set, CHUNK do
    store("ZADD", TIMERS, unpack(set, i, min(i + CHUNK - 1, #set)))
  end
  for i = 1, #unset, CHUNK do
    store("ZREM", TIMERS, unpack(unset, i, min(i + CHUNK - 1, #unset)))
  end
end

-- A ticket that an index names.
function ledger.known(id)
  local ticket = id and ledger.tickets[id]
  if not ticket then
    error(FORGOTTEN)
  end
  return ticket
end

-- Read many tickets in one go.
function ledger.fetch(ids)
  for start = 1, #ids, CHUNK do
    local stop = min(start + CHUNK - 1, #ids)
    local records = store("HMGET", TICKETS, unpack(ids, start, stop))
    for i = start, stop do
      local id, record = ids[i], records[i - start + 1]
      if rawget(ledger.tickets, id) == nil then
        tickets_raw[id] = record
        ledger.tickets[id] = record and unpack_ticket(id, record)
      end
    end
  end
end

-- All workers' ids in order.
function ledger.roster()
  if not ledger.has_all_workers then
    local found = store("HGETALL", WORKERS)
    for i = 1, #found, 2 do
      local id, record = found[i], found[i + 1]
      if rawget(ledger.workers, id) == nil then
        workers_raw[id] = record
        ledger.workers[id] = unpack_worker(id, record)
      end
    end
    ledger.has_all_workers = true
  end
  local ids = {}
  for id, worker in pairs(ledger.workers) do
    if worker then
      ids[#ids + 1] = id
    end
  end
  table.sort(ids, precedes)
  return ids
end

function ledger.waiting()
  local count = 0
  for _, tier in pairs(ledger.tiers) do
    count = count + tier.waiting
  end
  return count
end

function ledger.join_line(ticket)
  ledger.tickets[ticket.id] = ticket
  local tier = ledger.tier(ticket.tier)
  local lines = ledger.flow(ticket.flow).lines
  lines[ticket.tier] = lines[ticket.tier] or {}
  fair_queue.join(tier, ticket, lines[ticket.tier])
  tier.waiting = tier.waiting + 1
  ledger.set_timer(ticket, ticket.deadline_at)
  ledger.own(ticket)
end

function ledger.leave_line(ticket)
  local flow, tier = ledger.flow(ticket.flow), ledger.tiers[ticket.tier]
  ledger.disown(ticket)
  fair_queue.leave(tier, ticket, flow.lines[ticket.tier])
  if ticket.state == AWAY then
    remove(flow.away, ticket.id)
    ledger.away = ledger.away - 1
  else
    tier.waiting = tier.waiting - 1
  end
  ledger._drop_line(flow, ticket)
end

function ledger.serve(ticket)
  local flow, tier = ledger.flow(ticket.flow), ledger.tiers[ticket.tier]
  ledger.disown(ticket)
  fair_queue.serve(tier, ticket, flow.lines[ticket.tier])
  tier.waiting = tier.waiting - 1
  ledger._drop_line(flow, ticket)
  ledger.hold(ticket, ledger.now)
end

function ledger.park(ticket)
  fair_queue.pause(ledger.tiers[ticket.tier], ticket)
  ledger.disown(ticket)
  ticket.state = PARKED
  ledger.own(ticket)
end

function ledger.make_ready(ticket)
  local tier = ledger.tiers[ticket.tier]
  ledger.disown(ticket)
  if ticket.state == AWAY then
    remove(ledger.flow(ticket.flow).away, ticket.id)
    ledger.away = ledger.away - 1
    tier.waiting = tier.waiting + 1
  end
  ticket.state = WAITING
  fair_queue.resume(tier, ticket)
  ledger.set_timer(ticket, ticket.deadline_at)
  ledger.own(ticket)
end

function ledger.send_away(ticket, since)
  local policy, flow = ledger.policy, ledger.flow(ticket.flow)
  if ticket.state == AWAY then
    return true
  end
  if not policy or not policy.by_slug[ticket.tier] or policy.grace_ms == 0 then
    return false
  end
  local bound = policy.queue_depth
  local most = bound == UNLIMITED and MAX_AWAY_UNBOUNDED or floor(bound / 4)
  if #flow.away > 0 or ledger.away >= most then
    return false
  end
  ledger.disown(ticket)
  local tier = ledger.tiers[ticket.tier]
  fair_queue.pause(tier, ticket)
  tier.waiting = tier.waiting - 1
  ticket.state = AWAY
  flow.away[#flow.away + 1] = ticket.id
  ledger.away = ledger.away + 1
  ledger.set_timer(ticket, min(ticket.deadline_at, since + policy.grace_ms))
  return true
end

function ledger.hold(ticket, granted_at)
  ledger.tickets[ticket.id] = ticket
  local tier = ledger.tier(ticket.tier)
  tier.in_flight = tier.in_flight + 1
  ledger.in_flight = ledger.in_flight + 1
  ticket.state = GRANTED
  ticket.granted_at = granted_at
  local held = ledger.flow(ticket.flow).held
  held[#held + 1] = ticket.id
  ledger.limit_hold(ticket)
  ledger.own(ticket)
end

function ledger.limit_hold(ticket)
  if ticket.state == GRANTED then
    local max_hold_ms = ledger.policy and ledger.policy.max_hold_ms or 0
    ledger.set_timer(ticket, max_hold_ms > 0 and ticket.granted_at + max_hold_ms or 0)
  end
end

function ledger.start_revoking(ticket)
  if ticket.state == GRANTED then
    ticket.state = REVOKING
    ledger.set_timer(ticket, 0)
  end
  ledger.tell(ticket, "revoked")
end

function ledger.give_back(ticket, drain)
  local drain_ms = ledger.policy and ledger.policy.drain_ms or 0
  if not drain or drain_ms == 0 then
    ledger.free(ticket)
    return 0
  end
  ledger.disown(ticket)
  ledger._unhold(ticket)
  ticket.state = DRAINING
  ledger.set_timer(ticket, ledger.now + drain_ms)
  return drain_ms
end

function ledger.free(ticket)
  if ticket.state ~= DRAINING then
    ledger.disown(ticket)
    ledger._unhold(ticket)
  end
  ledger.in_flight = ledger.in_flight - 1
  local tier = ledger.tiers[ticket.tier]
  tier.in_flight = tier.in_flight - 1
  ledger.end_(ticket)
end

function ledger._unhold(ticket)
  local flow = ledger.flow(ticket.flow)
  remove(flow.held, ticket.id)
  ledger._drop_flow(ticket.flow, flow)
end

function ledger.end_(ticket)
  ticket.state = ENDED
  local worker = ledger.workers[ticket.worker]
  ticket.seq = max(ticket.seq, worker and worker.seq or 0)
  ledger.set_timer(ticket, ledger.now + TOMBSTONE_BEATS * ledger.timing.beat_ms)
end

function ledger.bar(id, worker, seq)
  local ticket = new_ticket(id, ENDED, worker, seq)
  ledger.tickets[id] = ticket
  ledger.set_timer(ticket, ledger.now + TOMBSTONE_BEATS * ledger.timing.beat_ms)
end

function ledger.forget_or_keep(tombstone)
  local worker = ledger.workers[tombstone.worker]
  if not worker or worker.is_dead or worker.past_beat_seq >= tombstone.seq then
    ledger.drop(tombstone)
  else
    ledger.set_timer(tombstone, ledger.now + ledger.timing.beat_ms)
  end
end

function ledger.drop(ticket)
  ledger.tickets[ticket.id] = false
end

function ledger.tell(ticket, kind, reason, retry_ms)
  local notices = ledger.notices
  notices[#notices + 1] = { ticket.worker, kind, ticket.id, reason or "", retry_ms or 0 }
end

function ledger.tier(slug)
  local tier = ledger.tiers[slug]
  if not tier then
    tier = {
      slug = slug,
      number = ledger._free_number(),
      passed = 0,
      in_flight = 0,
      waiting = 0,
      ready = 0,
      in_line = 0,
      turn = 0,
      return_at = 0,
      rate = { bucket = 0, first_at = 0, counts = { 0, 0, 0, 0, 0, 0 } },
    }
    ledger.tiers[slug] = tier
  end
  return tier
end

function ledger._free_number()
  local taken = {}
  for _, tier in pairs(ledger.tiers) do
    taken[tier.number] = true
  end
  local number = 0
  while taken[number] do
    number = number + 1
  end
  return number
end

function ledger.flow(id)
  local flow = ledger.flows[id]
  if not flow then
    flow = { held = {}, lines = {}, away = {} }
    ledger.flows[id] = flow
  end
  return flow
end

-- The sorted set of timers follows when the books are saved: nobody reads it in between.
function ledger.set_timer(ticket, due_at)
  ticket.due_at = due_at
end

function ledger.owned_by(worker, marks, limit, after, upto)
  local found = {}
  for mark in marks:gmatch(".") do
    local prefix = worker .. "!" .. mark .. "!"
    local low, high = "(" .. prefix .. (after or ""), "[" .. prefix .. (upto or "~")
    local room = limit and limit - #found or -1
    local members = store("ZRANGEBYLEX", OWNED, low, high, "LIMIT", 0, room)
    for i = 1, #members do
      members[i] = members[i]:sub(#prefix + 1)
    end
    ledger.fetch(members)
    for i = 1, #members do
      found[#found + 1] = ledger.known(members[i])
    end
  end
  return found
end

function ledger.count_owned(worker, marks)
  local count = 0
  for mark in marks:gmatch(".") do
    local prefix = worker .. "!" .. mark
    -- '"' is the character after "!".
    count = count + store("ZLEXCOUNT", OWNED, "[" .. prefix .. "!", "(" .. prefix .. '"')
  end
  return count
end

function ledger.own(ticket)
  store("ZADD", OWNED, 0, ticket.worker .. "!" .. ledger._mark(ticket) .. "!" .. ticket.id)
end

function ledger.disown(ticket)
  store("ZREM", OWNED, ticket.worker .. "!" .. ledger._mark(ticket) .. "!" .. ticket.id)
end

function ledger._mark(ticket)
  if ticket.state == PARKED then
    return "p"
  end
  return IN_LINE[ticket.state] and "w" or "g"
end

function ledger._drop_line(flow, ticket)
  if #flow.lines[ticket.tier] == 0 then
    flow.lines[ticket.tier] = nil
  end
  ledger._drop_flow(ticket.flow, flow)
end

function ledger._drop_flow(id, flow)
  if #flow.held == 0 and not next(flow.lines) then
    ledger.flows[id] = false
  end
end

-- forecast.py -------------------------------------------------------------------------------

local EDIT_QUIET_MS = 1000
local SAMPLES = 16
local RETURN_HORIZON_MS = 60000

local forecast = rarely(function(forecast)
  function forecast.refuse(reason, slug)
    local tier = ledger.tiers[slug]
    local gap = grant_rate.gap_ms(tier.rate, ledger.now)
    local return_at = max(tier.return_at, ledger.now + tier.waiting * gap) + gap
    tier.return_at = min(return_at, ledger.now + RETURN_HORIZON_MS)
    return { "refused", reason, tier.return_at - ledger.now }
  end

  function forecast.next_release(flow)
    if #flow.held == 0 or not hold_times.is_telling(ledger.now) then
      return 0
    end
    local oldest
    for _, id in ipairs(flow.held) do
      local granted_at = ledger.known(id).granted_at
      oldest = min(oldest or granted_at, granted_at)
    end
    return max(1, oldest + ledger.holds.p50 - ledger.now)
  end

  function forecast.would_miss(tier, ahead, wait_ms)
    local holds, now = ledger.holds, ledger.now
    if not hold_times.is_telling(now) or now - ledger.edited_at < EDIT_QUIET_MS then
      return false
    end
    local slots = tier.usable_slots
    if floor(ahead / slots) * holds.p10 <= wait_ms then
      return false
    end
    return floor(forecast._staying(tier.slug, ahead, slots) / slots) * holds.p10 > wait_ms
  end

  function forecast._staying(slug, ahead, slots)
    local tier = ledger.tiers[slug]
    local step = math.ceil(ahead / SAMPLES)
    local staying = 0
    for rank = 0, ahead - 1, step do
      local start_at = ledger.now + floor(staying / slots) * ledger.holds.p10
      if fair_queue.at(tier, rank).deadline_at >= start_at then
        staying = staying + min(step, ahead - rank)
      end
    end
    return staying
  end

  function forecast.place(ticket)
    local tier = ledger.tiers[ticket.tier]
    local ahead = fair_queue.ahead(tier, ticket)
    local gap = grant_rate.gap_ms(tier.rate, ledger.now)
    local low = floor(ahead * gap * 7 / 10)
    local high = floor((ahead + 1) * gap * 13 / 10) + ledger.holds.p10
    return ahead, low, high
  end
end)

-- shares.py ---------------------------------------------------------------------------------

local SCALE = 2 ^ 32
local REBASE_AT = 2 ^ 50
local REBASE_TO = 2 ^ 42

function shares.next_tier(policy)
  local best, best_passed
  local count = 0
  for _, tier in ipairs(policy.tiers) do
    local state = ledger.tiers[tier.slug]
    if state.ready > 0 and shares.is_entitled(policy, tier) then
      count = count + 1
      local passed = state.passed
      -- The tiers come in byte order, so of equals the first stays.
      if
        not best
        or passed < best_passed
        or (passed == best_passed and tier.weight > best.weight)
      then
        best, best_passed = tier, passed
      end
    end
  end
  shares.is_contested = count > 1
  return best
end

function shares.is_entitled(policy, tier)
  local tiers = ledger.tiers
  local free = policy.capacity - ledger.in_flight
  local held = tiers[tier.slug].in_flight
  if free < 1 or held >= tier.cap then
    return false
  end
  if held < tier.reserved then
    return true
  end
  local reserved = 0
  for _, other in ipairs(policy.tiers) do
    if other ~= tier then
      reserved = reserved + max(0, other.reserved - tiers[other.slug].in_flight)
    end
  end
  return free > reserved
end

function shares.charge(tier)
  local state = ledger.tiers[tier.slug]
  if shares.is_contested then
    shares.passed = max(state.passed, shares.passed)
  end
  state.passed = shares.passed + floor(SCALE / tier.weight)
  grant_rate.record(state.rate, ledger.now)
  if shares.passed >= REBASE_AT then
    shares._rebase()
  end
end

function shares.adapt(policy)
  for _, tier in ipairs(policy.tiers) do
    local state = ledger.tier(tier.slug)
    state.passed = min(state.passed, shares.passed + floor(SCALE / tier.weight))
  end
end

function shares._rebase()
  local moved = shares.passed - REBASE_TO
  for _, state in pairs(ledger.tiers) do
    state.passed = max(0, state.passed - moved)
  end
  shares.passed = REBASE_TO
end

-- recovery.py -------------------------------------------------------------------------------

local recovery_ = rarely(function(recovery_)
  function recovery_.expect(recovery, workers)
    for _, id in ipairs(workers) do
      recovery.awaited[id] = true
    end
  end

  function recovery_.earliest_end(recovery)
    local timing = ledger.timing
    return recovery.since + (next(recovery.awaited) and timing.recovery_ms or timing.blind_ms)
  end

  function recovery_.latest_end(recovery)
    return recovery.since + ledger.timing.worker_ttl_ms
  end

  function recovery_.is_over(recovery, now)
    if now >= recovery_.latest_end(recovery) then
      return true
    end
    if now < recovery_.earliest_end(recovery) then
      return false
    end
    for id in pairs(recovery.awaited) do
      if not recovery.heard[id] then
        return false
      end
    end
    return true
  end
end)

-- workforce.py ------------------------------------------------------------------------------

local SWEEP = 64
local FORGET_AFTER = 30

local HOLDS_SLOT = { [GRANTED] = true, [REVOKING] = true }

function workforce.is_behind(call)
  local worker = ledger.workers[call.worker]
  return call.acked > (worker and worker.seq or 0)
end

function workforce.expects_beats()
  for _, id in ipairs(ledger.roster()) do
    local worker = ledger.workers[id]
    if not (worker.has_left or worker.is_dead) then
      return true
    end
  end
  return false
end

function workforce.start_recovery()
  local awaited = {}
  for _, id in ipairs(ledger.roster()) do
    local worker = ledger.workers[id]
    if not (worker.has_left or worker.is_dead) then
      worker.beat_at = ledger.now
      awaited[id] = true
    end
  end
  if ledger.timing.recovery_ms > 0 then
    workforce.recovery = { since = ledger.now, awaited = awaited, heard = {} }
  end
end

function workforce.end_recovery()
  if workforce.recovery and recovery_.is_over(workforce.recovery, ledger.now) then
    workforce.recovery = false
    workforce.judge_at = 0
  end
end

function workforce.touch(call)
  if call.worker == "" then
    return
  end
  local worker = ledger.workers[call.worker]
  if not worker then
    worker = {
      id = call.worker,
      beat_at = ledger.now,
      label = "",
      seq = 0,
      beat_seq = 0,
      past_beat_seq = 0,
      mismatches = 0,
      is_suspect = false,
      is_dead = false,
      has_left = false,
      has_parked = false,
    }
    ledger.workers[call.worker] = worker
    workforce.judge_at = 0
  end
  worker.seq = max(worker.seq, call.seq)
  if worker.has_parked and not workforce.is_silent(worker.id) then
    workforce._unpark(worker)
  end
end

function workforce.judge(speaker)
  if workforce.recovery or ledger.now < workforce.judge_at then
    return
  end
  workforce.judge_at = ledger.now + ledger.timing.suspect_ms
  workforce._room = SWEEP
  for _, id in ipairs(ledger.roster()) do
    local due_at = workforce._judge(ledger.workers[id], speaker)
    if due_at > 0 then
      workforce.judge_at = min(workforce.judge_at, due_at)
    end
  end
end

function workforce._judge(worker, speaker)
  local timing = ledger.timing
  local silent = ledger.now - worker.beat_at
  if worker.has_left or silent >= timing.worker_ttl_ms then
    worker.is_dead = true
    if workforce._bury(worker) then
      return ledger.now
    end
    local ttls = worker.has_left and 1 or FORGET_AFTER
    local forget_at = worker.beat_at + ttls * timing.worker_ttl_ms
    if ledger.now >= forget_at then
      if worker.id == speaker then
        return ledger.now
      end
      ledger.workers[worker.id] = false
      return 0
    end
    return forget_at
  end
  if silent <= timing.suspect_ms then
    return worker.beat_at + timing.suspect_ms + 1
  end
  if not worker.is_suspect then
    worker.is_suspect = true
    workforce._pass_on_unconfirmed(worker)
  end
  return worker.beat_at + timing.worker_ttl_ms
end

function workforce._pass_on_unconfirmed(worker)
  for _, ticket in ipairs(ledger.owned_by(worker.id, "g")) do
    if ticket.state == GRANTED and not ticket.is_confirmed then
      ledger.free(ticket)
    end
  end
end

function workforce._bury(worker)
  local room = workforce._room
  local tickets = ledger.owned_by(worker.id, "gwp", room + 1)
  for i = 1, min(#tickets, room) do
    local ticket = tickets[i]
    if IN_FLIGHT[ticket.state] then
      ledger.free(ticket)
    elseif not (ticket.is_known and ledger.send_away(ticket, worker.beat_at)) then
      ledger.leave_line(ticket)
      ledger.end_(ticket)
    end
  end
  workforce._room = room - min(room, #tickets)
  local has_more = #tickets > room
  if has_more then
    ledger.has_more = 1
  end
  return has_more
end

function workforce.is_silent(id)
  local worker = ledger.workers[id] or error(FORGOTTEN)
  return worker.is_suspect or worker.is_dead
end

function workforce.is_too_late(call)
  local worker = ledger.workers[call.worker]
  return worker.is_dead or call.seq <= worker.beat_seq
end

function workforce.sign_off(call)
  local worker = ledger.workers[call.worker]
  worker.has_left, worker.is_dead = true, true
  worker.beat_at = ledger.now
  worker.beat_seq = max(worker.beat_seq, call.seq)
  worker.past_beat_seq = worker.beat_seq
  if workforce.recovery then
    workforce.recovery.heard[call.worker] = true
  end
  workforce.judge_at = 0
  workforce.end_recovery()
  workforce.judge()
end

function workforce.beat(call, beat)
  local worker = ledger.workers[call.worker]
  if call.seq <= worker.beat_seq then
    local reply = workforce._reply(call)
    reply[2] = 0
    return reply
  end
  local was_dead = worker.is_dead
  worker.is_dead, worker.has_left = false, false
  worker.beat_at, worker.label = ledger.now, beat.label
  worker.past_beat_seq, worker.beat_seq = worker.beat_seq, call.seq
  workforce._unpark(worker)
  local gone, lost = workforce._hear_of_held(call, beat, was_dead)
  local granted = workforce._name_grants(call, beat)
  local wants_waiting = workforce._wants_waiting(worker, beat)
  if workforce.recovery then
    recovery_.expect(workforce.recovery, beat.seen)
    if beat.waiting == 0 then
      workforce.recovery.heard[worker.id] = true
    end
    workforce.end_recovery()
  end
  local revoked = workforce._revoking(worker)
  return workforce._reply(call, granted, revoked, gone, lost, wants_waiting)
end

function workforce._reply(call, granted, revoked, gone, lost, wants_waiting)
  local policy, workers = ledger.policy, {}
  for _, id in ipairs(ledger.roster()) do
    if not ledger.workers[id].is_dead then
      workers[#workers + 1] = id
    end
  end
  return {
    "beat_reply",
    call.seq,
    wants_waiting and 1 or 0,
    policy and policy.version or 0,
    policy and policy.digest or "",
    granted or {},
    revoked or {},
    gone or {},
    lost or {},
    workers,
  }
end

function workforce._unpark(worker)
  worker.is_suspect = false
  local parked = ledger.owned_by(worker.id, "p", SWEEP + 1)
  for i = 1, min(#parked, SWEEP) do
    ledger.make_ready(parked[i])
  end
  worker.has_parked = #parked > SWEEP
  if worker.has_parked then
    ledger.has_more = 1
  end
end

function workforce._hear_of_held(call, beat, was_dead)
  local gone, lost = {}, {}
  for _, item in ipairs(beat.held) do
    local ticket = ledger.tickets[item.ticket]
    if not ticket or (was_dead and ticket.state == ENDED) then
      workforce._rebuild(call, item)
      if was_dead then
        lost[#lost + 1] = item.ticket
      end
    elseif workforce.is_held(call, ticket) then
      ticket.is_confirmed = true
      if ticket.due_at == 0 then
        ledger.limit_hold(ticket)
      end
    elseif ticket.worker ~= call.worker or ticket.seq <= call.seq then
      gone[#gone + 1] = item.ticket
    end
  end
  return gone, lost
end

function workforce.is_held(call, ticket)
  if ticket.worker ~= call.worker then
    return false
  end
  if IN_LINE[ticket.state] then
    ledger.leave_line(ticket)
    ledger.hold(ticket, ledger.now)
  end
  return HOLDS_SLOT[ticket.state] or false
end

function workforce._rebuild(call, item)
  if ledger.tickets[item.ticket] then
    ledger.drop(ledger.tickets[item.ticket])
  end
  local ticket = new_ticket(item.ticket, GRANTED, call.worker, call.seq, item.tier, item.flow)
  ticket.is_confirmed = true
  ledger.hold(ticket, ledger.now - item.held_ms)
end

function workforce._name_grants(call, beat)
  local listed, named = {}, {}
  for _, item in ipairs(beat.held) do
    listed[item.ticket] = true
  end
  for _, ticket in ipairs(ledger.owned_by(call.worker, "g")) do
    if not (listed[ticket.id] or ticket.seq > call.seq) then
      if ticket.named_in > 0 and beat.ack >= ticket.named_in then
        ledger.give_back(ticket, ticket.is_confirmed)
      else
        if ticket.named_in == 0 then
          ticket.named_in = call.seq
        end
        named[#named + 1] = ticket.id
      end
    end
  end
  return named
end

function workforce._revoking(worker)
  local revoking = {}
  for _, ticket in ipairs(ledger.owned_by(worker.id, "g")) do
    if ticket.state == REVOKING then
      revoking[#revoking + 1] = ticket.id
    end
  end
  return revoking
end

function workforce._wants_waiting(worker, beat)
  if workforce.recovery then
    return beat.waiting > 0 and not workforce.recovery.heard[worker.id]
  end
  local is_equal = ledger.count_owned(worker.id, "wp") == beat.waiting
  worker.mismatches = is_equal and 0 or worker.mismatches + 1
  return worker.mismatches >= 2
end

function workforce.reassert(call, command)
  local gone, listed, room = {}, {}, SWEEP
  for _, item in ipairs(command.waiting) do
    if not workforce._is_back(call, item) then
      gone[#gone + 1] = item.ticket
    end
    room = room + (listed[item.ticket] and 0 or 1)
    listed[item.ticket] = true
  end
  local tickets = ledger.owned_by(call.worker, "wp", room + 1, command.after, command.upto)
  for i = 1, min(#tickets, room) do
    local ticket = tickets[i]
    if not listed[ticket.id] and ticket.seq <= call.seq then
      ledger.leave_line(ticket)
      ledger.end_(ticket)
    end
  end
  if command.is_last then
    if #tickets <= room then
      ledger.workers[call.worker].mismatches = 0
    end
    if workforce.recovery then
      workforce.recovery.heard[call.worker] = true
      workforce.end_recovery()
    end
  end
  return gone
end

function workforce._is_back(call, item)
  local ticket = ledger.tickets[item.ticket]
  if not ticket then
    if not ledger.policy or not ledger.policy.by_slug[item.tier] then
      return false
    end
    ledger.join_line(workforce._rebuilt_waiter(call, item))
    return true
  end
  local is_mine = ticket.worker == call.worker
  if is_mine and ticket.state == AWAY and ticket.seq <= call.seq then
    ledger.make_ready(ticket)
  end
  return is_mine and ticket.state ~= ENDED
end

function workforce._rebuilt_waiter(call, item)
  local now = ledger.now
  local ticket = new_ticket(item.ticket, WAITING, call.worker, item.seq, item.tier, item.flow)
  ticket.order_at = now - item.waited_ms
  ticket.order_worker = call.worker
  ticket.order_seq = item.seq
  ticket.deadline_at = now + item.left_ms
  ticket.is_known = item.is_known
  return ticket
end

-- scheduler.py ------------------------------------------------------------------------------

local MAX_GRANTS = 64
local MAX_PASSED_OVER = 32
local MAX_HOLDERS = 256

-- Reads the arguments one after the other.
local arguments = { at = 0 }

function arguments.text()
  arguments.at = arguments.at + 1
  return ARGV[arguments.at]
end

function arguments.number()
  return tonumber(arguments.text())
end

function arguments.flag()
  return arguments.text() == "1"
end

function arguments.rest()
  local rest = {}
  for i = arguments.at + 1, #ARGV do
    rest[#rest + 1] = ARGV[i]
  end
  return rest
end

function arguments.call()
  local text, number = arguments.text, arguments.number
  local verb, now_ms = text(), number()
  if now_ms == 0 then
    local time = store("TIME")
    now_ms = time[1] * 1000 + floor(time[2] / 1000)
  end
  local call = {
    verb = verb,
    now_ms = now_ms,
    worker = text(),
    seq = number(),
    acked = number(),
    server = text(),
  }
  local timing = {
    beat_ms = number(),
    worker_ttl_ms = number(),
    recovery_ms = number(),
    blind_ms = number(),
  }
  timing.suspect_ms = 2 * timing.beat_ms
  return call, timing
end

function scheduler.apply(call)
  scheduler._enter(call)
  local answer = scheduler["_" .. call.verb](call)
  scheduler._dispatch()
  if answer[1] == "queued" and ledger.tickets[answer[2]].state == GRANTED then
    answer = { "granted", answer[2] }
  end
  return answer
end

function scheduler.is_abandoned()
  local policy = ledger.policy
  return policy
    and policy.capacity == 0
    and #policy.tiers == 0
    and ledger.in_flight == 0
    and store("HLEN", FLOWS) == 0
end

function scheduler._enter(call)
  if scheduler._judge_memory(call) then
    workforce.start_recovery()
  end
  workforce.touch(call)
  workforce.end_recovery()
  scheduler._expire()
  workforce.judge(call.worker)
  scheduler._clear_removed_tiers()
  scheduler._dispatch()
end

function scheduler._judge_memory(call)
  local timing = ledger.timing
  local now = call.now_ms + scheduler.offset
  local has_forgotten = scheduler.is_new
  if now < ledger.now - timing.beat_ms then
    scheduler.offset = scheduler.offset + ledger.now - now
    has_forgotten = true
  end
  now = max(now, ledger.now)
  if now - ledger.now > timing.suspect_ms and workforce.expects_beats() then
    has_forgotten = true
  end
  local known = scheduler.server
  if call.server ~= "" then
    scheduler.server = call.server
  end
  if known ~= scheduler.server and known ~= "" then
    has_forgotten = true
  end
  ledger.now = now
  return has_forgotten or (not workforce.recovery and workforce.is_behind(call))
end

function scheduler._expire()
  local due = store("ZRANGEBYSCORE", TIMERS, "-inf", ledger.now, "LIMIT", 0, SWEEP)
  if #due > 1 then
    ledger.fetch(due)
  end
  for _, id in ipairs(due) do
    local ticket = ledger.known(id)
    if IN_LINE[ticket.state] then
      scheduler._refuse_waiter(ticket, "wait_expired")
    elseif ticket.state == GRANTED then
      ledger.start_revoking(ticket)
    elseif ticket.state == DRAINING then
      ledger.free(ticket)
    else
      ledger.forget_or_keep(ticket)
    end
  end
  if #due == SWEEP then
    ledger.has_more = 1
  end
end

function scheduler._clear_removed_tiers()
  local policy = ledger.policy
  if not policy then
    return
  end
  local removed, room = {}, SWEEP
  for slug in pairs(ledger.tiers) do
    if not policy.by_slug[slug] then
      removed[#removed + 1] = slug
    end
  end
  table.sort(removed, precedes)
  for _, slug in ipairs(removed) do
    local tier = ledger.tiers[slug]
    for _ = 1, min(tier.ready, room) do
      scheduler._refuse_waiter(fair_queue.at(tier, 0), "unserviceable")
      room = room - 1
    end
    if tier.ready > 0 then
      ledger.has_more = 1
    end
    if tier.in_flight == 0 and tier.in_line == 0 then
      ledger.tiers[slug] = nil
    end
  end
end

function scheduler._refuse_waiter(ticket, reason)
  local is_away = ticket.state == AWAY
  ledger.leave_line(ticket)
  if not is_away then
    local refusal = forecast.refuse(reason, ticket.tier)
    ledger.tell(ticket, "refused", reason, refusal[3])
  end
  ledger.end_(ticket)
end

function scheduler._dispatch()
  local policy = ledger.policy
  if not policy or policy.is_paused or workforce.recovery then
    return
  end
  local grants, passed_over = 0, 0
  local tier = shares.next_tier(policy)
  while tier do
    if grants == MAX_GRANTS or passed_over == MAX_PASSED_OVER then
      ledger.has_more = 1
      return
    end
    local ticket = fair_queue.at(ledger.tiers[tier.slug], 0)
    if ticket.deadline_at <= ledger.now then
      scheduler._refuse_waiter(ticket, "wait_expired")
      passed_over = passed_over + 1
    elseif workforce.is_silent(ticket.worker) then
      ledger.park(ticket)
      passed_over = passed_over + 1
    else
      shares.charge(tier)
      ledger.serve(ticket)
      ledger.tell(ticket, "granted")
      grants = grants + 1
    end
    tier = shares.next_tier(policy)
  end
end

function scheduler._enqueue(call)
  local text = arguments.text
  local command = { ticket = text(), tier = text(), flow = text() }
  command.wait_ms, command.is_known = arguments.number(), arguments.flag()
  local known = ledger.tickets[command.ticket]
  if known then
    return scheduler._repeat(call, known)
  end
  if workforce.is_too_late(call) then
    return { "gone", command.ticket }
  end
  local policy = ledger.policy
  if not policy then
    return { "need_policy" }
  end
  local refusal = scheduler._refusal_at_the_door(policy, command)
  if refusal then
    return refusal
  end
  local tier = policy.by_slug[command.tier]
  local wait_ms = tier.wait_budget_ms
  if command.wait_ms then
    wait_ms = min(wait_ms, max(0, command.wait_ms))
  end
  local ticket = scheduler._new_ticket(call, command, wait_ms)
  if scheduler._can_start(policy, tier) then
    return scheduler._start(tier, ticket)
  end
  return scheduler._refusal_to_queue(policy, tier, wait_ms)
    or scheduler._queue(tier, ticket, wait_ms)
end

function scheduler._repeat(call, ticket)
  if ticket.worker == call.worker and ticket.state == GRANTED then
    return { "granted", ticket.id }
  end
  if ticket.worker == call.worker and IN_LINE[ticket.state] then
    return scheduler._queued(ticket)
  end
  return { "gone", ticket.id }
end

function scheduler._queued(ticket)
  local ahead = fair_queue.ahead(ledger.tiers[ticket.tier], ticket)
  return { "queued", ticket.id, ahead, max(0, ticket.deadline_at - ledger.now) }
end

function scheduler._refusal_at_the_door(policy, command)
  if policy.is_paused then
    return { "refused", "paused", 0 }
  end
  local tier = policy.by_slug[command.tier]
  if not tier or tier.usable_slots == 0 then
    return { "refused", "unserviceable", 0 }
  end
  local flow = ledger.flows[command.flow]
  if flow and depth(flow) >= tier.depth_per_user then
    return { "refused", "user_depth", forecast.next_release(flow) }
  end
end

function scheduler._new_ticket(call, command, wait_ms)
  local now = ledger.now
  local ticket =
    new_ticket(command.ticket, WAITING, call.worker, call.seq, command.tier, command.flow)
  ticket.order_at = now
  ticket.order_worker = call.worker
  ticket.order_seq = call.seq
  ticket.deadline_at = now + wait_ms
  ticket.is_known = command.is_known
  return ticket
end

function scheduler._can_start(policy, tier)
  if workforce.recovery or shares.next_tier(policy) then
    return false
  end
  return shares.is_entitled(policy, tier)
end

function scheduler._start(tier, ticket)
  shares.charge(tier)
  ledger.hold(ticket, ledger.now)
  ticket.is_confirmed = true
  return { "granted", ticket.id }
end

function scheduler._refusal_to_queue(policy, tier, wait_ms)
  local recovery = workforce.recovery
  local ends_before = recovery and ledger.now + wait_ms < recovery_.earliest_end(recovery)
  if recovery and (ends_before or wait_ms == 0) then
    return { "refused", "recovering", recovery_.latest_end(recovery) - ledger.now }
  end
  if wait_ms == 0 then
    return forecast.refuse("wait_too_long", tier.slug)
  end
  if ledger.tiers[tier.slug].waiting >= tier.queue_depth then
    return forecast.refuse("tier_full", tier.slug)
  end
  if ledger.waiting() >= policy.queue_depth then
    return forecast.refuse("queue_full", tier.slug)
  end
end

function scheduler._queue(tier, ticket, wait_ms)
  ledger.join_line(ticket)
  local ahead = fair_queue.ahead(ledger.tiers[tier.slug], ticket)
  if not workforce.recovery and forecast.would_miss(tier, ahead, wait_ms) then
    ledger.leave_line(ticket)
    ledger.drop(ticket)
    return forecast.refuse("wait_too_long", tier.slug)
  end
  return { "queued", ticket.id, ahead, wait_ms }
end

function scheduler._confirm(call)
  local answer = { "gone" }
  for _, id in ipairs(arguments.rest()) do
    local ticket = ledger.tickets[id]
    if not ticket then
      if not workforce.recovery then
        answer[#answer + 1] = id
      end
    elseif workforce.is_held(call, ticket) then
      ticket.is_confirmed = true
    else
      answer[#answer + 1] = id
    end
  end
  return #answer > 1 and answer or { "done", 0 }
end

function scheduler._release(call)
  local id, is_abnormal = arguments.text(), arguments.flag()
  local ticket = ledger.tickets[id]
  if not ticket then
    ledger.bar(id, call.worker, call.seq)
  elseif ticket.worker == call.worker and HOLDS_SLOT[ticket.state] then
    ticket.seq = call.seq
    hold_times.record(ledger.now, ledger.now - ticket.granted_at)
    return { "done", ledger.give_back(ticket, is_abnormal) }
  end
  return { "gone", id }
end

function scheduler._cancel(call)
  local id, keep_place, has_expired = arguments.text(), arguments.flag(), arguments.flag()
  local ticket = ledger.tickets[id]
  if not ticket then
    ledger.bar(id, call.worker, call.seq)
    return { "gone", id }
  end
  local state = ticket.state
  if ticket.worker ~= call.worker or not (IN_LINE[state] or HOLDS_SLOT[state]) then
    return { "gone", id }
  end
  ticket.seq = call.seq
  if HOLDS_SLOT[state] then
    ledger.give_back(ticket, false)
  elseif not (keep_place and ledger.send_away(ticket, ledger.now)) then
    ledger.leave_line(ticket)
    ledger.end_(ticket)
  end
  if has_expired then
    return { "done", forecast.refuse("wait_expired", ticket.tier)[3] }
  end
  return { "done", 0 }
end

function scheduler._attach(call)
  local id, flow = arguments.text(), arguments.text()
  local ticket = ledger.tickets[id]
  if not ticket or not IN_LINE[ticket.state] or ticket.flow ~= flow then
    return { "gone", id }
  end
  if workforce.is_too_late(call) then
    return { "gone", id }
  end
  local refusal = ticket.state == AWAY and scheduler._refusal_to_return(ticket)
  if refusal then
    return refusal
  end
  if ticket.worker ~= call.worker and ticket.state ~= AWAY then
    ledger.tell(ticket, "moved")
  end
  ledger.disown(ticket)
  ticket.worker, ticket.seq = call.worker, call.seq
  ledger.make_ready(ticket)
  return scheduler._queued(ticket)
end

function scheduler._refusal_to_return(ticket)
  local tier = ledger.policy and ledger.policy.by_slug[ticket.tier]
  local flow = ledger.flow(ticket.flow)
  if tier and depth(flow) >= tier.depth_per_user then
    return { "refused", "user_depth", forecast.next_release(flow) }
  end
end

function scheduler._revoke()
  local id, force = arguments.text(), arguments.flag()
  local ticket = ledger.tickets[id]
  if not ticket or not HOLDS_SLOT[ticket.state] then
    return { "gone", id }
  end
  ledger.start_revoking(ticket)
  if force then
    ledger.free(ticket)
  end
  return { "done", 0 }
end

function scheduler._beat(call)
  local text, number = arguments.text, arguments.number
  local command = { waiting = number(), ack = number(), label = text(), held = {} }
  for i = 1, number() do
    command.held[i] = { ticket = text(), tier = text(), flow = text(), held_ms = number() }
  end
  command.seen = arguments.rest()
  return workforce.beat(call, command)
end

function scheduler._reassert(call)
  if not ledger.policy then
    return { "need_policy" }
  end
  local text, number, flag = arguments.text, arguments.number, arguments.flag
  local command = { after = text(), upto = text(), is_last = flag(), waiting = {} }
  while arguments.at < #ARGV do
    command.waiting[#command.waiting + 1] = {
      ticket = text(),
      tier = text(),
      flow = text(),
      waited_ms = number(),
      left_ms = number(),
      seq = number(),
      is_known = flag(),
    }
  end
  local gone = workforce.reassert(call, command)
  if #gone == 0 then
    return { "done", 0 }
  end
  table.insert(gone, 1, "gone")
  return gone
end

function scheduler._sign_off(call)
  workforce.sign_off(call)
  return { "done", 0 }
end

function scheduler._positions()
  local ids, places, granted, seen = {}, {}, {}, {}
  for i = 1, arguments.number() do
    ids[i] = arguments.text()
  end
  for _, id in ipairs(arguments.rest()) do
    scheduler._of_flow(ids, id)
  end
  ledger.fetch(ids)
  for _, id in ipairs(ids) do
    local ticket = not seen[id] and ledger.tickets[id]
    seen[id] = true
    if ticket and IN_LINE[ticket.state] then
      local ahead, low, high = forecast.place(ticket)
      for _, field in ipairs({ id, ticket.flow, ahead, low, high }) do
        places[#places + 1] = field
      end
    elseif ticket and HOLDS_SLOT[ticket.state] then
      granted[#granted + 1] = id
    end
  end
  local version = ledger.policy and ledger.policy.version or 0
  return { "places", places, granted, version, workforce.recovery and 1 or 0 }
end

function scheduler._of_flow(ids, id)
  local flow, slugs = ledger.flows[id], {}
  for slug in pairs(flow and flow.lines or {}) do
    slugs[#slugs + 1] = slug
  end
  table.sort(slugs, precedes)
  for _, slug in ipairs(slugs) do
    for _, ticket in ipairs(flow.lines[slug]) do
      ids[#ids + 1] = ticket
    end
  end
  for _, ticket in ipairs(flow and flow.held or {}) do
    ids[#ids + 1] = ticket
  end
end

function scheduler._tick()
  return { "done", 0 }
end

function scheduler._set_policy()
  local text, number = arguments.text, arguments.number
  local version, digest = number(), text()
  if not ledger.policy or version > ledger.policy.version then
    local capacity, queue_depth, max_hold_ms = number(), number(), number()
    local drain_ms, grace_ms, is_paused, tiers = number(), number(), arguments.flag(), {}
    while arguments.at < #ARGV do
      tiers[#tiers + 1] =
        { text(), number(), number(), number(), number(), number(), number(), number() }
    end
    ledger.policy_record = pack(
      version, digest, capacity, queue_depth, max_hold_ms, drain_ms, grace_ms, is_paused, tiers
    )
    ledger.policy = unpack_policy(ledger.policy_record)
    ledger.edited_at = ledger.now
    shares.adapt(ledger.policy)
    scheduler._clear_removed_tiers()
  end
  local in_force = ledger.policy
  local is_current = in_force.version == version and in_force.digest == digest
  return { "policy_stamp", in_force.version, in_force.digest, is_current and 1 or 0 }
end

function scheduler._snapshot()
  local policy = ledger.policy
  local slugs, tiers, holders, workers = {}, {}, {}, {}
  for slug in pairs(ledger.tiers) do
    slugs[#slugs + 1] = slug
  end
  table.sort(slugs, precedes)
  for _, slug in ipairs(slugs) do
    local tier = ledger.tiers[slug]
    tiers[#tiers + 1] = slug
    tiers[#tiers + 1] = tier.in_flight
    tiers[#tiers + 1] = tier.waiting
  end
  for _, id in ipairs(ledger.roster()) do
    for _, ticket in ipairs(ledger.owned_by(id, "g", MAX_HOLDERS - #holders / 6)) do
      scheduler._holder(holders, ticket)
    end
    scheduler._worker_count(workers, ledger.workers[id])
  end
  return {
    "overview",
    policy and policy.capacity or 0,
    policy and policy.version or 0,
    policy and policy.digest or "",
    ledger.in_flight,
    ledger.waiting(),
    workforce.recovery and 1 or 0,
    tiers,
    holders,
    workers,
  }
end

function scheduler._holder(holders, ticket)
  local fields = { ticket.id, ticket.tier, ticket.flow, ticket.worker, ticket.state }
  fields[6] = ledger.now - ticket.granted_at
  for _, field in ipairs(fields) do
    holders[#holders + 1] = field
  end
end

function scheduler._worker_count(workers, worker)
  local state = scheduler._state_of(worker)
  local fields = { worker.id, worker.label, state, ledger.now - worker.beat_at }
  fields[5] = ledger.count_owned(worker.id, "g")
  fields[6] = ledger.count_owned(worker.id, "wp")
  for _, field in ipairs(fields) do
    workers[#workers + 1] = field
  end
end

function scheduler._state_of(worker)
  if worker.has_left then
    return "left"
  end
  return worker.is_dead and "dead" or worker.is_suspect and "suspect" or "live"
end

-- One call ----------------------------------------------------------------------------------

-- Drop news into the inboxes that are known; the caller takes the rest from the answer.
local function post(notices, caller)
  local inboxes, left, used = {}, {}, {}
  for i = 9, #KEYS do
    inboxes[ARGV[i + 2]] = KEYS[i]
  end
  for _, notice in ipairs(notices) do
    local inbox = notice[1] ~= caller and inboxes[notice[1]]
    if inbox then
      store("RPUSH", inbox, format("%s!%s!%s!%d", notice[2], notice[3], notice[4], notice[5]))
      used[inbox] = true
    else
      for i = 1, 5 do
        left[#left + 1] = notice[i]
      end
    end
  end
  for inbox in pairs(used) do
    store("PEXPIRE", inbox, 2 * ledger.timing.worker_ttl_ms)
  end
  return left
end

local function run()
  arguments.at = 0
  local call, timing = arguments.call()
  arguments.at = arguments.at + #KEYS - 8
  ledger.load(timing)
  local answer = scheduler.apply(call)
  ledger.save()
  if scheduler.is_abandoned() then
    store("DEL", unpack(KEYS, 1, 8))
  elseif call.verb == "beat" then
    for i = 2, 8 do
      store("PEXPIRE", KEYS[i], KEEP_MS)
    end
  end
  local reply = { answer[1], ledger.has_more, post(ledger.notices, call.worker) }
  for i = 2, #answer do
    reply[i + 2] = answer[i]
  end
  return reply
end

local function main()
  local is_sound, reply = pcall(run)
  if not is_sound and reply == FORGOTTEN then
    store("DEL", unpack(KEYS, 1, 8))
    return run()
  elseif not is_sound then
    error(reply, 0)
  end
  return reply
end

return main()
