-- The waiting room of one upstream as one script: the twin of scheduling/scheduler.py.
--
-- The classes and functions are those of scheduling/, under the same names; what they decide is
-- explained there. Comments here are about the store. A test drives both twins with the same
-- commands and compares answers and books.
--
-- KEYS, all with one hash tag:
--   1 core     string  clock, counters, policy and tiers, packed (room.load)
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
-- Every call runs this file from its first line, and making 150 functions takes longer than what
-- most verbs do. So they are made when first called, section by section: room.name are those that
-- a call needs where nobody waits, room.class.name the others. (A call makes about 150 small
-- objects in all; they, and not the commands, are most of what it costs.)
--
-- Strings are never compared with "<": that depends on the server's locale (see precedes).
-- Integers stay below 2^53, where doubles are exact, and leave as RESP integers.

local store = redis.call
local verb = ARGV[1]
local FIRST = #KEYS + 3 -- where the arguments of the verb begin

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

-- What is known of the upstream, and all functions. What is 0 here is set by room.load.
local room = {
  beat_ms = tonumber(ARGV[7]),
  worker_ttl_ms = tonumber(ARGV[8]),
  -- HoldTimes
  hold_count = 0,
  p10 = 0,
  p50 = 0,
  scaled_mean = 0,
  measured = 0,
  refreshed_at = 0,
  -- Ledger
  now = 0,
  in_flight = 0,
  away = 0,
  ready = 0, -- waiters of all tiers who can be served
  removed = 0, -- tiers that the policy has not
  n_tickets = 0, -- how many there should be in the store, to notice what was lost
  n_timers = 0,
  n_owned = 0,
  n_flows = 0,
  n_workers = 0,
  tickets = 0, -- by id, read when they are first asked for; here and below, false = there is none
  flows = 0,
  workers = 0,
  has_all_workers = 0,
  tiers = 0, -- by slug
  tier_records = 0,
  policy_record = 0,
  policy_read = 0,
  notices = 0,
  has_more = 0,
  -- Forecast, Shares
  edited_at = 0,
  passed = 0,
  is_contested = false,
  -- Workforce
  recovery = 0,
  judge_at = 0,
  to_bury = 0,
  -- Scheduler
  offset = 0,
  server = 0,
  is_new = 0,
}


local function remove(list, item)
  for i = 1, list and #list or 0 do
    if list[i] == item then
      table.remove(list, i)
      return i
    end
  end
  error("forgotten", 0)
end

local function make(name)
  -- estimates.py ----------------------------------------------------------------------------
  if name == "record_hold" or name == "is_telling" or name == "_refresh" then
    local MAX_HOLDS = 64
    local HOLD_MEMORY_MS = 300000
    local REFRESH_MS = 500
    local MIN_HOLDS = 20
    local MEAN_OVER = 128
    local MEAN_SCALE = 256

    function room.record_hold(now, held_ms)
      local length = store("RPUSH", key.holds, string.format("%d:%d", now, held_ms))
      if length >= 2 * MAX_HOLDS then
        store("LTRIM", key.holds, -MAX_HOLDS, -1)
      end
      room.measured = math.min(room.measured + 1, MEAN_OVER)
      local change = (held_ms * MEAN_SCALE - room.scaled_mean) / room.measured
      room.scaled_mean = room.scaled_mean + math.floor(change)
      if room.hold_count < MIN_HOLDS or now - room.refreshed_at >= REFRESH_MS then
        room._refresh(now)
      end
    end

    function room.is_telling(now)
      return room.hold_count >= MIN_HOLDS and now - room.refreshed_at < HOLD_MEMORY_MS
    end

    function room._refresh(now)
      local holds = {}
      for _, item in ipairs(store("LRANGE", key.holds, -MAX_HOLDS, -1)) do
        local at, held = item:match("^(%d+):(%d+)$")
        if not at then
          error("forgotten", 0)
        end
        if tonumber(at) > now - HOLD_MEMORY_MS then
          holds[#holds + 1] = tonumber(held)
        end
      end
      table.sort(holds)
      room.hold_count = #holds
      room.refreshed_at = now
      room.p10 = holds[math.floor(#holds * 10 / 100) + 1]
      room.p50 = holds[math.floor(#holds * 50 / 100) + 1]
    end
  elseif name == "record_grant" or name == "gap_ms" or name == "_turn_to" then
    local BUCKET_MS = 10000
    local BUCKETS = 6 -- tier[1] to tier[6]
    local MIN_GRANTS = 5
    local DEFAULT_GAP_MS = 1000

    function room.record_grant(tier, now)
      if room._turn_to(tier, now) == 0 then
        tier.first_at = now
      end
      tier[BUCKETS] = tier[BUCKETS] + 1
    end

    function room.gap_ms(tier, now)
      local grants = room._turn_to(tier, now)
      if grants < MIN_GRANTS then
        return DEFAULT_GAP_MS
      end
      local span = math.min(now - tier.first_at, (BUCKETS - 1) * BUCKET_MS + now % BUCKET_MS)
      return math.max(1, math.floor(span / grants))
    end

    -- Bring the buckets up to now; answer what is in them.
    function room._turn_to(tier, now)
      local bucket = math.floor(now / BUCKET_MS)
      for _ = 1, math.min(bucket - tier.bucket, BUCKETS) do
        table.remove(tier, 1)
        tier[BUCKETS] = 0
      end
      tier.bucket = bucket
      return tier[1] + tier[2] + tier[3] + tier[4] + tier[5] + tier[6]
    end

  -- fair_queue.py ---------------------------------------------------------------------------
  elseif name == "fair_queue" then
    local FIRST_LAP, SECOND_LAP = 0, 1
    local TURNS = 2 ^ 42 -- turns per tier in a score: 2^53 leaves room for 2,048 tiers
    local fair_queue = {}
    room.fair_queue = fair_queue

    -- Tickets that lie before those of this tier in the common sorted set.
    local function base(tier)
      local count = 0
      for _, other in pairs(room.books.all_tiers()) do
        if other.number < tier.number then
          count = count + other.ready
        end
      end
      return count
    end

    local function member(t)
      local arrival = string.format("%d%014d!", t.lap, t.order_at) .. t.order_worker
      return arrival .. string.format("!%012d!", t.order_seq) .. t.id
    end

    local function add(tier, ticket)
      return store("ZADD", key.queue, tier.number * TURNS + ticket.turn, member(ticket))
    end

    local function is_later(one, other)
      if one.order_at ~= other.order_at then
        return one.order_at > other.order_at
      elseif one.order_worker ~= other.order_worker then
        return room.books.precedes(other.order_worker, one.order_worker)
      end
      return one.order_seq > other.order_seq
    end

    function fair_queue.at(tier, rank)
      local index = base(tier) + rank
      local found = store("ZRANGE", key.queue, index, index)[1]
      return room.known(found and found:match("^%d+![^!]*!%d+!(.*)$"))
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
      local last = line[#line] and room.known(line[#line])
      local turn = math.max(tier.turn, last and last.turn or 0) + 1
      local index = #line + 1
      while index > 1 and is_later(room.known(line[index - 1]), ticket) do
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
      if line[1] and room.known(line[1]).turn <= tier.turn then
        fair_queue._catch_up(tier, line)
      end
      tier.in_line = tier.in_line - 1
    end

    function fair_queue.resume(tier, ticket)
      if ticket.state == "waiting" then
        local added = add(tier, ticket)
        tier.ready = tier.ready + added
        room.ready = room.ready + added
      end
    end

    function fair_queue.pause(tier, ticket)
      local removed = store("ZREM", key.queue, member(ticket))
      tier.ready = tier.ready - removed
      room.ready = room.ready - removed
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
        local ticket = room.known(line[i])
        places[#places + 1] = { ticket.turn, ticket.lap }
      end
      return places
    end

    -- ``places`` begins with that of the ticket at ``start``.
    function fair_queue._assign(tier, line, places, start)
      for i = start, #line do
        local ticket, place = room.known(line[i]), places[i - start + 1]
        if ticket.turn ~= place[1] or ticket.lap ~= place[2] then
          fair_queue.pause(tier, ticket)
          ticket.turn, ticket.lap = place[1], place[2]
          fair_queue.resume(tier, ticket)
        end
      end
    end

  -- ledger.py, with what lies in the store of records.py and policy.py ------------------------
  elseif name == "always" then
    local FORMAT = 1 -- of what lies in the store: what was written in another one is forgotten
    local KEEP_MS = 3600000 -- an upstream that no worker speaks of any more leaves nothing behind
    local SWEEP = 64

    function room.load()
      room.tickets, room.flows, room.workers, room.tiers = {}, {}, {}, {}
      room.notices, room.has_more = {}, 0
      room.policy_read, room.has_all_workers = false, false
      local record = store("GET", key.core)
      room.is_new = not record
      if not record then
        room.books.wipe()
        record = cmsgpack.pack(
          FORMAT, 0, 0, "", 0, 0, 0, 0, 0, 0, 0, false, false, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}
        )
      end
      local written_as
      written_as, room.now, room.offset, room.server, room.passed, room.judge_at, room.edited_at,
        room.in_flight, room.away, room.ready, room.removed, room.recovery, room.policy_record,
        room.hold_count, room.p10, room.p50, room.scaled_mean, room.measured, room.refreshed_at,
        room.n_tickets, room.n_timers, room.n_owned, room.n_flows, room.n_workers,
        room.tier_records = cmsgpack.unpack(record)
      if written_as ~= FORMAT then
        error("forgotten", 0)
      end
    end

    function room.save()
      for id, ticket in pairs(room.tickets) do
        if ticket then
          local record = room._pack_ticket(ticket)
          if record ~= ticket.record then
            room.n_tickets = room.n_tickets + store("HSET", key.tickets, id, record)
          end
          if ticket.due_at ~= ticket.timed then
            room._set_timer(ticket)
          end
        end
      end
      for id, flow in pairs(room.flows) do
        if flow then
          local new = cmsgpack.pack(flow.held, flow.lines, flow.away)
          if new ~= flow.record then
            room.n_flows = room.n_flows + store("HSET", key.flows, id, new)
          end
        end
      end
      for id, w in pairs(room.workers) do
        if w then
          local new = cmsgpack.pack(
            w.beat_at, w.label, w.seq, w.beat_seq, w.past_beat_seq, w.mismatches, w.is_suspect,
            w.is_dead, w.has_left, w.has_parked
          )
          if new ~= w.record then
            room.n_workers = room.n_workers + store("HSET", key.workers, id, new)
          end
        end
      end
      for slug, t in pairs(room.tiers) do
        room.tier_records[slug] = cmsgpack.pack(
          t.number, t.passed, t.in_flight, t.waiting, t.ready, t.in_line, t.turn, t.return_at,
          t.bucket, t.first_at, t[1], t[2], t[3], t[4], t[5], t[6], t.cap, t.reserved, t.weight,
          t.wait_budget_ms, t.queue_depth, t.depth_per_user, t.usable_slots
        )
      end
      local record = cmsgpack.pack(
        FORMAT, room.now, room.offset, room.server, room.passed, room.judge_at, room.edited_at,
        room.in_flight, room.away, room.ready, room.removed, room.recovery, room.policy_record,
        room.hold_count, room.p10, room.p50, room.scaled_mean, room.measured, room.refreshed_at,
        room.n_tickets, room.n_timers, room.n_owned, room.n_flows, room.n_workers,
        room.tier_records
      )
      store("SET", key.core, record, "PX", KEEP_MS)
      if verb == "beat" then
        for i = 2, 8 do
          store("PEXPIRE", KEYS[i], KEEP_MS)
        end
      end
    end

    function room._set_timer(ticket)
      if ticket.due_at > 0 then
        room.n_timers = room.n_timers + store("ZADD", key.timers, ticket.due_at, ticket.id)
      else
        room.n_timers = room.n_timers - store("ZREM", key.timers, ticket.id)
      end
    end

    -- A ticket, false where there is none.
    function room.ticket(id)
      local ticket = room.tickets[id]
      if ticket == nil then
        local record = store("HGET", key.tickets, id)
        ticket = record and room._unpack_ticket(id, record)
        room.tickets[id] = ticket
      end
      return ticket
    end

    -- What is kept of a ticket depends on its state: the rest is never asked for again.
    function room._pack_ticket(t)
      if t.state == "ended" then
        return cmsgpack.pack(t.state, t.worker, t.seq, t.due_at)
      elseif not t.granted_at then -- in line
        return cmsgpack.pack(
          t.state, t.worker, t.seq, t.due_at, t.tier, t.flow, t.order_at, t.order_worker,
          t.order_seq, t.turn, t.lap, t.deadline_at, t.is_known
        )
      end
      return cmsgpack.pack(
        t.state, t.worker, t.seq, t.due_at, t.tier, t.flow, t.granted_at, t.is_confirmed, t.named_in
      )
    end

    function room._unpack_ticket(id, record)
      local state, worker, seq, due_at, tier, flow, a, b, c, d, e, f, g = cmsgpack.unpack(record)
      if g ~= nil then -- in line
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
    function room.worker(id)
      local worker = room.workers[id]
      if worker == nil then
        local record = store("HGET", key.workers, id)
        worker = record and room._unpack_worker(id, record)
        room.workers[id] = worker
      end
      return worker
    end

    function room._unpack_worker(id, record)
      local beat_at, label, seq, beat_seq, past_beat_seq, mismatches, is_suspect, is_dead, has_left,
        has_parked = cmsgpack.unpack(record)
      if has_parked == nil then
        error("forgotten", 0)
      end
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
    function room.find_tier(slug)
      local tier, record = room.tiers[slug], room.tier_records[slug]
      if not tier and record then
        local number, passed, in_flight, waiting, ready, in_line, turn, return_at, bucket, first_at,
          c1, c2, c3, c4, c5, c6, cap, reserved, weight, wait_budget_ms, queue_depth,
          depth_per_user, usable_slots = cmsgpack.unpack(record)
        tier = {
          c1, c2, c3, c4, c5, c6, -- the grant rate: counts of six buckets
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
          cap = cap, -- false where the policy has no such tier
          reserved = reserved,
          weight = weight,
          wait_budget_ms = wait_budget_ms,
          queue_depth = queue_depth,
          depth_per_user = depth_per_user,
          usable_slots = usable_slots,
        }
        room.tiers[slug] = tier
      end
      return tier
    end

    -- workforce.py

    function room.is_behind(call)
      local worker = room.worker(call.worker)
      return call.acked > (worker and worker.seq or 0)
    end

    function room.end_recovery()
      if room.recovery and room.recovery_rules.is_over(room.recovery, room.now) then
        room.recovery = false
        room.judge_at = 0
      end
    end

    function room.touch(call)
      if call.worker == "" then
        return
      end
      local worker = room.worker(call.worker) or room.workforce._new_worker(call.worker)
      worker.seq = math.max(worker.seq, call.seq)
      if worker.has_parked and not room.is_silent(worker.id) then
        room.workforce._unpark(worker)
      end
    end

    function room.judge(speaker)
      if not room.recovery and room.now >= room.judge_at then
        room.workforce._judge_all(speaker)
      end
    end

    -- scheduler.py

    function room.apply(call)
      room._enter(call)
      local answer = room["_" .. verb](call)
      if room.ready > 0 then
        room._dispatch()
      end
      if answer[1] == "queued" and room.known(answer[4]).state == "granted" then
        answer = { "granted", 0, 0, answer[4] }
      end
      return answer
    end

    function room._enter(call)
      if room._judge_memory(call) then
        room.workforce.start_recovery()
      end
      room.touch(call)
      room.end_recovery()
      room._expire()
      room.judge(call.worker)
      if room.removed > 0 then
        room._clear_removed_tiers()
      end
      if room.ready > 0 then
        room._dispatch()
      end
    end

    function room._judge_memory(call)
      local now = call.now_ms + room.offset
      local has_forgotten = room.is_new
      if now < room.now - room.beat_ms then
        room.offset = room.offset + room.now - now
        has_forgotten = true
      end
      now = math.max(now, room.now)
      if now - room.now > 2 * room.beat_ms and room.workforce.expects_beats() then
        has_forgotten = true
      end
      local known = room.server
      if call.server ~= "" then
        room.server = call.server
      end
      if known ~= room.server and known ~= "" then
        has_forgotten = true
      end
      room.now = now
      return has_forgotten or (not room.recovery and room.is_behind(call))
    end

    function room._expire()
      local due = store("ZRANGEBYSCORE", key.timers, "-inf", room.now, "LIMIT", 0, SWEEP)
      if #due == 0 then
        return
      end
      room.fetch(due)
      for _, id in ipairs(due) do
        local ticket = room.known(id)
        if ticket.state == "ended" then
          room.forget_or_keep(ticket)
        elseif ticket.state == "draining" then
          room.free(ticket)
        elseif ticket.state == "granted" then
          room.books.start_revoking(ticket)
        else
          room._refuse_waiter(ticket, "wait_expired")
        end
      end
      if #due == SWEEP then
        room.has_more = 1
      end
    end
  elseif name == "policy" or name == "limits" then
    -- The policy in force, false where there is none; the limits of a tier lie in its record.
    function room.policy()
      if not room.policy_read and room.policy_record then
        local version, digest, capacity, queue_depth, max_hold_ms, drain_ms, grace_ms, is_paused,
          reserved, slugs = cmsgpack.unpack(room.policy_record)
        room.policy_read = {
          version = version,
          digest = digest,
          capacity = capacity,
          queue_depth = queue_depth,
          max_hold_ms = max_hold_ms,
          drain_ms = drain_ms,
          grace_ms = grace_ms,
          is_paused = is_paused,
          reserved = reserved, -- of all tiers together
          slugs = slugs, -- in the order of the policy
        }
      end
      return room.policy_read
    end

    -- A tier that the policy has, false where it has not.
    function room.limits(slug)
      local tier = room.find_tier(slug)
      return tier and tier.cap and tier
    end
  elseif name == "line" then
    local UNLIMITED = 2 ^ 31 - 1 -- policy.py
    local MAX_AWAY_UNBOUNDED = 100
    local line = {}
    room.line = line

    function line.join_line(ticket)
      room.tickets[ticket.id] = ticket
      local tier = room.find_tier(ticket.tier) or room.books.tier(ticket.tier)
      local lines = room.flow(ticket.flow).lines
      lines[ticket.tier] = lines[ticket.tier] or {}
      room.fair_queue.join(tier, ticket, lines[ticket.tier])
      tier.waiting = tier.waiting + 1
      ticket.due_at = ticket.deadline_at
      room.own(ticket)
    end

    function line.leave_line(ticket)
      local flow, tier = room.flow(ticket.flow), room.find_tier(ticket.tier)
      room.disown(ticket)
      room.fair_queue.leave(tier, ticket, flow.lines[ticket.tier])
      if ticket.state == "away" then
        remove(flow.away, ticket.id)
        room.away = room.away - 1
      else
        tier.waiting = tier.waiting - 1
      end
      line._drop_line(flow, ticket)
    end

    function line.serve(ticket)
      local flow, tier = room.flow(ticket.flow), room.find_tier(ticket.tier)
      room.disown(ticket)
      room.fair_queue.serve(tier, ticket, flow.lines[ticket.tier])
      tier.waiting = tier.waiting - 1
      line._drop_line(flow, ticket)
      room.hold(ticket, room.now)
    end

    function line.park(ticket)
      room.fair_queue.pause(room.find_tier(ticket.tier), ticket)
      room.disown(ticket)
      ticket.state = "parked"
      room.own(ticket)
    end

    function line.make_ready(ticket)
      local tier = room.find_tier(ticket.tier)
      room.disown(ticket)
      if ticket.state == "away" then
        remove(room.flow(ticket.flow).away, ticket.id)
        room.away = room.away - 1
        tier.waiting = tier.waiting + 1
      end
      ticket.state = "waiting"
      room.fair_queue.resume(tier, ticket)
      ticket.due_at = ticket.deadline_at
      room.own(ticket)
    end

    function line.send_away(ticket, since)
      local policy, flow = room.policy(), room.flow(ticket.flow)
      if ticket.state == "away" then
        return true
      end
      if not policy or not room.limits(ticket.tier) or policy.grace_ms == 0 then
        return false
      end
      local bound = policy.queue_depth
      local most = bound == UNLIMITED and MAX_AWAY_UNBOUNDED or math.floor(bound / 4)
      if #flow.away > 0 or room.away >= most then
        return false
      end
      room.disown(ticket)
      local tier = room.find_tier(ticket.tier)
      room.fair_queue.pause(tier, ticket)
      tier.waiting = tier.waiting - 1
      ticket.state = "away"
      flow.away[#flow.away + 1] = ticket.id
      room.away = room.away + 1
      ticket.due_at = math.min(ticket.deadline_at, since + policy.grace_ms)
      return true
    end

    function line._drop_line(flow, ticket)
      if #flow.lines[ticket.tier] == 0 then
        flow.lines[ticket.tier] = nil
      end
      room._drop_flow(ticket.flow, flow)
    end
  elseif name == "hold" or name == "limit_hold" then
    function room.hold(ticket, granted_at)
      room.tickets[ticket.id] = ticket
      local tier = room.find_tier(ticket.tier) or room.books.tier(ticket.tier)
      tier.in_flight = tier.in_flight + 1
      room.in_flight = room.in_flight + 1
      ticket.state = "granted"
      ticket.granted_at = granted_at
      ticket.is_confirmed = ticket.is_confirmed or false
      ticket.named_in = 0
      local held = room.flow(ticket.flow).held
      held[#held + 1] = ticket.id
      room.limit_hold(ticket)
      room.own(ticket)
    end

    function room.limit_hold(ticket)
      if ticket.state == "granted" then
        local policy = room.policy()
        local max_hold_ms = policy and policy.max_hold_ms or 0
        ticket.due_at = max_hold_ms > 0 and ticket.granted_at + max_hold_ms or 0
      end
    end
  elseif
    name == "give_back"
    or name == "free"
    or name == "_unhold"
    or name == "end_"
    or name == "bar"
    or name == "disown"
    or name == "_drop_flow"
  then
    local TOMBSTONE_BEATS = 2

    function room.give_back(ticket, drain)
      local policy = drain and room.policy()
      if not policy or policy.drain_ms == 0 then
        room.free(ticket)
        return 0
      end
      room.disown(ticket)
      room._unhold(ticket)
      ticket.state = "draining"
      ticket.due_at = room.now + policy.drain_ms
      return policy.drain_ms
    end

    function room.free(ticket)
      if ticket.state ~= "draining" then
        room.disown(ticket)
        room._unhold(ticket)
      end
      room.in_flight = room.in_flight - 1
      local tier = room.find_tier(ticket.tier)
      tier.in_flight = tier.in_flight - 1
      room.end_(ticket)
    end

    function room._unhold(ticket)
      local flow = room.flow(ticket.flow)
      remove(flow.held, ticket.id)
      room._drop_flow(ticket.flow, flow)
    end

    function room.end_(ticket)
      ticket.state = "ended"
      local worker = room.worker(ticket.worker)
      ticket.seq = math.max(ticket.seq, worker and worker.seq or 0)
      ticket.due_at = room.now + TOMBSTONE_BEATS * room.beat_ms
    end

    function room.bar(id, worker, seq)
      room.tickets[id] = {
        id = id,
        record = false,
        timed = 0,
        state = "ended",
        worker = worker,
        seq = seq,
        due_at = room.now + TOMBSTONE_BEATS * room.beat_ms,
      }
    end

    function room.disown(ticket)
      local member = ticket.worker .. "!" .. room._mark(ticket) .. "!" .. ticket.id
      room.n_owned = room.n_owned - store("ZREM", key.owned, member)
    end

    function room._drop_flow(id, flow)
      if #flow.held == 0 and not next(flow.lines) then
        if flow.record then
          room.n_flows = room.n_flows - store("HDEL", key.flows, id)
        end
        room.flows[id] = false
      end
    end
  elseif name == "fetch" or name == "known" or name == "forget_or_keep" or name == "drop" then
    local CHUNK = 500 -- Lua's unpack is bounded by its C stack

    -- Read many tickets in one go.
    function room.fetch(ids)
      for start = 1, #ids, CHUNK do
        local stop = math.min(start + CHUNK - 1, #ids)
        local records = store("HMGET", key.tickets, unpack(ids, start, stop))
        for i = start, stop do
          local id, record = ids[i], records[i - start + 1]
          if room.tickets[id] == nil then
            room.tickets[id] = record and room._unpack_ticket(id, record)
          end
        end
      end
    end

    -- A ticket that an index names.
    function room.known(id)
      return id and room.ticket(id) or error("forgotten", 0)
    end

    function room.forget_or_keep(tombstone)
      local worker = room.worker(tombstone.worker)
      if not worker or worker.is_dead or worker.past_beat_seq >= tombstone.seq then
        room.drop(tombstone)
      else
        tombstone.due_at = room.now + room.beat_ms
      end
    end

    function room.drop(ticket)
      room.n_tickets = room.n_tickets - store("HDEL", key.tickets, ticket.id)
      room.n_timers = room.n_timers - store("ZREM", key.timers, ticket.id)
      room.tickets[ticket.id] = false
    end
  elseif name == "find_flow" or name == "flow" or name == "own" or name == "_mark" then
    function room.find_flow(id)
      local flow = room.flows[id]
      if flow == nil then
        local record = store("HGET", key.flows, id)
        flow = false
        if record then
          local held, lines, away = cmsgpack.unpack(record)
          flow = { record = record, held = held, lines = lines, away = away }
        end
        room.flows[id] = flow
      end
      return flow
    end

    function room.flow(id)
      local flow = room.find_flow(id)
      if not flow then
        flow = { record = false, held = {}, lines = {}, away = {} }
        room.flows[id] = flow
      end
      return flow
    end

    function room.own(ticket)
      local member = ticket.worker .. "!" .. room._mark(ticket) .. "!" .. ticket.id
      room.n_owned = room.n_owned + store("ZADD", key.owned, 0, member)
    end

    function room._mark(ticket)
      if ticket.state == "parked" then
        return "p"
      end
      return ticket.granted_at and "g" or "w"
    end
  elseif name == "books" then
    local books = {}
    room.books = books

    function books.wipe()
      store("DEL", unpack(KEYS, 1, 8))
    end

    -- A key that was evicted or deleted breaks what the others say: then begin anew, and let the
    -- workers say what is true.
    function books.check()
      local is_whole = store("ZCARD", key.queue) == room.ready
        and store("HLEN", key.tickets) == room.n_tickets
        and store("ZCARD", key.timers) == room.n_timers
        and store("ZCARD", key.owned) == room.n_owned
        and store("HLEN", key.flows) == room.n_flows
        and store("HLEN", key.workers) == room.n_workers
      if not is_whole then
        error("forgotten", 0)
      end
    end

    -- Byte order, as Python's and the sorted sets' own.
    function books.precedes(one, other)
      for i = 1, math.min(#one, #other) do
        local a, b = one:byte(i), other:byte(i)
        if a ~= b then
          return a < b
        end
      end
      return #one < #other
    end

    -- All workers' ids in order.
    function books.roster()
      if not room.has_all_workers then
        local found = store("HGETALL", key.workers)
        for i = 1, #found, 2 do
          local id, record = found[i], found[i + 1]
          if room.workers[id] == nil then
            room.workers[id] = room._unpack_worker(id, record)
          end
        end
        room.has_all_workers = true
      end
      local ids = {}
      for id, worker in pairs(room.workers) do
        if worker then
          ids[#ids + 1] = id
        end
      end
      table.sort(ids, books.precedes)
      return ids
    end

    function books.all_tiers()
      for slug in pairs(room.tier_records) do
        room.find_tier(slug)
      end
      return room.tiers
    end

    function books.waiting()
      local count = 0
      for _, tier in pairs(books.all_tiers()) do
        count = count + tier.waiting
      end
      return count
    end

    function books.start_revoking(ticket)
      if ticket.state == "granted" then
        ticket.state = "revoking"
        ticket.due_at = 0
      end
      books.tell(ticket, "revoked")
    end

    function books.tell(ticket, kind, reason, retry_ms)
      local notices = room.notices
      notices[#notices + 1] = { ticket.worker, kind, ticket.id, reason or "", retry_ms or 0 }
    end

    -- Drop news into the inboxes that are known; the caller takes the rest from the answer.
    function books.post(notices)
      local inboxes, left, used = {}, {}, {}
      for i = 9, #KEYS do
        inboxes[ARGV[i + 2]] = KEYS[i]
      end
      for _, notice in ipairs(notices) do
        local inbox = notice[1] ~= ARGV[3] and inboxes[notice[1]]
        if inbox then
          local item = table.concat(notice, "!", 2)
          if type(redis.pcall("RPUSH", inbox, item)) == "table" then -- somebody else wrote there
            store("DEL", inbox)
            store("RPUSH", inbox, item)
          end
          used[inbox] = true
        else
          for i = 1, 5 do
            left[#left + 1] = notice[i]
          end
        end
      end
      for inbox in pairs(used) do
        store("PEXPIRE", inbox, 2 * room.worker_ttl_ms)
      end
      return left
    end

    function books.tier(slug)
      local tier = room.find_tier(slug)
      if not tier then
        local taken, number = {}, 0
        for _, other in pairs(books.all_tiers()) do
          taken[other.number] = true
        end
        while taken[number] do
          number = number + 1
        end
        tier = { 0, 0, 0, 0, 0, 0, slug = slug, number = number, bucket = 0, first_at = 0 }
        tier.passed, tier.in_flight, tier.waiting, tier.return_at = 0, 0, 0, 0
        tier.ready, tier.in_line, tier.turn, tier.cap = 0, 0, 0, false
        room.tiers[slug] = tier
        room.removed = room.removed + 1 -- until a policy has it
      end
      return tier
    end

    function books.owned_by(worker, marks, limit, after, upto)
      local found = {}
      for mark in marks:gmatch(".") do
        local prefix = worker .. "!" .. mark .. "!"
        local low, high = "(" .. prefix .. (after or ""), "[" .. prefix .. (upto or "~")
        local left = limit and limit - #found or -1
        local members = store("ZRANGEBYLEX", key.owned, low, high, "LIMIT", 0, left)
        for i = 1, #members do
          members[i] = members[i]:sub(#prefix + 1)
        end
        room.fetch(members)
        for i = 1, #members do
          found[#found + 1] = room.known(members[i])
        end
      end
      return found
    end

    function books.count_owned(worker, marks)
      local count = 0
      for mark in marks:gmatch(".") do
        local prefix = worker .. "!" .. mark
        -- '"' is the character after "!".
        count = count + store("ZLEXCOUNT", key.owned, "[" .. prefix .. "!", "(" .. prefix .. '"')
      end
      return count
    end

  -- forecast.py -----------------------------------------------------------------------------
  elseif name == "forecast" then
    local EDIT_QUIET_MS = 1000
    local SAMPLES = 16
    local RETURN_HORIZON_MS = 60000
    local FEW_HOLDS = 5
    local DEFAULT_GAP_MS = 1000
    local MEAN_SCALE = 256
    local OVERTAKING_PER_MILLE = 1075
    local SPREAD_PER_MILLE = 295
    local MIN_SPREAD_MS = 1000
    local UNMEASURED_HOLD_MS = 1000
    local forecast = {}
    room.forecast = forecast

    function forecast.refuse(reason, slug)
      local tier = room.find_tier(slug)
      local gap = math.max(room.gap_ms(tier, room.now), forecast._least_gap_ms(tier))
      local return_at = math.max(tier.return_at, room.now + tier.waiting * gap) + gap
      tier.return_at = math.min(return_at, room.now + RETURN_HORIZON_MS)
      return { "refused", 0, 0, reason, tier.return_at - room.now }
    end

    function forecast._least_gap_ms(tier)
      if not tier.cap then
        return 0
      end
      local hold = UNMEASURED_HOLD_MS
      if room.measured >= FEW_HOLDS then
        hold = math.floor(room.scaled_mean / MEAN_SCALE)
      end
      return math.floor(hold / math.max(1, tier.usable_slots))
    end

    function forecast.next_release(flow)
      if #flow.held == 0 or not room.is_telling(room.now) then
        return 0
      end
      local oldest = room.known(flow.held[1]).granted_at
      for _, id in ipairs(flow.held) do
        oldest = math.min(oldest, room.known(id).granted_at)
      end
      return math.max(1, oldest + room.p50 - room.now)
    end

    function forecast.would_miss(tier, ahead, wait_ms)
      local now = room.now
      if not room.is_telling(now) or now - room.edited_at < EDIT_QUIET_MS then
        return false
      end
      local slots = tier.usable_slots
      if math.floor(ahead / slots) * room.p10 <= wait_ms then
        return false
      end
      return math.floor(forecast._staying(tier.slug, ahead, slots) / slots) * room.p10 > wait_ms
    end

    function forecast._staying(slug, ahead, slots)
      local tier = room.find_tier(slug)
      local step = math.ceil(ahead / SAMPLES)
      local staying = 0
      for rank = 0, ahead - 1, step do
        local start_at = room.now + math.floor(staying / slots) * room.p10
        if room.fair_queue.at(tier, rank).deadline_at >= start_at then
          staying = staying + math.min(step, ahead - rank)
        end
      end
      return staying
    end

    function forecast.place(ticket, delay, paths)
      local tier, policy = room.find_tier(ticket.tier), room.policy()
      local ahead = room.fair_queue.ahead(tier, ticket)
      if not policy or not tier.cap then
        return ahead, 0, 0
      end
      local hold = forecast._hold_ms(policy)
      paths[tier.slug] = paths[tier.slug] or room.pace.legs(policy, tier.slug, hold)
      local middle = room.pace.when(paths[tier.slug], hold, ahead + 1)
      middle = math.floor(middle * OVERTAKING_PER_MILLE / 1000)
      local left = math.max(0, ticket.deadline_at - room.now)
      middle = math.min(middle + delay, math.floor(left * 1000 / (1000 + SPREAD_PER_MILLE)))
      local spread = math.max(MIN_SPREAD_MS, math.floor(middle * SPREAD_PER_MILLE / 1000))
      local low = math.max(0, middle - spread)
      return ahead, low, low + 2 * spread
    end

    function forecast._hold_ms(policy)
      if room.measured < FEW_HOLDS then
        return math.max(1, policy.capacity * DEFAULT_GAP_MS)
      end
      return math.max(1, math.floor(room.scaled_mean / MEAN_SCALE))
    end

  -- pace.py ---------------------------------------------------------------------------------
  elseif name == "pace" then
    local MILLI = 1000
    local HORIZON_MS = 3600000
    local pace = {}
    room.pace = pace

    -- A path is a list of {at_ms, served, slots}.
    function pace.legs(policy, slug, hold_ms)
      local left, at, served, found = {}, 0, 0, {}
      for _, other in ipairs(policy.slugs) do
        local ready = room.find_tier(other).ready
        if other ~= slug and ready > 0 then
          left[other] = ready * MILLI
        end
      end
      while true do
        local slots = pace.split(policy, slug, left)
        found[#found + 1] = { at, served, slots[slug] }
        if not next(left) or at >= HORIZON_MS then
          return found
        end
        local ends, step = {}, HORIZON_MS
        for other, count in pairs(left) do
          ends[other] = math.floor(count * hold_ms / slots[other])
          step = math.min(step, ends[other])
        end
        for other, ended in pairs(ends) do
          left[other] = left[other] - math.floor(slots[other] * step / hold_ms)
          if ended == step then
            left[other] = nil
          end
        end
        at = at + step
        served = served + math.floor(slots[slug] * step / hold_ms)
      end
    end

    function pace.when(path, hold_ms, need)
      local i = #path
      while path[i][2] > need * MILLI do
        i = i - 1
      end
      return path[i][1] + math.floor((need * MILLI - path[i][2]) * hold_ms / path[i][3])
    end

    function pace.split(policy, slug, left)
      local todo, slots, rest = {}, {}, policy.capacity
      for _, other in ipairs(policy.slugs) do
        local tier = room.find_tier(other)
        if other == slug or left[other] then
          todo[#todo + 1] = tier
        else
          rest = rest - tier.reserved
        end
      end
      rest = rest * MILLI
      while #todo > 0 do
        local weights, shares, low, high = 0, {}, {}, {}
        for _, tier in ipairs(todo) do
          weights = weights + tier.weight
        end
        for _, tier in ipairs(todo) do
          local share = math.floor(rest * tier.weight / weights)
          shares[tier.slug] = share
          low[tier.slug] = share < tier.reserved * MILLI and tier.reserved * MILLI or nil
          high[tier.slug] = share > tier.cap * MILLI and tier.cap * MILLI or nil
        end
        for other, share in pairs(next(low) and low or next(high) and high or shares) do
          slots[other] = math.max(1, share)
          rest = math.max(0, rest - slots[other])
        end
        local undecided = {}
        for _, tier in ipairs(todo) do
          if not slots[tier.slug] then
            undecided[#undecided + 1] = tier
          end
        end
        todo = undecided
      end
      return slots
    end

  -- shares.py -------------------------------------------------------------------------------
  elseif name == "is_entitled" or name == "charge" then
    local SCALE = 2 ^ 32
    local REBASE_AT = 2 ^ 50

    function room.is_entitled(policy, tier)
      local free = policy.capacity - room.in_flight
      if free < 1 or tier.in_flight >= tier.cap then
        return false
      end
      if tier.in_flight < tier.reserved then
        return true
      end
      local reserved = 0
      if policy.reserved > tier.reserved then -- else there is nobody to reserve for
        for _, slug in ipairs(policy.slugs) do
          local other = room.find_tier(slug)
          if other ~= tier then
            reserved = reserved + math.max(0, other.reserved - other.in_flight)
          end
        end
      end
      return free > reserved
    end

    function room.charge(tier)
      if room.is_contested then
        room.passed = math.max(tier.passed, room.passed)
      end
      tier.passed = room.passed + math.floor(SCALE / tier.weight)
      room.record_grant(tier, room.now)
      if room.passed >= REBASE_AT then
        room.shares._rebase()
      end
    end
  elseif name == "shares" then
    local SCALE = 2 ^ 32
    local REBASE_TO = 2 ^ 42
    local shares = {}
    room.shares = shares

    function shares.next_tier(policy)
      local best
      local count = 0
      for _, slug in ipairs(policy.slugs) do
        local tier = room.find_tier(slug)
        if tier.ready > 0 and room.is_entitled(policy, tier) then
          count = count + 1
          -- They come in byte order, so of equals the first stays.
          if
            not best
            or tier.passed < best.passed
            or (tier.passed == best.passed and tier.weight > best.weight)
          then
            best = tier
          end
        end
      end
      room.is_contested = count > 1
      return best
    end

    function shares.adapt(policy)
      for _, slug in ipairs(policy.slugs) do
        local tier = room.find_tier(slug)
        tier.passed = math.min(tier.passed, room.passed + math.floor(SCALE / tier.weight))
      end
    end

    function shares._rebase()
      local moved = room.passed - REBASE_TO
      for _, state in pairs(room.books.all_tiers()) do
        state.passed = math.max(0, state.passed - moved)
      end
      room.passed = REBASE_TO
    end

  -- recovery.py -----------------------------------------------------------------------------
  elseif name == "recovery_rules" then
    local recovery_ms, blind_ms = tonumber(ARGV[9]), tonumber(ARGV[10])
    local recovery_rules = {}
    room.recovery_rules = recovery_rules

    function recovery_rules.expect(recovery, workers)
      for _, id in ipairs(workers) do
        recovery.awaited[id] = true
      end
    end

    function recovery_rules.earliest_end(recovery)
      return recovery.since + (next(recovery.awaited) and recovery_ms or blind_ms)
    end

    function recovery_rules.latest_end(recovery)
      return recovery.since + room.worker_ttl_ms
    end

    function recovery_rules.is_over(recovery, now)
      if now >= recovery_rules.latest_end(recovery) then
        return true
      end
      local is_over = now >= recovery_rules.earliest_end(recovery)
      for id in pairs(recovery.awaited) do
        is_over = is_over and recovery.heard[id]
      end
      return is_over
    end

  -- workforce.py ----------------------------------------------------------------------------
  elseif name == "is_silent" or name == "is_too_late" then
    function room.is_silent(id)
      local worker = room.worker(id) or error("forgotten", 0)
      return worker.is_suspect or worker.is_dead
    end

    function room.is_too_late(call)
      local worker = room.worker(call.worker)
      return worker.is_dead or call.seq <= worker.beat_seq
    end
  elseif name == "workforce" then
    local IN_LINE = { waiting = true, parked = true, away = true }
    local HOLDS_SLOT = { granted = true, revoking = true }
    local FORGET_AFTER = 30
    local SWEEP = 64
    local workforce = {}
    room.workforce = workforce

    function workforce.expects_beats()
      for _, id in ipairs(room.books.roster()) do
        local worker = room.worker(id)
        if not (worker.has_left or worker.is_dead) then
          return true
        end
      end
      return false
    end

    function workforce.start_recovery()
      local awaited = {}
      for _, id in ipairs(room.books.roster()) do
        local worker = room.worker(id)
        if not (worker.has_left or worker.is_dead) then
          worker.beat_at = room.now
          awaited[id] = true
        end
      end
      if tonumber(ARGV[9]) > 0 then
        room.recovery = { since = room.now, awaited = awaited, heard = {} }
      end
    end

    function workforce._new_worker(id)
      local worker = {
        id = id,
        record = false,
        beat_at = room.now,
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
      room.workers[id] = worker
      room.judge_at = 0
      return worker
    end

    function workforce._judge_all(speaker)
      room.judge_at = room.now + 2 * room.beat_ms
      room.to_bury = SWEEP
      for _, id in ipairs(room.books.roster()) do
        local due_at = workforce._judge(room.worker(id), speaker)
        if due_at > 0 then
          room.judge_at = math.min(room.judge_at, due_at)
        end
      end
    end

    function workforce._judge(worker, speaker)
      local silent, suspect_ms = room.now - worker.beat_at, 2 * room.beat_ms
      if worker.has_left or silent >= room.worker_ttl_ms then
        worker.is_dead = true
        if workforce._bury(worker) then
          return room.now
        end
        local ttls = worker.has_left and 1 or FORGET_AFTER
        local forget_at = worker.beat_at + ttls * room.worker_ttl_ms
        if room.now >= forget_at then
          if worker.id == speaker then
            return room.now
          end
          room.n_workers = room.n_workers - store("HDEL", key.workers, worker.id)
          room.workers[worker.id] = false
          return 0
        end
        return forget_at
      end
      if silent <= suspect_ms then
        return worker.beat_at + suspect_ms + 1
      end
      if not worker.is_suspect then
        worker.is_suspect = true
        workforce._pass_on_unconfirmed(worker)
      end
      return worker.beat_at + room.worker_ttl_ms
    end

    function workforce._pass_on_unconfirmed(worker)
      for _, ticket in ipairs(room.books.owned_by(worker.id, "g")) do
        if ticket.state == "granted" and not ticket.is_confirmed then
          room.free(ticket)
        end
      end
    end

    function workforce._bury(worker)
      local left = room.to_bury
      local tickets = room.books.owned_by(worker.id, "gwp", left + 1)
      for i = 1, math.min(#tickets, left) do
        local ticket = tickets[i]
        if not IN_LINE[ticket.state] then
          room.free(ticket)
        elseif not (ticket.is_known and room.line.send_away(ticket, worker.beat_at)) then
          room.line.leave_line(ticket)
          room.end_(ticket)
        end
      end
      room.to_bury = left - math.min(left, #tickets)
      local has_more = #tickets > left
      if has_more then
        room.has_more = 1
      end
      return has_more
    end

    function workforce.sign_off(call)
      local worker = room.worker(call.worker)
      worker.has_left, worker.is_dead = true, true
      worker.beat_at = room.now
      worker.beat_seq = math.max(worker.beat_seq, call.seq)
      worker.past_beat_seq = worker.beat_seq
      if room.recovery then
        room.recovery.heard[call.worker] = true
      end
      room.judge_at = 0
      room.end_recovery()
      room.judge()
    end

    function workforce.beat(call, beat)
      local worker = room.worker(call.worker)
      if call.seq <= worker.beat_seq then
        local reply = workforce._reply(call)
        reply[4] = 0
        return reply
      end
      local was_dead = worker.is_dead
      worker.is_dead, worker.has_left = false, false
      worker.beat_at, worker.label = room.now, beat.label
      worker.past_beat_seq, worker.beat_seq = worker.beat_seq, call.seq
      workforce._unpark(worker)
      local gone, lost = workforce._hear_of_held(call, beat, was_dead)
      local granted = workforce._name_grants(call, beat)
      local wants_waiting = workforce._wants_waiting(worker, beat)
      if room.recovery then
        room.recovery_rules.expect(room.recovery, beat.seen)
        if beat.waiting == 0 then
          room.recovery.heard[worker.id] = true
        end
        room.end_recovery()
      end
      local revoked = workforce._revoking(worker)
      return workforce._reply(call, granted, revoked, gone, lost, wants_waiting)
    end

    function workforce._reply(call, granted, revoked, gone, lost, wants_waiting)
      local policy, workers = room.policy(), {}
      for _, id in ipairs(room.books.roster()) do
        if not room.worker(id).is_dead then
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
      local parked = room.books.owned_by(worker.id, "p", SWEEP + 1)
      for i = 1, math.min(#parked, SWEEP) do
        room.line.make_ready(parked[i])
      end
      worker.has_parked = #parked > SWEEP
      if worker.has_parked then
        room.has_more = 1
      end
    end

    function workforce._hear_of_held(call, beat, was_dead)
      local gone, lost = {}, {}
      for _, item in ipairs(beat.held) do
        local ticket = room.ticket(item.ticket)
        if not ticket or (was_dead and ticket.state == "ended") then
          workforce._rebuild(call, item)
          if was_dead then
            lost[#lost + 1] = item.ticket
          end
        elseif workforce.is_held(call, ticket) then
          ticket.is_confirmed = true
          if ticket.due_at == 0 then
            room.limit_hold(ticket)
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
        room.line.leave_line(ticket)
        room.hold(ticket, room.now)
      end
      return HOLDS_SLOT[ticket.state]
    end

    function workforce._rebuild(call, item)
      local known = room.ticket(item.ticket)
      if known then
        room.drop(known)
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
      room.hold(ticket, room.now - item.held_ms)
    end

    function workforce._name_grants(call, beat)
      local listed, named = {}, {}
      for _, item in ipairs(beat.held) do
        listed[item.ticket] = true
      end
      for _, ticket in ipairs(room.books.owned_by(call.worker, "g")) do
        if not (listed[ticket.id] or ticket.seq > call.seq) then
          if ticket.named_in > 0 and beat.ack >= ticket.named_in then
            room.give_back(ticket, ticket.is_confirmed)
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
      for _, ticket in ipairs(room.books.owned_by(worker.id, "g")) do
        if ticket.state == "revoking" then
          revoking[#revoking + 1] = ticket.id
        end
      end
      return revoking
    end

    function workforce._wants_waiting(worker, beat)
      if room.recovery then
        return beat.waiting > 0 and not room.recovery.heard[worker.id]
      end
      local is_equal = room.books.count_owned(worker.id, "wp") == beat.waiting
      worker.mismatches = is_equal and 0 or worker.mismatches + 1
      return worker.mismatches >= 2
    end

    function workforce.reassert(call, command)
      local gone, listed, left = {}, {}, SWEEP
      for _, item in ipairs(command.waiting) do
        if not workforce._is_back(call, item) then
          gone[#gone + 1] = item.ticket
        end
        left = left + (listed[item.ticket] and 0 or 1)
        listed[item.ticket] = true
      end
      local tickets = room.books.owned_by(call.worker, "wp", left + 1, command.after, command.upto)
      for i = 1, math.min(#tickets, left) do
        local ticket = tickets[i]
        if not listed[ticket.id] and ticket.seq <= call.seq then
          room.line.leave_line(ticket)
          room.end_(ticket)
        end
      end
      if command.is_last then
        if #tickets <= left then
          room.worker(call.worker).mismatches = 0
        end
        if room.recovery then
          room.recovery.heard[call.worker] = true
          room.end_recovery()
        end
      end
      return gone
    end

    function workforce._is_back(call, item)
      local ticket = room.ticket(item.ticket)
      if not ticket then
        local policy = room.policy()
        if not policy or not room.limits(item.tier) then
          return false
        end
        room.line.join_line(workforce._rebuilt_waiter(call, item))
        return true
      end
      local is_mine = ticket.worker == call.worker
      if is_mine and ticket.state == "away" and ticket.seq <= call.seq then
        room.line.make_ready(ticket)
      end
      return is_mine and ticket.state ~= "ended"
    end

    function workforce._rebuilt_waiter(call, item)
      local now = room.now
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
  elseif name == "is_abandoned" then
    function room.is_abandoned()
      if room.removed == 0 and next(room.tier_records) then
        return false -- then the policy has tiers
      end
      local policy = room.policy()
      local is_retired = policy and policy.capacity == 0 and #policy.slugs == 0
      return is_retired and store("HLEN", key.flows) == 0
    end
  elseif name == "_clear_removed_tiers" or name == "_refuse_waiter" or name == "_dispatch" then
    local SWEEP = 64
    local MAX_GRANTS = 64
    local MAX_PASSED_OVER = 32

    function room._clear_removed_tiers()
      local policy = room.policy()
      if not policy then
        return
      end
      local removed, left = {}, SWEEP
      for slug in pairs(room.books.all_tiers()) do
        if not room.limits(slug) then
          removed[#removed + 1] = slug
        end
      end
      table.sort(removed, room.books.precedes)
      for _, slug in ipairs(removed) do
        local tier = room.find_tier(slug)
        for _ = 1, math.min(tier.ready, left) do
          room._refuse_waiter(room.fair_queue.at(tier, 0), "unserviceable")
          left = left - 1
        end
        if tier.ready > 0 then
          room.has_more = 1
        end
        if tier.in_flight == 0 and tier.in_line == 0 then
          room.tiers[slug], room.tier_records[slug] = nil, nil
          room.removed = room.removed - 1
        end
      end
    end

    function room._refuse_waiter(ticket, reason)
      local is_away = ticket.state == "away"
      room.line.leave_line(ticket)
      if not is_away then
        local refusal = room.forecast.refuse(reason, ticket.tier)
        room.books.tell(ticket, "refused", reason, refusal[5])
      end
      room.end_(ticket)
    end

    function room._dispatch()
      local policy = room.policy()
      if not policy or policy.is_paused or room.recovery then
        return
      end
      local grants, passed_over = 0, 0
      local tier = room.shares.next_tier(policy)
      while tier do
        if grants == MAX_GRANTS or passed_over == MAX_PASSED_OVER then
          room.has_more = 1
          return
        end
        local ticket = room.fair_queue.at(tier, 0)
        if ticket.deadline_at <= room.now then
          room._refuse_waiter(ticket, "wait_expired")
          passed_over = passed_over + 1
        elseif room.is_silent(ticket.worker) then
          room.line.park(ticket)
          passed_over = passed_over + 1
        else
          room.charge(tier)
          room.line.serve(ticket)
          room.books.tell(ticket, "granted")
          grants = grants + 1
        end
        tier = room.shares.next_tier(policy)
      end
    end
  elseif
    name == "_enqueue"
    or name == "_refusal_at_the_door"
    or name == "_can_start"
    or name == "_start"
  then
    function room._enqueue(call)
      local id, slug, flow_id = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
      local wait_ms, is_known = tonumber(ARGV[FIRST + 3]), ARGV[FIRST + 4] == "1"
      local known = room.ticket(id)
      if known then
        return room._repeat(call, known)
      end
      if room.is_too_late(call) then
        return { "gone", 0, 0, id }
      end
      local policy = room.policy()
      if not policy then
        return { "need_policy", 0, 0 }
      end
      local refusal = room._refusal_at_the_door(policy, slug, flow_id)
      if refusal then
        return refusal
      end
      local tier = room.limits(slug)
      wait_ms = math.min(tier.wait_budget_ms, math.max(0, wait_ms or tier.wait_budget_ms))
      local ticket = {
        id = id,
        record = false,
        timed = 0,
        state = "waiting",
        worker = call.worker,
        seq = call.seq,
        tier = slug,
        flow = flow_id,
        order_at = room.now,
        order_worker = call.worker,
        order_seq = call.seq,
        turn = 0,
        lap = 0,
        deadline_at = room.now + wait_ms,
        is_known = is_known,
      }
      if room._can_start(policy, tier) then
        return room._start(tier, ticket)
      end
      return room._refusal_to_queue(policy, tier, wait_ms)
        or room._queue(tier, ticket, wait_ms)
    end

    function room._refusal_at_the_door(policy, slug, flow_id)
      if policy.is_paused then
        return { "refused", 0, 0, "paused", 0 }
      end
      local tier = room.limits(slug)
      if not tier or tier.usable_slots == 0 then
        return { "refused", 0, 0, "unserviceable", 0 }
      end
      local flow = room.find_flow(flow_id)
      if flow and room._depth(flow) >= tier.depth_per_user then
        return { "refused", 0, 0, "user_depth", room.forecast.next_release(flow) }
      end
    end

    function room._can_start(policy, tier)
      if room.recovery or (room.ready > 0 and room.shares.next_tier(policy)) then
        return false
      end
      return room.is_entitled(policy, tier)
    end

    function room._start(tier, ticket)
      room.charge(tier)
      room.hold(ticket, room.now)
      ticket.is_confirmed = true
      return { "granted", 0, 0, ticket.id }
    end
  elseif
    name == "_repeat"
    or name == "_refusal_to_queue"
    or name == "_queue"
    or name == "_queued"
    or name == "_depth"
  then
    local IN_LINE = { waiting = true, parked = true, away = true }

    function room._repeat(call, ticket)
      if ticket.worker == call.worker and ticket.state == "granted" then
        return { "granted", 0, 0, ticket.id }
      end
      if ticket.worker == call.worker and IN_LINE[ticket.state] then
        return room._queued(ticket)
      end
      return { "gone", 0, 0, ticket.id }
    end

    function room._refusal_to_queue(policy, tier, wait_ms)
      local recovery = room.recovery
      local ends_before = recovery and room.now + wait_ms < room.recovery_rules.earliest_end(recovery)
      if recovery and (ends_before or wait_ms == 0) then
        return { "refused", 0, 0, "recovering", room.recovery_rules.latest_end(recovery) - room.now }
      end
      if wait_ms == 0 then
        return room.forecast.refuse("wait_too_long", tier.slug)
      end
      if tier.waiting >= tier.queue_depth then
        return room.forecast.refuse("tier_full", tier.slug)
      end
      if room.books.waiting() >= policy.queue_depth then
        return room.forecast.refuse("queue_full", tier.slug)
      end
    end

    function room._queue(tier, ticket, wait_ms)
      room.line.join_line(ticket)
      local answer = room._queued(ticket)
      if not room.recovery and room.forecast.would_miss(tier, answer[5], wait_ms) then
        room.line.leave_line(ticket)
        room.drop(ticket)
        return room.forecast.refuse("wait_too_long", tier.slug)
      end
      return answer
    end

    function room._queued(ticket)
      local ahead = room.fair_queue.ahead(room.find_tier(ticket.tier), ticket)
      return { "queued", 0, 0, ticket.id, ahead, math.max(0, ticket.deadline_at - room.now) }
    end

    function room._depth(flow)
      local count = #flow.held - #flow.away
      for _, line in pairs(flow.lines) do
        count = count + #line
      end
      return count
    end
  elseif name == "_confirm" then
    function room._confirm(call)
      local answer = { "gone", 0, 0 }
      for i = FIRST, #ARGV do
        local ticket = room.ticket(ARGV[i])
        if not ticket then
          if not room.recovery then
            answer[#answer + 1] = ARGV[i]
          end
        elseif room.workforce.is_held(call, ticket) then
          ticket.is_confirmed = true
        else
          answer[#answer + 1] = ARGV[i]
        end
      end
      return #answer > 3 and answer or { "done", 0, 0, 0 }
    end
  elseif name == "_release" then
    function room._release(call)
      local id, is_abnormal = ARGV[FIRST], ARGV[FIRST + 1] == "1"
      local ticket = room.ticket(id)
      if not ticket then
        room.bar(id, call.worker, call.seq)
      elseif
        ticket.worker == call.worker
        and (ticket.state == "granted" or ticket.state == "revoking")
      then
        ticket.seq = call.seq
        room.record_hold(room.now, room.now - ticket.granted_at)
        return { "done", 0, 0, room.give_back(ticket, is_abnormal) }
      end
      return { "gone", 0, 0, id }
    end
  elseif name == "_cancel" or name == "_keep_place" then
    local IN_LINE = { waiting = true, parked = true, away = true }
    local HOLDS_SLOT = { granted = true, revoking = true }

    function room._cancel(call)
      local id, keep_place = ARGV[FIRST], ARGV[FIRST + 1] == "1"
      local has_expired = ARGV[FIRST + 2] == "1"
      local ticket = room.ticket(id)
      if not ticket then
        room.bar(id, call.worker, call.seq)
        return { "gone", 0, 0, id }
      end
      local state = ticket.state
      if ticket.worker ~= call.worker or not (IN_LINE[state] or HOLDS_SLOT[state]) then
        return { "gone", 0, 0, id }
      end
      ticket.seq = call.seq
      if HOLDS_SLOT[state] then
        room.give_back(ticket, false)
      elseif not (keep_place and room._keep_place(ticket)) then
        room.line.leave_line(ticket)
        room.end_(ticket)
      end
      if has_expired then
        return { "done", 0, 0, room.forecast.refuse("wait_expired", ticket.tier)[5] }
      end
      return { "done", 0, 0, 0 }
    end

    function room._keep_place(ticket)
      for _, id in ipairs({ unpack(room.flow(ticket.flow).away) }) do
        if id ~= ticket.id then
          room.line.leave_line(room.known(id))
          room.end_(room.known(id))
        end
      end
      return room.line.send_away(ticket, room.now)
    end
  elseif name == "_attach" or name == "_refusal_to_return" then
    local IN_LINE = { waiting = true, parked = true, away = true }

    function room._attach(call)
      local id, flow = ARGV[FIRST], ARGV[FIRST + 1]
      local ticket = room.ticket(id)
      if not ticket or not IN_LINE[ticket.state] or ticket.flow ~= flow then
        return { "gone", 0, 0, id }
      end
      if room.is_too_late(call) then
        return { "gone", 0, 0, id }
      end
      local refusal = ticket.state == "away" and room._refusal_to_return(ticket)
      if refusal then
        return refusal
      end
      if ticket.worker ~= call.worker and ticket.state ~= "away" then
        room.books.tell(ticket, "moved")
      end
      room.disown(ticket)
      ticket.worker, ticket.seq = call.worker, call.seq
      room.line.make_ready(ticket)
      return room._queued(ticket)
    end

    function room._refusal_to_return(ticket)
      local tier = room.limits(ticket.tier)
      local flow = room.flow(ticket.flow)
      if tier and room._depth(flow) >= tier.depth_per_user then
        return { "refused", 0, 0, "user_depth", room.forecast.next_release(flow) }
      end
    end
  elseif name == "_revoke" then
    local HOLDS_SLOT = { granted = true, revoking = true }

    function room._revoke()
      local id, force = ARGV[FIRST], ARGV[FIRST + 1] == "1"
      local ticket = room.ticket(id)
      if not ticket or not HOLDS_SLOT[ticket.state] then
        return { "gone", 0, 0, id }
      end
      room.books.start_revoking(ticket)
      if force then
        room.free(ticket)
      end
      return { "done", 0, 0, 0 }
    end
  elseif name == "_beat" then
    function room._beat(call)
      room.books.check()
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
      return room.workforce.beat(call, command)
    end
  elseif name == "_reassert" then
    function room._reassert(call)
      if not room.policy() then
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
      for _, id in ipairs(room.workforce.reassert(call, command)) do
        answer[#answer + 1] = id
      end
      return #answer > 3 and answer or { "done", 0, 0, 0 }
    end
  elseif name == "_sign_off" then
    function room._sign_off(call)
      room.workforce.sign_off(call)
      return { "done", 0, 0, 0 }
    end
  elseif name == "_positions" or name == "_of_flow" then
    local IN_LINE = { waiting = true, parked = true, away = true }
    local HOLDS_SLOT = { granted = true, revoking = true }

    function room._positions()
      local policy, ids, seen = room.policy(), {}, {}
      local last = FIRST + ARGV[FIRST]
      for i = FIRST + 1, last do
        ids[#ids + 1] = ARGV[i]
      end
      for i = last + 1, #ARGV do
        room._of_flow(ids, ARGV[i])
      end
      room.fetch(ids)
      local recovery, paths = room.recovery, {}
      local ends_at = recovery and room.recovery_rules.earliest_end(recovery) or 0
      local delay = math.max(0, ends_at - room.now)
      local places, granted = {}, {}
      for _, id in ipairs(ids) do
        local ticket = not seen[id] and room.ticket(id)
        seen[id] = true
        if ticket and IN_LINE[ticket.state] then
          local n, ahead, low, high = #places, room.forecast.place(ticket, delay, paths)
          places[n + 1], places[n + 2], places[n + 3] = id, ticket.flow, ahead
          places[n + 4], places[n + 5] = low, high
        elseif ticket and HOLDS_SLOT[ticket.state] then
          granted[#granted + 1] = id
        end
      end
      local is_recovering = recovery and 1 or 0
      return { "places", 0, 0, places, granted, policy and policy.version or 0, is_recovering }
    end

    function room._of_flow(ids, id)
      local flow, slugs = room.find_flow(id), {}
      for slug in pairs(flow and flow.lines or {}) do
        slugs[#slugs + 1] = slug
      end
      table.sort(slugs, room.books.precedes)
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
    function room._tick()
      return { "done", 0, 0, 0 }
    end
  elseif name == "_set_policy" or name == "_read_policy" then
    function room._set_policy()
      local version, digest = tonumber(ARGV[FIRST]), ARGV[FIRST + 1]
      local in_force = room.policy()
      if not in_force or version > in_force.version then
        room._read_policy(version, digest)
        in_force = room.policy()
        room.edited_at = room.now
        room.shares.adapt(in_force)
        room._clear_removed_tiers()
      end
      local is_current = in_force.version == version and in_force.digest == digest
      return { "policy_stamp", 0, 0, in_force.version, in_force.digest, is_current and 1 or 0 }
    end

    function room._read_policy(version, digest)
      local slugs, reserved = {}, 0
      for _, tier in pairs(room.books.all_tiers()) do
        tier.cap = false
      end
      for at = FIRST + 8, #ARGV, 8 do
        local tier = room.books.tier(ARGV[at])
        tier.cap = tonumber(ARGV[at + 1])
        tier.reserved = tonumber(ARGV[at + 2])
        tier.weight = tonumber(ARGV[at + 3])
        tier.wait_budget_ms = tonumber(ARGV[at + 4])
        tier.queue_depth = tonumber(ARGV[at + 5])
        tier.depth_per_user = tonumber(ARGV[at + 6])
        tier.usable_slots = tonumber(ARGV[at + 7])
        slugs[#slugs + 1] = tier.slug
        reserved = reserved + tier.reserved
      end
      room.removed = 0
      for _, tier in pairs(room.tiers) do
        room.removed = room.removed + (tier.cap and 0 or 1)
      end
      local numbers = {}
      for i = 1, 5 do
        numbers[i] = tonumber(ARGV[FIRST + 1 + i])
      end
      local capacity, queue_depth, max_hold_ms, drain_ms, grace_ms = unpack(numbers)
      local is_paused = ARGV[FIRST + 7] == "1"
      room.policy_record = cmsgpack.pack(
        version, digest, capacity, queue_depth, max_hold_ms, drain_ms, grace_ms, is_paused,
        reserved, slugs
      )
      room.policy_read = false
    end
  elseif
    name == "_snapshot"
    or name == "_holder"
    or name == "_worker_count"
    or name == "_state_of"
    or name == "_append"
  then
    local MAX_HOLDERS = 256

    function room._snapshot()
      local policy, slugs = room.policy(), {}
      local tiers, holders, workers = {}, {}, {}
      for slug in pairs(room.books.all_tiers()) do
        slugs[#slugs + 1] = slug
      end
      table.sort(slugs, room.books.precedes)
      for _, slug in ipairs(slugs) do
        local tier = room.find_tier(slug)
        room._append(tiers, slug, tier.in_flight, tier.waiting)
      end
      for _, id in ipairs(room.books.roster()) do
        for _, ticket in ipairs(room.books.owned_by(id, "g", MAX_HOLDERS - #holders / 6)) do
          room._holder(holders, ticket)
        end
        room._worker_count(workers, room.worker(id))
      end
      return {
        "overview",
        0,
        0,
        policy and policy.capacity or 0,
        policy and policy.version or 0,
        policy and policy.digest or "",
        room.in_flight,
        room.books.waiting(),
        room.recovery and 1 or 0,
        tiers,
        holders,
        workers,
      }
    end

    function room._holder(holders, t)
      local held_ms = room.now - t.granted_at
      room._append(holders, t.id, t.tier, t.flow, t.worker, t.state, held_ms)
    end

    function room._worker_count(workers, worker)
      local state, silent_ms = room._state_of(worker), room.now - worker.beat_at
      local held = room.books.count_owned(worker.id, "g")
      local waiting = room.books.count_owned(worker.id, "wp")
      room._append(workers, worker.id, worker.label, state, silent_ms, held, waiting)
    end

    function room._state_of(worker)
      if worker.has_left then
        return "left"
      end
      return worker.is_dead and "dead" or worker.is_suspect and "suspect" or "live"
    end

    function room._append(list, ...)
      for i = 1, select("#", ...) do
        list[#list + 1] = select(i, ...)
      end
    end
  end
end

setmetatable(room, {
  __index = function(_, name)
    make(name)
    return rawget(room, name)
  end,
})
make("always")

-- One call ----------------------------------------------------------------------------------

local function run()
  local now_ms = tonumber(ARGV[2])
  if now_ms == 0 then
    local time = store("TIME")
    now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  room.load()
  local answer = room.apply({
    now_ms = now_ms,
    worker = ARGV[3],
    seq = tonumber(ARGV[4]),
    acked = tonumber(ARGV[5]),
    server = ARGV[6],
  })
  room.save()
  if room.in_flight == 0 and room.is_abandoned() then
    room.books.wipe()
  end
  answer[2] = room.has_more
  answer[3] = #room.notices > 0 and room.books.post(room.notices) or room.notices
  return answer
end

-- What is wrong with what lies in the store, and not with us: an index that names what has no record
-- (part of the books was evicted or deleted), a key of another type, a record that is none.
local BROKEN = { "^forgotten$", "WRONGTYPE", "Bad data format", "Missing bytes in input" }

local function is_of_the_books(problem)
  local text = type(problem) == "table" and problem.err or tostring(problem)
  for _, pattern in ipairs(BROKEN) do
    if text:find(pattern) then
      return true
    end
  end
  return false
end

-- Where the books are broken, all begins anew, as in an empty store.
local function main()
  local is_sound, answer = pcall(run)
  if not is_sound and not is_of_the_books(answer) then
    error(answer, 0)
  elseif not is_sound then
    room.books.wipe()
    answer = run()
  end
  return answer
end

return main()
