-- Takes the place of the script's last line: one run, then everything that lies in the store.

local function view()
  local format = string.format

  local function list(items)
    return "[" .. table.concat(items, ",") .. "]"
  end

  local function dump(value)
    if type(value) == "string" then
      return cjson.encode(value)
    elseif type(value) == "number" then
      return value == math.floor(value) and format("%.0f", value) or format("%.17g", value)
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
      records[found[i]] = { cmsgpack.unpack(found[i + 1]) }
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

  local core = store("GET", key.core)
  if not core then
    return "null"
  end
  local c = { cmsgpack.unpack(core) }
  local written_as, sizes = table.remove(c, 1), {}
  for i = 1, 5 do
    sizes[i] = table.remove(c, 19)
  end
  local tiers, queues = {}, {}
  for slug, record in pairs(c[19]) do
    local t = { cmsgpack.unpack(record) }
    local low = table.remove(t, 1) * 2 ^ 42
    local members = store("ZRANGEBYSCORE", key.queue, low, low + 2 ^ 42 - 1)
    for i = 1, #members do
      members[i] = members[i]:match("^%d+![^!]*!%d+!(.*)$")
    end
    if not t[16] then -- the limits of a tier that the policy has not
      t = { unpack(t, 1, 16) }
    end
    tiers[slug], queues[slug] = t, members
  end
  local policy = c[12] and { cmsgpack.unpack(c[12]) }
  return object({
    written_as = dump(written_as),
    sizes = dump(sizes),
    clock = dump({ c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9] }),
    removed = dump(policy and c[10]),
    recovery = dump(c[11] and { c[11].since, set(c[11].awaited), set(c[11].heard) }),
    policy = dump(policy),
    holds = dump({ c[13], c[14], c[15], c[16], c[17], c[18], store("LRANGE", key.holds, 0, -1) }),
    tiers = object(tiers),
    queues = object(queues),
    queued = dump(store("ZCARD", key.queue)),
    tickets = object(hash(key.tickets)),
    timers = dump(store("ZRANGE", key.timers, 0, -1, "WITHSCORES")),
    owned = dump(store("ZRANGE", key.owned, 0, -1)),
    flows = object(hash(key.flows), flow),
    workers = object(hash(key.workers)),
  }, function(text)
    return text
  end)
end

return { main(), view() }
