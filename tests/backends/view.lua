-- Takes the place of the script's last line: one run, then everything that lies in the store.

local function view()
  local function list(items)
    return "[" .. table.concat(items, ",") .. "]"
  end

  local function dump(value)
    if type(value) == "string" then
      return cjson.encode(value)
    elseif type(value) == "number" then
      return value == floor(value) and format("%.0f", value) or format("%.17g", value)
    elseif type(value) ~= "table" then
      return value and "true" or "false"
    end
    local items = {}
    for i = 1, #value do
      items[i] = dump(value[i])
    end
    return list(items)
  end

  local function object(values, dumped)
    local items = {}
    for name, value in pairs(values) do
      items[#items + 1] = cjson.encode(name) .. ":" .. (dumped or dump)(value)
    end
    return "{" .. table.concat(items, ",") .. "}"
  end

  local function hash(key)
    local found, records = store("HGETALL", key), {}
    for i = 1, #found, 2 do
      records[found[i]] = { unpack_all(found[i + 1]) }
    end
    return records
  end

  local function set(members)
    local ids = {}
    for id in pairs(members) do
      ids[#ids + 1] = id
    end
    return ids
  end

  local function flow(record)
    return list({ dump(record[1]), object(record[2]), dump(record[3]) })
  end

  local core = store("GET", CORE)
  if not core then
    return "null"
  end
  local c = { unpack_all(core) }
  local tiers, queues = {}, {}
  for _, t in ipairs(c[16]) do
    tiers[t[1]] = { t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12] }
    local low, high = t[2] * TURNS, (t[2] + 1) * TURNS - 1
    local members = store("ZRANGEBYSCORE", QUEUE, low, high)
    for i = 1, #members do
      members[i] = members[i]:match("[^!]*$")
    end
    queues[t[1]] = members
  end
  return object({
    clock = dump({ c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8] }),
    recovery = dump(c[9] and { c[9][1], set(c[9][2]), set(c[9][3]) }),
    policy = dump(c[10] and { unpack_all(c[10]) }),
    holds = dump({ c[11], c[12], c[13], c[14], c[15], store("LRANGE", HOLDS, -MAX_HOLDS, -1) }),
    tiers = object(tiers),
    queues = object(queues),
    queued = dump(store("ZCARD", QUEUE)),
    tickets = object(hash(TICKETS)),
    timers = dump(store("ZRANGE", TIMERS, 0, -1, "WITHSCORES")),
    owned = dump(store("ZRANGE", OWNED, 0, -1)),
    flows = object(hash(FLOWS), flow),
    workers = object(hash(WORKERS)),
  }, function(text)
    return text
  end)
end

return { main(), view() }
