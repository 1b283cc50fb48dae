-- The waiting room of one upstream as one script: the twin of scheduling/scheduler.py.
--
-- The classes and functions are those of scheduling/, under the same names; what they decide is
-- explained there. Comments here are about the store. A test drives both twins with the same
-- commands and compares answers and books.
--
-- KEYS, all with one hash tag:
--   1 core     string  clock, counters, policy and tiers, packed (ledger.load)
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
--   Inside the script an answer is that table, with 0 where has_more and the notices will be.
--
-- Every call runs this file from its first line, and making 200 functions takes longer than what
-- most verbs do. So the functions are made when they are first called, section by section.
--
-- Strings are never compared with "<": that depends on the server's locale (see precedes).
-- Integers stay below 2^53, where doubles are exact, and leave as RESP integers.

local key = {
  core = KEYS[1],
  tickets = KEYS[2],
  queue = KEYS[3],
  timers = KEYS[4],
  owned = KEYS[5],
  flows = KEYS[6],
  workers = KEYS[7],
  holds = KEYS[8],
}
local verb = ARGV[1]
local FIRST = #KEYS + 3 -- where the arguments of the verb begin

local store = redis.call

-- Raised where an index names what has no record: part of the books was evicted or deleted.
local FORGOTTEN = "forgotten"

local IN_LINE = { waiting = true, parked = true, away = true }
local HOLDS_SLOT = { granted = true, revoking = true }
local SWEEP = 64

-- The classes, with what they remember. What is 0 here is set by ledger.load.

local hold_times = { count = 0, p10 = 0, p50 = 0, p90 = 0, refreshed_at = 0 }
local grant_rate = {} -- of a tier, in whose record it lies
local fair_queue = {} -- of a tier
local recovery_ = {}
local forecast = { edited_at = 0 }
local shares = { passed = 0, is_contested = false }
local workforce = { recovery = false, judge_at = 0, room = 0 }
local scheduler = { offset = 0, server = "", is_new = false }

local ledger = {
  timing = { -- recovery.py: Timing
    beat_ms = tonumber(ARGV[7]),
    worker_ttl_ms = tonumber(ARGV[8]),
    recovery_ms = tonumber(ARGV[9]),
    blind_ms = tonumber(ARGV[10]),
    suspect_ms = 2 * ARGV[7],
  },
  now = 0,
  in_flight = 0,
  away = 0,
  ready = 0, -- waiters of all tiers who can be served
  removed = 0, -- tiers that the policy has not
  tickets = 0, -- by id, read when they are first asked for; here and below, false = there is none
  flows = 0,
  workers = 0,
  tiers = 0, -- by slug
  tier_records = 0,
  policy_record = 0,
  policy_read = 0,
  has_all_workers = 0,
  notices = 0,
  has_more = 0,
}

local function remove(list, item)
  for i = 1, list and #list or 0 do
    if list[i] == item then
      table.remove(list, i)
      return i
    end
  end
  error(FORGOTTEN, 0)
end

local ALWAYS = 0

local function make(class, name)
  -- estimates.py ----------------------------------------------------------------------------
  if class == hold_times then
    local MAX_HOLDS = 64
    local HOLD_MEMORY_MS = 300000
    local REFRESH_MS = 500
    local MIN_HOLDS = 20

    function hold_times.record(now, held_ms)
      local length = store("RPUSH", key.holds, string.format("%d:%d", now, held_ms))
      if length >= 2 * MAX_HOLDS then
        store("LTRIM", key.holds, -MAX_HOLDS, -1)
      end
      if hold_times.count < MIN_HOLDS or now - hold_times.refreshed_at >= REFRESH_MS then
        hold_times._refresh(now)
      end
    end

    function hold_times.is_telling(now)
      return hold_times.count >= MIN_HOLDS and now - hold_times.refreshed_at < HOLD_MEMORY_MS
    end

    function hold_times._refresh(now)
      local holds = {}
      for _, item in ipairs(store("LRANGE", key.holds, -MAX_HOLDS, -1)) do
        local at, held = item:match("^(.+):(.+)$")
        if tonumber(at) > now - HOLD_MEMORY_MS then
          holds[#holds + 1] = tonumber(held)
        end
      end
      table.sort(holds)
      hold_times.count = #holds
      hold_times.refreshed_at = now
      hold_times.p10 = holds[math.floor(#holds * 10 / 100) + 1]
      hold_times.p50 = holds[math.floor(#holds * 50 / 100) + 1]
      hold_times.p90 = holds[math.floor(#holds * 90 / 100) + 1]
    end
  elseif class == grant_rate then
    local BUCKET_MS = 10000
    local BUCKETS = 6
    local MIN_GRANTS = 5
    local DEFAULT_GAP_MS = 1000

    function grant_rate.record(tier, now)
      grant_rate._turn_to(tier, now)
      if grant_rate._sum(tier) == 0 then
        tier.first_at = now
      end
      tier[BUCKETS] = tier[BUCKETS] + 1
    end

    function grant_rate.gap_ms(tier, now)
      grant_rate._turn_to(tier, now)
      local grants = grant_rate._sum(tier)
      if grants < MIN_GRANTS then
        return DEFAULT_GAP_MS
      end
      local span = math.min(now - tier.first_at, (BUCKETS - 1) * BUCKET_MS + now % BUCKET_MS)
      return math.max(1, math.floor(span / grants))
    end

    function grant_rate._turn_to(tier, now)
      local bucket = math.floor(now / BUCKET_MS)
      for _ = 1, math.min(bucket - tier.bucket, BUCKETS) do
        table.remove(tier, 1)
        tier[BUCKETS] = 0
      end
      tier.bucket = bucket
    end

    function grant_rate._sum(tier)
      return tier[1] + tier[2] + tier[3] + tier[4] + tier[5] + tier[6]
    end

  -- fair_queue.py ---------------------------------------------------------------------------
  elseif class == fair_queue then
    local FIRST_LAP, SECOND_LAP = 0, 1
    local TURNS = 2 ^ 42 -- turns per tier in a score: 2^53 leaves room for 2,048 tiers

    -- Tickets that lie before those of this tier in the common sorted set.
    local function base(tier)
      local count = 0
      for _, other in pairs(ledger.all_tiers()) do
        if other.number < tier.number then
          count = count + other.ready
        end
      end
      return count
    end

    local function member(t)
      return string.format(
        "%d%014d!%s!%012d!%s", t.lap, t.order_at, t.order_worker, t.order_seq, t.id
      )
    end

    local function add(tier, ticket)
      return store("ZADD", key.queue, tier.number * TURNS + ticket.turn, member(ticket))
    end

    local function is_later(one, other)
      if one.order_at ~= other.order_at then
        return one.order_at > other.order_at
      elseif one.order_worker ~= other.order_worker then
        return ledger.precedes(other.order_worker, one.order_worker)
      end
      return one.order_seq > other.order_seq
    end

    function fair_queue.at(tier, rank)
      local index = base(tier) + rank
      local found = store("ZRANGE", key.queue, index, index)[1]
      return ledger.known(found and found:match("[^!]*$"))
    end

    function fair_queue.ahead(tier, ticket)
      local rank = store("ZRANK", key.queue, member(ticket))
      if not rank then -- one that cannot be served now: look where it would stand
        add(tier, ticket)
        rank = store("ZRANK", key.queue, member(ticket))
        store("ZREM", key.queue, member(ticket))
      end
      return rank - base(tier)
    end

    function fair_queue.join(tier, ticket, line)
      local last = line[#line] and ledger.known(line[#line])
      local turn = math.max(tier.turn, last and last.turn or 0) + 1
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
      local places = fair_queue._places(line, 1)
      fair_queue.pause(tier, ticket)
      local index = remove(line, ticket.id)
      for _ = 2, index do
        table.remove(places, 1)
      end
      fair_queue._assign(tier, line, places, index)
      tier.in_line = tier.in_line - 1
    end

    function fair_queue.serve(tier, ticket, line)
      fair_queue.pause(tier, ticket)
      remove(line, ticket.id)
      tier.turn = math.max(tier.turn, ticket.turn)
      if line[1] and ledger.known(line[1]).turn <= tier.turn then
        fair_queue._catch_up(tier, line)
      end
      tier.in_line = tier.in_line - 1
    end

    function fair_queue.resume(tier, ticket)
      if ticket.state == "waiting" then
        local added = add(tier, ticket)
        tier.ready = tier.ready + added
        ledger.ready = ledger.ready + added
      end
    end

    function fair_queue.pause(tier, ticket)
      local removed = store("ZREM", key.queue, member(ticket))
      tier.ready = tier.ready - removed
      ledger.ready = ledger.ready - removed
    end

    function fair_queue._catch_up(tier, line)
      local last, places = tier.turn, {}
      for i, place in ipairs(fair_queue._places(line, 1)) do
        last = math.max(place[1], last + 1)
        places[i] = { last, place[1] == last and place[2] or SECOND_LAP }
      end
      fair_queue._assign(tier, line, places, 1)
    end

    -- The places from ``start`` on: those before it are not needed.
    function fair_queue._places(line, start)
      local places = {}
      for i = start, #line do
        local ticket = ledger.known(line[i])
        places[#places + 1] = { ticket.turn, ticket.lap }
      end
      return places
    end

    -- ``places`` begins with that of the ticket at ``start``.
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

  -- ledger.py, with what lies in the store of records.py and policy.py ------------------------
  elseif class == ledger and name == ALWAYS then
    local KEEP_MS = 3600000 -- an upstream that no worker speaks of any more leaves nothing behind
    local CHUNK = 500 -- Lua's unpack is bounded by its C stack

    function ledger.load()
      ledger.tickets, ledger.flows, ledger.workers, ledger.tiers = {}, {}, {}, {}
      ledger.notices, ledger.has_more = {}, 0
      ledger.policy_read, ledger.has_all_workers = false, false
      local record = store("GET", key.core)
      scheduler.is_new = not record
      if not record then
        ledger.wipe()
        record = cmsgpack.pack(0, 0, "", 0, 0, 0, 0, 0, 0, 0, false, false, 0, 0, 0, 0, 0, {})
      end
      ledger.now, scheduler.offset, scheduler.server, shares.passed, workforce.judge_at,
        forecast.edited_at, ledger.in_flight, ledger.away, ledger.ready, ledger.removed,
        workforce.recovery, ledger.policy_record, hold_times.count, hold_times.p10, hold_times.p50,
        hold_times.p90, hold_times.refreshed_at, ledger.tier_records = cmsgpack.unpack(record)
    end

    function ledger.save()
      for id, ticket in pairs(ledger.tickets) do
        if ticket then
          local record = ledger._pack_ticket(ticket)
          if record ~= ticket.record then
            store("HSET", key.tickets, id, record)
          end
          if ticket.due_at ~= ticket.timed then
            ledger._set_timer(ticket)
          end
        end
      end
      for id, flow in pairs(ledger.flows) do
        if flow then
          local new = cmsgpack.pack(flow.held, flow.lines, flow.away)
          if new ~= flow.record then
            store("HSET", key.flows, id, new)
          end
        end
      end
      for id, w in pairs(ledger.workers) do
        if w then
          local new = cmsgpack.pack(
            w.beat_at, w.label, w.seq, w.beat_seq, w.past_beat_seq, w.mismatches, w.is_suspect,
            w.is_dead, w.has_left, w.has_parked
          )
          if new ~= w.record then
            store("HSET", key.workers, id, new)
          end
        end
      end
      for slug, t in pairs(ledger.tiers) do
        ledger.tier_records[slug] = cmsgpack.pack(
          t.number, t.passed, t.in_flight, t.waiting, t.ready, t.in_line, t.turn, t.return_at,
          t.bucket, t.first_at, t[1], t[2], t[3], t[4], t[5], t[6]
        )
      end
      local record = cmsgpack.pack(
        ledger.now, scheduler.offset, scheduler.server, shares.passed, workforce.judge_at,
        forecast.edited_at, ledger.in_flight, ledger.away, ledger.ready, ledger.removed,
        workforce.recovery, ledger.policy_record, hold_times.count, hold_times.p10, hold_times.p50,
        hold_times.p90, hold_times.refreshed_at, ledger.tier_records
      )
      store("SET", key.core, record, "PX", KEEP_MS)
      if verb == "beat" then
        for i = 2, 8 do
          store("PEXPIRE", KEYS[i], KEEP_MS)
        end
      end
    end

    function ledger._set_timer(ticket)
      if ticket.due_at > 0 then
        store("ZADD", key.timers, ticket.due_at, ticket.id)
      else
        store("ZREM", key.timers, ticket.id)
      end
    end

    -- A ticket, false where there is none.
    function ledger.ticket(id)
      local ticket = ledger.tickets[id]
      if ticket == nil then
        local record = store("HGET", key.tickets, id)
        ticket = record and ledger._unpack_ticket(id, record)
        ledger.tickets[id] = ticket
      end
      return ticket
    end

    -- What is kept of a ticket depends on its state: the rest is never asked for again.
    function ledger._pack_ticket(t)
      if t.state == "ended" then
        return cmsgpack.pack(t.state, t.worker, t.seq, t.due_at)
      elseif IN_LINE[t.state] then
        return cmsgpack.pack(
          t.state, t.worker, t.seq, t.due_at, t.tier, t.flow, t.order_at, t.order_worker,
          t.order_seq, t.turn, t.lap, t.deadline_at, t.is_known
        )
      end
      return cmsgpack.pack(
        t.state, t.worker, t.seq, t.due_at, t.tier, t.flow, t.granted_at, t.is_confirmed, t.named_in
      )
    end

    function ledger._unpack_ticket(id, record)
      local state, worker, seq, due_at, tier, flow, a, b, c, d, e, f, g = cmsgpack.unpack(record)
      if IN_LINE[state] then
        return {
          id = id,
          record = record,
          timed = due_at, -- what the timers say
          state = state,
          worker = worker,
          seq = seq,
          due_at = due_at,
          tier = tier,
          flow = flow,
          order_at = a,
          order_worker = b,
          order_seq = c,
          turn = d,
          lap = e,
          deadline_at = f,
          is_known = g,
        }
      end
      return {
        id = id,
        record = record,
        timed = due_at,
        state = state,
        worker = worker,
        seq = seq,
        due_at = due_at,
        tier = tier,
        flow = flow,
        granted_at = a,
        is_confirmed = b,
        named_in = c,
      }
    end

    -- A worker, false where there is none.
    function ledger.worker(id)
      local worker = ledger.workers[id]
      if worker == nil then
        local record = store("HGET", key.workers, id)
        worker = record and ledger._unpack_worker(id, record)
        ledger.workers[id] = worker
      end
      return worker
    end

    function ledger._unpack_worker(id, record)
      local beat_at, label, seq, beat_seq, past_beat_seq, mismatches, is_suspect, is_dead, has_left,
        has_parked = cmsgpack.unpack(record)
      return {
        id = id,
        record = record,
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

    -- What one tier holds, nil where it holds nothing and never did.
    function ledger.find_tier(slug)
      local tier, record = ledger.tiers[slug], ledger.tier_records[slug]
      if not tier and record then
        local number, passed, in_flight, waiting, ready, in_line, turn, return_at, bucket, first_at,
          c1, c2, c3, c4, c5, c6 = cmsgpack.unpack(record)
        tier = {
          c1,
          c2,
          c3,
          c4,
          c5,
          c6,
          slug = slug,
          number = number,
          passed = passed,
          in_flight = in_flight,
          waiting = waiting,
          ready = ready,
          in_line = in_line,
          turn = turn,
          return_at = return_at,
          bucket = bucket,
          first_at = first_at,
        }
        ledger.tiers[slug] = tier
      end
      return tier
    end
  elseif class == ledger and (name == "policy" or name == "limits") then
    -- policy.py: the policy in force, false where there is none. Its tiers are read one by one:
    -- policy.tiers is {slug, record, ...} in the order of the policy.
    function ledger.policy()
      if not ledger.policy_read and ledger.policy_record then
        local version, digest, capacity, queue_depth, max_hold_ms, drain_ms, grace_ms, is_paused,
          reserved, tiers = cmsgpack.unpack(ledger.policy_record)
        ledger.policy_read = {
          version = version,
          digest = digest,
          capacity = capacity,
          queue_depth = queue_depth,
          max_hold_ms = max_hold_ms,
          drain_ms = drain_ms,
          grace_ms = grace_ms,
          is_paused = is_paused,
          reserved = reserved, -- of all tiers together
          tiers = tiers,
          by_slug = {},
        }
      end
      return ledger.policy_read
    end

    -- The limits of one tier, nil where the policy has no such tier.
    function ledger.limits(policy, slug)
      local limits = policy.by_slug[slug]
      if not limits then
        local tiers = policy.tiers
        for i = 1, #tiers, 2 do
          if tiers[i] == slug then
            local cap, reserved, weight, wait_budget_ms, queue_depth, depth_per_user, usable_slots =
              cmsgpack.unpack(tiers[i + 1])
            limits = {
              slug = slug,
              cap = cap,
              reserved = reserved,
              weight = weight,
              wait_budget_ms = wait_budget_ms,
              queue_depth = queue_depth,
              depth_per_user = depth_per_user,
              usable_slots = usable_slots,
            }
            policy.by_slug[slug] = limits
          end
        end
      end
      return limits
    end
  elseif class == ledger and (name == "hold" or name == "limit_hold") then
    function ledger.hold(ticket, granted_at)
      ledger.tickets[ticket.id] = ticket
      local tier = ledger.tier(ticket.tier)
      tier.in_flight = tier.in_flight + 1
      ledger.in_flight = ledger.in_flight + 1
      ticket.state = "granted"
      ticket.granted_at = granted_at
      ticket.is_confirmed = ticket.is_confirmed or false
      ticket.named_in = 0
      local held = ledger.flow(ticket.flow).held
      held[#held + 1] = ticket.id
      ledger.limit_hold(ticket)
      ledger.own(ticket)
    end

    function ledger.limit_hold(ticket)
      if ticket.state == "granted" then
        local policy = ledger.policy()
        local max_hold_ms = policy and policy.max_hold_ms or 0
        ticket.due_at = max_hold_ms > 0 and ticket.granted_at + max_hold_ms or 0
      end
    end
  elseif
    class == ledger
    and (
      name == "give_back"
      or name == "free"
      or name == "_unhold"
      or name == "end_"
      or name == "bar"
    )
  then
    local TOMBSTONE_BEATS = 2

    function ledger.give_back(ticket, drain)
      local policy = drain and ledger.policy()
      if not policy or policy.drain_ms == 0 then
        ledger.free(ticket)
        return 0
      end
      ledger.disown(ticket)
      ledger._unhold(ticket)
      ticket.state = "draining"
      ticket.due_at = ledger.now + policy.drain_ms
      return policy.drain_ms
    end

    function ledger.free(ticket)
      if ticket.state ~= "draining" then
        ledger.disown(ticket)
        ledger._unhold(ticket)
      end
      ledger.in_flight = ledger.in_flight - 1
      local tier = ledger.find_tier(ticket.tier)
      tier.in_flight = tier.in_flight - 1
      ledger.end_(ticket)
    end

    function ledger._unhold(ticket)
      local flow = ledger.flow(ticket.flow)
      remove(flow.held, ticket.id)
      ledger._drop_flow(ticket.flow, flow)
    end

    function ledger.end_(ticket)
      ticket.state = "ended"
      local worker = ledger.worker(ticket.worker)
      ticket.seq = math.max(ticket.seq, worker and worker.seq or 0)
      ticket.due_at = ledger.now + TOMBSTONE_BEATS * ledger.timing.beat_ms
    end

    function ledger.bar(id, worker, seq)
      ledger.tickets[id] = {
        id = id,
        record = false,
        timed = 0,
        state = "ended",
        worker = worker,
        seq = seq,
        due_at = ledger.now + TOMBSTONE_BEATS * ledger.timing.beat_ms,
      }
    end
  elseif
    class == ledger
    and (name == "fetch" or name == "known" or name == "forget_or_keep" or name == "drop")
  then
    local CHUNK = 500

    -- Read many tickets in one go.
    function ledger.fetch(ids)
      for start = 1, #ids, CHUNK do
        local stop = math.min(start + CHUNK - 1, #ids)
        local records = store("HMGET", key.tickets, unpack(ids, start, stop))
        for i = start, stop do
          local id, record = ids[i], records[i - start + 1]
          if ledger.tickets[id] == nil then
            ledger.tickets[id] = record and ledger._unpack_ticket(id, record)
          end
        end
      end
    end

    -- A ticket that an index names.
    function ledger.known(id)
      return id and ledger.ticket(id) or error(FORGOTTEN, 0)
    end

    function ledger.forget_or_keep(tombstone)
      local worker = ledger.worker(tombstone.worker)
      if not worker or worker.is_dead or worker.past_beat_seq >= tombstone.seq then
        ledger.drop(tombstone)
      else
        tombstone.due_at = ledger.now + ledger.timing.beat_ms
      end
    end

    function ledger.drop(ticket)
      store("HDEL", key.tickets, ticket.id)
      store("ZREM", key.timers, ticket.id)
      ledger.tickets[ticket.id] = false
    end
  elseif
    class == ledger
    and (
      name == "tier"
      or name == "find_flow"
      or name == "flow"
      or name == "own"
      or name == "disown"
      or name == "_mark"
      or name == "_drop_flow"
    )
  then
    function ledger.tier(slug)
      return ledger.find_tier(slug) or ledger._new_tier(slug)
    end

    -- A flow, false where there is none.
    function ledger.find_flow(id)
      local flow = ledger.flows[id]
      if flow == nil then
        local record = store("HGET", key.flows, id)
        flow = false
        if record then
          local held, lines, away = cmsgpack.unpack(record)
          flow = { record = record, held = held, lines = lines, away = away }
        end
        ledger.flows[id] = flow
      end
      return flow
    end

    function ledger.flow(id)
      local flow = ledger.find_flow(id)
      if not flow then
        flow = { record = false, held = {}, lines = {}, away = {} }
        ledger.flows[id] = flow
      end
      return flow
    end

    function ledger.own(ticket)
      store("ZADD", key.owned, 0, ticket.worker .. "!" .. ledger._mark(ticket) .. "!" .. ticket.id)
    end

    function ledger.disown(ticket)
      store("ZREM", key.owned, ticket.worker .. "!" .. ledger._mark(ticket) .. "!" .. ticket.id)
    end

    function ledger._mark(ticket)
      if ticket.state == "parked" then
        return "p"
      end
      return IN_LINE[ticket.state] and "w" or "g"
    end

    function ledger._drop_flow(id, flow)
      if #flow.held == 0 and not next(flow.lines) then
        if flow.record then
          store("HDEL", key.flows, id)
        end
        ledger.flows[id] = false
      end
    end
  elseif class == ledger then
    local UNLIMITED = 2 ^ 31 - 1 -- policy.py
    local MAX_AWAY_UNBOUNDED = 100

    function ledger.wipe()
      store("DEL", key.core, key.tickets, key.queue, key.timers, key.owned, key.flows, key.workers, key.holds)
    end

    -- Byte order, as Python's and the sorted sets' own.
    function ledger.precedes(one, other)
      for i = 1, math.min(#one, #other) do
        local a, b = one:byte(i), other:byte(i)
        if a ~= b then
          return a < b
        end
      end
      return #one < #other
    end

    -- All workers' ids in order.
    function ledger.roster()
      if not ledger.has_all_workers then
        local found = store("HGETALL", key.workers)
        for i = 1, #found, 2 do
          local id, record = found[i], found[i + 1]
          if ledger.workers[id] == nil then
            ledger.workers[id] = ledger._unpack_worker(id, record)
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
      table.sort(ids, ledger.precedes)
      return ids
    end

    function ledger.all_tiers()
      for slug in pairs(ledger.tier_records) do
        ledger.find_tier(slug)
      end
      return ledger.tiers
    end

    function ledger.waiting()
      local count = 0
      for _, tier in pairs(ledger.all_tiers()) do
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
      ticket.due_at = ticket.deadline_at
      ledger.own(ticket)
    end

    function ledger.leave_line(ticket)
      local flow, tier = ledger.flow(ticket.flow), ledger.find_tier(ticket.tier)
      ledger.disown(ticket)
      fair_queue.leave(tier, ticket, flow.lines[ticket.tier])
      if ticket.state == "away" then
        remove(flow.away, ticket.id)
        ledger.away = ledger.away - 1
      else
        tier.waiting = tier.waiting - 1
      end
      ledger._drop_line(flow, ticket)
    end

    function ledger.serve(ticket)
      local flow, tier = ledger.flow(ticket.flow), ledger.find_tier(ticket.tier)
      ledger.disown(ticket)
      fair_queue.serve(tier, ticket, flow.lines[ticket.tier])
      tier.waiting = tier.waiting - 1
      ledger._drop_line(flow, ticket)
      ledger.hold(ticket, ledger.now)
    end

    function ledger.park(ticket)
      fair_queue.pause(ledger.find_tier(ticket.tier), ticket)
      ledger.disown(ticket)
      ticket.state = "parked"
      ledger.own(ticket)
    end

    function ledger.make_ready(ticket)
      local tier = ledger.find_tier(ticket.tier)
      ledger.disown(ticket)
      if ticket.state == "away" then
        remove(ledger.flow(ticket.flow).away, ticket.id)
        ledger.away = ledger.away - 1
        tier.waiting = tier.waiting + 1
      end
      ticket.state = "waiting"
      fair_queue.resume(tier, ticket)
      ticket.due_at = ticket.deadline_at
      ledger.own(ticket)
    end

    function ledger.send_away(ticket, since)
      local policy, flow = ledger.policy(), ledger.flow(ticket.flow)
      if ticket.state == "away" then
        return true
      end
      if not policy or not ledger.limits(policy, ticket.tier) or policy.grace_ms == 0 then
        return false
      end
      local bound = policy.queue_depth
      local most = bound == UNLIMITED and MAX_AWAY_UNBOUNDED or math.floor(bound / 4)
      if #flow.away > 0 or ledger.away >= most then
        return false
      end
      ledger.disown(ticket)
      local tier = ledger.find_tier(ticket.tier)
      fair_queue.pause(tier, ticket)
      tier.waiting = tier.waiting - 1
      ticket.state = "away"
      flow.away[#flow.away + 1] = ticket.id
      ledger.away = ledger.away + 1
      ticket.due_at = math.min(ticket.deadline_at, since + policy.grace_ms)
      return true
    end

    function ledger.start_revoking(ticket)
      if ticket.state == "granted" then
        ticket.state = "revoking"
        ticket.due_at = 0
      end
      ledger.tell(ticket, "revoked")
    end

    function ledger.tell(ticket, kind, reason, retry_ms)
      local notices = ledger.notices
      notices[#notices + 1] = { ticket.worker, kind, ticket.id, reason or "", retry_ms or 0 }
    end

    -- Drop news into the inboxes that are known; the caller takes the rest from the answer.
    function ledger.post(notices)
      local inboxes, left, used = {}, {}, {}
      for i = 9, #KEYS do
        inboxes[ARGV[i + 2]] = KEYS[i]
      end
      for _, notice in ipairs(notices) do
        local inbox = notice[1] ~= ARGV[3] and inboxes[notice[1]]
        if inbox then
          store("RPUSH", inbox, notice[2] .. "!" .. notice[3] .. "!" .. notice[4] .. "!" .. notice[5])
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

    function ledger._new_tier(slug)
      local taken, number = {}, 0
      for _, tier in pairs(ledger.all_tiers()) do
        taken[tier.number] = true
      end
      while taken[number] do
        number = number + 1
      end
      local tier = { 0, 0, 0, 0, 0, 0, slug = slug, number = number, bucket = 0, first_at = 0 }
      tier.passed, tier.in_flight, tier.waiting, tier.return_at = 0, 0, 0, 0
      tier.ready, tier.in_line, tier.turn = 0, 0, 0
      ledger.tiers[slug] = tier
      local policy = ledger.policy()
      if policy and not ledger.limits(policy, slug) then
        ledger.removed = ledger.removed + 1
      end
      return tier
    end

    function ledger.owned_by(worker, marks, limit, after, upto)
      local found = {}
      for mark in marks:gmatch(".") do
        local prefix = worker .. "!" .. mark .. "!"
        local low, high = "(" .. prefix .. (after or ""), "[" .. prefix .. (upto or "~")
        local room = limit and limit - #found or -1
        local members = store("ZRANGEBYLEX", key.owned, low, high, "LIMIT", 0, room)
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
        count = count + store("ZLEXCOUNT", key.owned, "[" .. prefix .. "!", "(" .. prefix .. '"')
      end
      return count
    end

    function ledger._drop_line(flow, ticket)
      if #flow.lines[ticket.tier] == 0 then
        flow.lines[ticket.tier] = nil
      end
      ledger._drop_flow(ticket.flow, flow)
    end

  -- forecast.py -----------------------------------------------------------------------------
  elseif class == forecast then
    local EDIT_QUIET_MS = 1000
    local SAMPLES = 16
    local RETURN_HORIZON_MS = 60000

    function forecast.refuse(reason, slug)
      local tier = ledger.find_tier(slug)
      local gap = grant_rate.gap_ms(tier, ledger.now)
      local return_at = math.max(tier.return_at, ledger.now + tier.waiting * gap) + gap
      tier.return_at = math.min(return_at, ledger.now + RETURN_HORIZON_MS)
      return { "refused", 0, 0, reason, tier.return_at - ledger.now }
    end

    function forecast.next_release(flow)
      if #flow.held == 0 or not hold_times.is_telling(ledger.now) then
        return 0
      end
      local oldest = ledger.known(flow.held[1]).granted_at
      for _, id in ipairs(flow.held) do
        oldest = math.min(oldest, ledger.known(id).granted_at)
      end
      return math.max(1, oldest + hold_times.p50 - ledger.now)
    end

    function forecast.would_miss(tier, ahead, wait_ms)
      local now = ledger.now
      if not hold_times.is_telling(now) or now - forecast.edited_at < EDIT_QUIET_MS then
        return false
      end
      local slots = tier.usable_slots
      if math.floor(ahead / slots) * hold_times.p10 <= wait_ms then
        return false
      end
      return math.floor(forecast._staying(tier.slug, ahead, slots) / slots) * hold_times.p10 > wait_ms
    end

    function forecast._staying(slug, ahead, slots)
      local tier = ledger.find_tier(slug)
      local step = math.ceil(ahead / SAMPLES)
      local staying = 0
      for rank = 0, ahead - 1, step do
        local start_at = ledger.now + math.floor(staying / slots) * hold_times.p10
        if fair_queue.at(tier, rank).deadline_at >= start_at then
          staying = staying + math.min(step, ahead - rank)
        end
      end
      return staying
    end

    function forecast.place(ticket)
      local tier = ledger.find_tier(ticket.tier)
      local ahead = fair_queue.ahead(tier, ticket)
      local gap = grant_rate.gap_ms(tier, ledger.now)
      local low = math.floor(ahead * gap * 7 / 10)
      local high = math.floor((ahead + 1) * gap * 13 / 10) + hold_times.p10
      return ahead, low, high
    end

  -- shares.py -------------------------------------------------------------------------------
  elseif class == shares and (name == "is_entitled" or name == "charge") then
    local SCALE = 2 ^ 32
    local REBASE_AT = 2 ^ 50

    function shares.is_entitled(policy, tier)
      local free = policy.capacity - ledger.in_flight
      local held = ledger.find_tier(tier.slug).in_flight
      if free < 1 or held >= tier.cap then
        return false
      end
      if held < tier.reserved then
        return true
      end
      local reserved = 0
      if policy.reserved > tier.reserved then -- else there is nobody to reserve for
        for i = 1, #policy.tiers, 2 do
          local slug = policy.tiers[i]
          if slug ~= tier.slug then
            local other = ledger.limits(policy, slug)
            reserved = reserved + math.max(0, other.reserved - ledger.find_tier(slug).in_flight)
          end
        end
      end
      return free > reserved
    end

    function shares.charge(tier)
      local state = ledger.find_tier(tier.slug)
      if shares.is_contested then
        shares.passed = math.max(state.passed, shares.passed)
      end
      state.passed = shares.passed + math.floor(SCALE / tier.weight)
      grant_rate.record(state, ledger.now)
      if shares.passed >= REBASE_AT then
        shares._rebase()
      end
    end
  elseif class == shares then
    local SCALE = 2 ^ 32
    local REBASE_TO = 2 ^ 42

    function shares.next_tier(policy)
      local best, best_passed
      local count = 0
      for i = 1, #policy.tiers, 2 do
        local state = ledger.find_tier(policy.tiers[i])
        if state.ready > 0 then
          local tier = ledger.limits(policy, state.slug)
          if shares.is_entitled(policy, tier) then
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
      end
      shares.is_contested = count > 1
      return best
    end

    function shares.adapt(policy)
      for i = 1, #policy.tiers, 2 do
        local slug = policy.tiers[i]
        local state, weight = ledger.tier(slug), ledger.limits(policy, slug).weight
        state.passed = math.min(state.passed, shares.passed + math.floor(SCALE / weight))
      end
    end

    function shares._rebase()
      local moved = shares.passed - REBASE_TO
      for _, state in pairs(ledger.all_tiers()) do
        state.passed = math.max(0, state.passed - moved)
      end
      shares.passed = REBASE_TO
    end

  -- recovery.py -----------------------------------------------------------------------------
  elseif class == recovery_ then
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
      local is_over = now >= recovery_.earliest_end(recovery)
      for id in pairs(recovery.awaited) do
        is_over = is_over and recovery.heard[id]
      end
      return is_over
    end

  -- workforce.py ----------------------------------------------------------------------------
  elseif class == workforce and name == ALWAYS then
    function workforce.is_behind(call)
      local worker = ledger.worker(call.worker)
      return call.acked > (worker and worker.seq or 0)
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
      local worker = ledger.worker(call.worker) or workforce._new_worker(call.worker)
      worker.seq = math.max(worker.seq, call.seq)
      if worker.has_parked and not workforce.is_silent(worker.id) then
        workforce._unpark(worker)
      end
    end

    function workforce.judge(speaker)
      if not workforce.recovery and ledger.now >= workforce.judge_at then
        workforce._judge_all(speaker)
      end
    end
  elseif class == workforce and (name == "is_silent" or name == "is_too_late") then
    function workforce.is_silent(id)
      local worker = ledger.worker(id) or error(FORGOTTEN, 0)
      return worker.is_suspect or worker.is_dead
    end

    function workforce.is_too_late(call)
      local worker = ledger.worker(call.worker)
      return worker.is_dead or call.seq <= worker.beat_seq
    end
  elseif class == workforce then
    local FORGET_AFTER = 30

    function workforce.expects_beats()
      for _, id in ipairs(ledger.roster()) do
        local worker = ledger.worker(id)
        if not (worker.has_left or worker.is_dead) then
          return true
        end
      end
      return false
    end

    function workforce.start_recovery()
      local awaited = {}
      for _, id in ipairs(ledger.roster()) do
        local worker = ledger.worker(id)
        if not (worker.has_left or worker.is_dead) then
          worker.beat_at = ledger.now
          awaited[id] = true
        end
      end
      if ledger.timing.recovery_ms > 0 then
        workforce.recovery = { since = ledger.now, awaited = awaited, heard = {} }
      end
    end

    function workforce._new_worker(id)
      local worker = {
        id = id,
        record = false,
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
      ledger.workers[id] = worker
      workforce.judge_at = 0
      return worker
    end

    function workforce._judge_all(speaker)
      workforce.judge_at = ledger.now + ledger.timing.suspect_ms
      workforce.room = SWEEP
      for _, id in ipairs(ledger.roster()) do
        local due_at = workforce._judge(ledger.worker(id), speaker)
        if due_at > 0 then
          workforce.judge_at = math.min(workforce.judge_at, due_at)
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
          store("HDEL", key.workers, worker.id)
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
        if ticket.state == "granted" and not ticket.is_confirmed then
          ledger.free(ticket)
        end
      end
    end

    function workforce._bury(worker)
      local room = workforce.room
      local tickets = ledger.owned_by(worker.id, "gwp", room + 1)
      for i = 1, math.min(#tickets, room) do
        local ticket = tickets[i]
        if not IN_LINE[ticket.state] then
          ledger.free(ticket)
        elseif not (ticket.is_known and ledger.send_away(ticket, worker.beat_at)) then
          ledger.leave_line(ticket)
          ledger.end_(ticket)
        end
      end
      workforce.room = room - math.min(room, #tickets)
      local has_more = #tickets > room
      if has_more then
        ledger.has_more = 1
      end
      return has_more
    end

    function workforce.sign_off(call)
      local worker = ledger.worker(call.worker)
      worker.has_left, worker.is_dead = true, true
      worker.beat_at = ledger.now
      worker.beat_seq = math.max(worker.beat_seq, call.seq)
      worker.past_beat_seq = worker.beat_seq
      if workforce.recovery then
        workforce.recovery.heard[call.worker] = true
      end
      workforce.judge_at = 0
      workforce.end_recovery()
      workforce.judge()
    end

    function workforce.beat(call, beat)
      local worker = ledger.worker(call.worker)
      if call.seq <= worker.beat_seq then
        local reply = workforce._reply(call)
        reply[4] = 0
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
      local policy, workers = ledger.policy(), {}
      for _, id in ipairs(ledger.roster()) do
        if not ledger.worker(id).is_dead then
          workers[#workers + 1] = id
        end
      end
      return {
        "beat_reply",
        0,
        0,
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
      for i = 1, math.min(#parked, SWEEP) do
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
        local ticket = ledger.ticket(item.ticket)
        if not ticket or (was_dead and ticket.state == "ended") then
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
      return HOLDS_SLOT[ticket.state]
    end

    function workforce._rebuild(call, item)
      local known = ledger.ticket(item.ticket)
      if known then
        ledger.drop(known)
      end
      local ticket = {
        id = item.ticket,
        record = false,
        timed = 0,
        worker = call.worker,
        seq = call.seq,
        tier = item.tier,
        flow = item.flow,
        is_confirmed = true,
      }
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
        if ticket.state == "revoking" then
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
      for i = 1, math.min(#tickets, room) do
        local ticket = tickets[i]
        if not listed[ticket.id] and ticket.seq <= call.seq then
          ledger.leave_line(ticket)
          ledger.end_(ticket)
        end
      end
      if command.is_last then
        if #tickets <= room then
          ledger.worker(call.worker).mismatches = 0
        end
        if workforce.recovery then
          workforce.recovery.heard[call.worker] = true
          workforce.end_recovery()
        end
      end
      return gone
    end

    function workforce._is_back(call, item)
      local ticket = ledger.ticket(item.ticket)
      if not ticket then
        local policy = ledger.policy()
        if not policy or not ledger.limits(policy, item.tier) then
          return false
        end
        ledger.join_line(workforce._rebuilt_waiter(call, item))
        return true
      end
      local is_mine = ticket.worker == call.worker
      if is_mine and ticket.state == "away" and ticket.seq <= call.seq then
        ledger.make_ready(ticket)
      end
      return is_mine and ticket.state ~= "ended"
    end

    function workforce._rebuilt_waiter(call, item)
      local now = ledger.now
      return {
        id = item.ticket,
        record = false,
        timed = 0,
        state = "waiting",
        worker = call.worker,
        seq = item.seq,
        tier = item.tier,
        flow = item.flow,
        order_at = now - item.waited_ms,
        order_worker = call.worker,
        order_seq = item.seq,
        turn = 0,
        lap = 0,
        deadline_at = now + item.left_ms,
        is_known = item.is_known,
      }
    end

  -- scheduler.py ----------------------------------------------------------------------------
  elseif name == ALWAYS then
    function scheduler.apply(call)
      scheduler._enter(call)
      local answer = scheduler["_" .. verb](call)
      if ledger.ready > 0 then
        scheduler._dispatch()
      end
      if answer[1] == "queued" and ledger.known(answer[4]).state == "granted" then
        answer = { "granted", 0, 0, answer[4] }
      end
      return answer
    end

    function scheduler.is_abandoned()
      if ledger.removed == 0 and next(ledger.tier_records) then
        return false -- then the policy has tiers
      end
      local policy = ledger.policy()
      local is_retired = policy and policy.capacity == 0 and #policy.tiers == 0
      return is_retired and store("HLEN", key.flows) == 0
    end

    function scheduler._enter(call)
      if scheduler._judge_memory(call) then
        workforce.start_recovery()
      end
      workforce.touch(call)
      workforce.end_recovery()
      scheduler._expire()
      workforce.judge(call.worker)
      if ledger.removed > 0 then
        scheduler._clear_removed_tiers()
      end
      if ledger.ready > 0 then
        scheduler._dispatch()
      end
    end

    function scheduler._judge_memory(call)
      local timing = ledger.timing
      local now = call.now_ms + scheduler.offset
      local has_forgotten = scheduler.is_new
      if now < ledger.now - timing.beat_ms then
        scheduler.offset = scheduler.offset + ledger.now - now
        has_forgotten = true
      end
      now = math.max(now, ledger.now)
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
      local due = store("ZRANGEBYSCORE", key.timers, "-inf", ledger.now, "LIMIT", 0, SWEEP)
      if #due == 0 then
        return
      end
      ledger.fetch(due)
      for _, id in ipairs(due) do
        local ticket = ledger.known(id)
        if IN_LINE[ticket.state] then
          scheduler._refuse_waiter(ticket, "wait_expired")
        elseif ticket.state == "granted" then
          ledger.start_revoking(ticket)
        elseif ticket.state == "draining" then
          ledger.free(ticket)
        else
          ledger.forget_or_keep(ticket)
        end
      end
      if #due == SWEEP then
        ledger.has_more = 1
      end
    end
  elseif name == "_clear_removed_tiers" or name == "_refuse_waiter" or name == "_dispatch" then
    local MAX_GRANTS = 64
    local MAX_PASSED_OVER = 32

    function scheduler._clear_removed_tiers()
      local policy = ledger.policy()
      if not policy then
        return
      end
      local removed, room = {}, SWEEP
      for slug in pairs(ledger.all_tiers()) do
        if not ledger.limits(policy, slug) then
          removed[#removed + 1] = slug
        end
      end
      table.sort(removed, ledger.precedes)
      for _, slug in ipairs(removed) do
        local tier = ledger.find_tier(slug)
        for _ = 1, math.min(tier.ready, room) do
          scheduler._refuse_waiter(fair_queue.at(tier, 0), "unserviceable")
          room = room - 1
        end
        if tier.ready > 0 then
          ledger.has_more = 1
        end
        if tier.in_flight == 0 and tier.in_line == 0 then
          ledger.tiers[slug], ledger.tier_records[slug] = nil, nil
          ledger.removed = ledger.removed - 1
        end
      end
    end

    function scheduler._refuse_waiter(ticket, reason)
      local is_away = ticket.state == "away"
      ledger.leave_line(ticket)
      if not is_away then
        local refusal = forecast.refuse(reason, ticket.tier)
        ledger.tell(ticket, "refused", reason, refusal[5])
      end
      ledger.end_(ticket)
    end

    function scheduler._dispatch()
      local policy = ledger.policy()
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
        local ticket = fair_queue.at(ledger.find_tier(tier.slug), 0)
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
  elseif
    name == "_enqueue"
    or name == "_refusal_at_the_door"
    or name == "_can_start"
    or name == "_start"
  then
    function scheduler._enqueue(call)
      local id, slug, flow_id = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
      local wait_ms, is_known = tonumber(ARGV[FIRST + 3]), ARGV[FIRST + 4] == "1"
      local known = ledger.ticket(id)
      if known then
        return scheduler._repeat(call, known)
      end
      if workforce.is_too_late(call) then
        return { "gone", 0, 0, id }
      end
      local policy = ledger.policy()
      if not policy then
        return { "need_policy", 0, 0 }
      end
      local refusal = scheduler._refusal_at_the_door(policy, slug, flow_id)
      if refusal then
        return refusal
      end
      local tier = ledger.limits(policy, slug)
      wait_ms = wait_ms and math.min(tier.wait_budget_ms, math.max(0, wait_ms)) or tier.wait_budget_ms
      local ticket = {
        id = id,
        record = false,
        timed = 0,
        state = "waiting",
        worker = call.worker,
        seq = call.seq,
        tier = slug,
        flow = flow_id,
        order_at = ledger.now,
        order_worker = call.worker,
        order_seq = call.seq,
        turn = 0,
        lap = 0,
        deadline_at = ledger.now + wait_ms,
        is_known = is_known,
      }
      if scheduler._can_start(policy, tier) then
        return scheduler._start(tier, ticket)
      end
      return scheduler._refusal_to_queue(policy, tier, wait_ms)
        or scheduler._queue(tier, ticket, wait_ms)
    end

    function scheduler._refusal_at_the_door(policy, slug, flow_id)
      if policy.is_paused then
        return { "refused", 0, 0, "paused", 0 }
      end
      local tier = ledger.limits(policy, slug)
      if not tier or tier.usable_slots == 0 then
        return { "refused", 0, 0, "unserviceable", 0 }
      end
      local flow = ledger.find_flow(flow_id)
      if flow and scheduler._depth(flow) >= tier.depth_per_user then
        return { "refused", 0, 0, "user_depth", forecast.next_release(flow) }
      end
    end

    function scheduler._can_start(policy, tier)
      if workforce.recovery or (ledger.ready > 0 and shares.next_tier(policy)) then
        return false
      end
      return shares.is_entitled(policy, tier)
    end

    function scheduler._start(tier, ticket)
      shares.charge(tier)
      ledger.hold(ticket, ledger.now)
      ticket.is_confirmed = true
      return { "granted", 0, 0, ticket.id }
    end
  elseif name == "_confirm" then
    function scheduler._confirm(call)
      local answer = { "gone", 0, 0 }
      for i = FIRST, #ARGV do
        local ticket = ledger.ticket(ARGV[i])
        if not ticket then
          if not workforce.recovery then
            answer[#answer + 1] = ARGV[i]
          end
        elseif workforce.is_held(call, ticket) then
          ticket.is_confirmed = true
        else
          answer[#answer + 1] = ARGV[i]
        end
      end
      return #answer > 3 and answer or { "done", 0, 0, 0 }
    end
  elseif name == "_release" then
    function scheduler._release(call)
      local id, is_abnormal = ARGV[FIRST], ARGV[FIRST + 1] == "1"
      local ticket = ledger.ticket(id)
      if not ticket then
        ledger.bar(id, call.worker, call.seq)
      elseif ticket.worker == call.worker and HOLDS_SLOT[ticket.state] then
        ticket.seq = call.seq
        hold_times.record(ledger.now, ledger.now - ticket.granted_at)
        return { "done", 0, 0, ledger.give_back(ticket, is_abnormal) }
      end
      return { "gone", 0, 0, id }
    end
  elseif name == "_cancel" then
    function scheduler._cancel(call)
      local id, keep_place = ARGV[FIRST], ARGV[FIRST + 1] == "1"
      local has_expired = ARGV[FIRST + 2] == "1"
      local ticket = ledger.ticket(id)
      if not ticket then
        ledger.bar(id, call.worker, call.seq)
        return { "gone", 0, 0, id }
      end
      local state = ticket.state
      if ticket.worker ~= call.worker or not (IN_LINE[state] or HOLDS_SLOT[state]) then
        return { "gone", 0, 0, id }
      end
      ticket.seq = call.seq
      if HOLDS_SLOT[state] then
        ledger.give_back(ticket, false)
      elseif not (keep_place and ledger.send_away(ticket, ledger.now)) then
        ledger.leave_line(ticket)
        ledger.end_(ticket)
      end
      if has_expired then
        return { "done", 0, 0, forecast.refuse("wait_expired", ticket.tier)[5] }
      end
      return { "done", 0, 0, 0 }
    end
  elseif name == "_attach" or name == "_refusal_to_return" then
    function scheduler._attach(call)
      local id, flow = ARGV[FIRST], ARGV[FIRST + 1]
      local ticket = ledger.ticket(id)
      if not ticket or not IN_LINE[ticket.state] or ticket.flow ~= flow then
        return { "gone", 0, 0, id }
      end
      if workforce.is_too_late(call) then
        return { "gone", 0, 0, id }
      end
      local refusal = ticket.state == "away" and scheduler._refusal_to_return(ticket)
      if refusal then
        return refusal
      end
      if ticket.worker ~= call.worker and ticket.state ~= "away" then
        ledger.tell(ticket, "moved")
      end
      ledger.disown(ticket)
      ticket.worker, ticket.seq = call.worker, call.seq
      ledger.make_ready(ticket)
      return scheduler._queued(ticket)
    end

    function scheduler._refusal_to_return(ticket)
      local policy = ledger.policy()
      local tier = policy and ledger.limits(policy, ticket.tier)
      local flow = ledger.flow(ticket.flow)
      if tier and scheduler._depth(flow) >= tier.depth_per_user then
        return { "refused", 0, 0, "user_depth", forecast.next_release(flow) }
      end
    end
  elseif name == "_revoke" then
    function scheduler._revoke()
      local id, force = ARGV[FIRST], ARGV[FIRST + 1] == "1"
      local ticket = ledger.ticket(id)
      if not ticket or not HOLDS_SLOT[ticket.state] then
        return { "gone", 0, 0, id }
      end
      ledger.start_revoking(ticket)
      if force then
        ledger.free(ticket)
      end
      return { "done", 0, 0, 0 }
    end
  elseif name == "_beat" then
    function scheduler._beat(call)
      local command = {
        waiting = tonumber(ARGV[FIRST]),
        ack = tonumber(ARGV[FIRST + 1]),
        label = ARGV[FIRST + 2],
        held = {},
        seen = {},
      }
      local at = FIRST + 4
      for i = 1, tonumber(ARGV[FIRST + 3]) do
        local id, tier, flow, held_ms = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
        command.held[i] = { ticket = id, tier = tier, flow = flow, held_ms = tonumber(held_ms) }
        at = at + 4
      end
      for i = at, #ARGV do
        command.seen[#command.seen + 1] = ARGV[i]
      end
      return workforce.beat(call, command)
    end
  elseif name == "_reassert" then
    function scheduler._reassert(call)
      if not ledger.policy() then
        return { "need_policy", 0, 0 }
      end
      local command = {
        after = ARGV[FIRST],
        upto = ARGV[FIRST + 1],
        is_last = ARGV[FIRST + 2] == "1",
        waiting = {},
      }
      for at = FIRST + 3, #ARGV, 7 do
        command.waiting[#command.waiting + 1] = {
          ticket = ARGV[at],
          tier = ARGV[at + 1],
          flow = ARGV[at + 2],
          waited_ms = tonumber(ARGV[at + 3]),
          left_ms = tonumber(ARGV[at + 4]),
          seq = tonumber(ARGV[at + 5]),
          is_known = ARGV[at + 6] == "1",
        }
      end
      local answer = { "gone", 0, 0 }
      for _, id in ipairs(workforce.reassert(call, command)) do
        answer[#answer + 1] = id
      end
      return #answer > 3 and answer or { "done", 0, 0, 0 }
    end
  elseif name == "_sign_off" then
    function scheduler._sign_off(call)
      workforce.sign_off(call)
      return { "done", 0, 0, 0 }
    end
  elseif name == "_positions" or name == "_of_flow" then
    function scheduler._positions()
      local policy, ids, seen = ledger.policy(), {}, {}
      local last = FIRST + ARGV[FIRST]
      for i = FIRST + 1, last do
        ids[#ids + 1] = ARGV[i]
      end
      for i = last + 1, #ARGV do
        scheduler._of_flow(ids, ARGV[i])
      end
      ledger.fetch(ids)
      local places, granted = {}, {}
      for _, id in ipairs(ids) do
        local ticket = not seen[id] and ledger.ticket(id)
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
      local is_recovering = workforce.recovery and 1 or 0
      return { "places", 0, 0, places, granted, policy and policy.version or 0, is_recovering }
    end

    function scheduler._of_flow(ids, id)
      local flow, slugs = ledger.find_flow(id), {}
      for slug in pairs(flow and flow.lines or {}) do
        slugs[#slugs + 1] = slug
      end
      table.sort(slugs, ledger.precedes)
      for _, slug in ipairs(slugs) do
        for _, ticket in ipairs(flow.lines[slug]) do
          ids[#ids + 1] = ticket
        end
      end
      for _, ticket in ipairs(flow and flow.held or {}) do
        ids[#ids + 1] = ticket
      end
    end
  elseif name == "_tick" then
    function scheduler._tick()
      return { "done", 0, 0, 0 }
    end
  elseif name == "_set_policy" or name == "_pack_policy" then
    function scheduler._set_policy()
      local version, digest = tonumber(ARGV[FIRST]), ARGV[FIRST + 1]
      local in_force = ledger.policy()
      if not in_force or version > in_force.version then
        ledger.policy_record = scheduler._pack_policy(version, digest)
        ledger.policy_read = false
        in_force = ledger.policy()
        forecast.edited_at = ledger.now
        shares.adapt(in_force)
        ledger.removed = 0
        for slug in pairs(ledger.all_tiers()) do
          ledger.removed = ledger.removed + (ledger.limits(in_force, slug) and 0 or 1)
        end
        scheduler._clear_removed_tiers()
      end
      local is_current = in_force.version == version and in_force.digest == digest
      return { "policy_stamp", 0, 0, in_force.version, in_force.digest, is_current and 1 or 0 }
    end

    function scheduler._pack_policy(version, digest)
      local numbers, tiers, reserved = {}, {}, 0
      for i = 1, 5 do
        numbers[i] = tonumber(ARGV[FIRST + 1 + i])
      end
      for at = FIRST + 8, #ARGV, 8 do
        local limits = {}
        for i = 1, 7 do
          limits[i] = tonumber(ARGV[at + i])
        end
        reserved = reserved + limits[2]
        tiers[#tiers + 1] = ARGV[at]
        tiers[#tiers + 1] = cmsgpack.pack(unpack(limits))
      end
      local capacity, queue_depth, max_hold_ms, drain_ms, grace_ms = unpack(numbers)
      local is_paused = ARGV[FIRST + 7] == "1"
      return cmsgpack.pack(
        version, digest, capacity, queue_depth, max_hold_ms, drain_ms, grace_ms, is_paused,
        reserved, tiers
      )
    end
  elseif
    name == "_snapshot"
    or name == "_holder"
    or name == "_worker_count"
    or name == "_state_of"
    or name == "_append"
  then
    local MAX_HOLDERS = 256

    function scheduler._snapshot()
      local policy, slugs = ledger.policy(), {}
      local tiers, holders, workers = {}, {}, {}
      for slug in pairs(ledger.all_tiers()) do
        slugs[#slugs + 1] = slug
      end
      table.sort(slugs, ledger.precedes)
      for _, slug in ipairs(slugs) do
        local tier = ledger.find_tier(slug)
        scheduler._append(tiers, slug, tier.in_flight, tier.waiting)
      end
      for _, id in ipairs(ledger.roster()) do
        for _, ticket in ipairs(ledger.owned_by(id, "g", MAX_HOLDERS - #holders / 6)) do
          scheduler._holder(holders, ticket)
        end
        scheduler._worker_count(workers, ledger.worker(id))
      end
      return {
        "overview",
        0,
        0,
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

    function scheduler._holder(holders, t)
      local held_ms = ledger.now - t.granted_at
      scheduler._append(holders, t.id, t.tier, t.flow, t.worker, t.state, held_ms)
    end

    function scheduler._worker_count(workers, worker)
      local state, silent_ms = scheduler._state_of(worker), ledger.now - worker.beat_at
      local held, waiting = ledger.count_owned(worker.id, "g"), ledger.count_owned(worker.id, "wp")
      scheduler._append(workers, worker.id, worker.label, state, silent_ms, held, waiting)
    end

    function scheduler._state_of(worker)
      if worker.has_left then
        return "left"
      end
      return worker.is_dead and "dead" or worker.is_suspect and "suspect" or "live"
    end

    function scheduler._append(list, ...)
      for i = 1, select("#", ...) do
        list[#list + 1] = select(i, ...)
      end
    end
  else -- what enqueue needs where there is a queue, and attach
    function scheduler._repeat(call, ticket)
      if ticket.worker == call.worker and ticket.state == "granted" then
        return { "granted", 0, 0, ticket.id }
      end
      if ticket.worker == call.worker and IN_LINE[ticket.state] then
        return scheduler._queued(ticket)
      end
      return { "gone", 0, 0, ticket.id }
    end

    function scheduler._refusal_to_queue(policy, tier, wait_ms)
      local recovery = workforce.recovery
      local ends_before = recovery and ledger.now + wait_ms < recovery_.earliest_end(recovery)
      if recovery and (ends_before or wait_ms == 0) then
        return { "refused", 0, 0, "recovering", recovery_.latest_end(recovery) - ledger.now }
      end
      if wait_ms == 0 then
        return forecast.refuse("wait_too_long", tier.slug)
      end
      if ledger.find_tier(tier.slug).waiting >= tier.queue_depth then
        return forecast.refuse("tier_full", tier.slug)
      end
      if ledger.waiting() >= policy.queue_depth then
        return forecast.refuse("queue_full", tier.slug)
      end
    end

    function scheduler._queue(tier, ticket, wait_ms)
      ledger.join_line(ticket)
      local answer = scheduler._queued(ticket)
      if not workforce.recovery and forecast.would_miss(tier, answer[5], wait_ms) then
        ledger.leave_line(ticket)
        ledger.drop(ticket)
        return forecast.refuse("wait_too_long", tier.slug)
      end
      return answer
    end

    function scheduler._queued(ticket)
      local ahead = fair_queue.ahead(ledger.find_tier(ticket.tier), ticket)
      return { "queued", 0, 0, ticket.id, ahead, math.max(0, ticket.deadline_at - ledger.now) }
    end

    function scheduler._depth(flow)
      local count = #flow.held - #flow.away
      for _, line in pairs(flow.lines) do
        count = count + #line
      end
      return count
    end
  end
end

local made_when_called = {
  __index = function(class, name)
    make(class, name)
    return rawget(class, name)
  end,
}
setmetatable(hold_times, made_when_called)
setmetatable(grant_rate, made_when_called)
setmetatable(fair_queue, made_when_called)
setmetatable(ledger, made_when_called)
setmetatable(forecast, made_when_called)
setmetatable(shares, made_when_called)
setmetatable(recovery_, made_when_called)
setmetatable(workforce, made_when_called)
setmetatable(scheduler, made_when_called)
make(ledger, ALWAYS)
make(workforce, ALWAYS)
make(scheduler, ALWAYS)

-- One call ----------------------------------------------------------------------------------

local function run()
  local now_ms = tonumber(ARGV[2])
  if now_ms == 0 then
    local time = store("TIME")
    now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  ledger.load()
  local answer = scheduler.apply({
    now_ms = now_ms,
    worker = ARGV[3],
    seq = tonumber(ARGV[4]),
    acked = tonumber(ARGV[5]),
    server = ARGV[6],
  })
  ledger.save()
  if ledger.in_flight == 0 and scheduler.is_abandoned() then
    ledger.wipe()
  end
  answer[2] = ledger.has_more
  answer[3] = #ledger.notices > 0 and ledger.post(ledger.notices) or ledger.notices
  return answer
end

local function main()
  local is_sound, answer = pcall(run)
  if not is_sound and answer ~= FORGOTTEN then
    error(answer, 0)
  elseif not is_sound then
    ledger.wipe()
    answer = run()
  end
  return answer
end

return main()
