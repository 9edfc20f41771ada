"""Lua scripts for values with leases (leased_values.py). Redis runs each script atomically.

The KEYS of each script are the two keys that leased_values.py lists. Its ARGV begins with the
value's key, the lease in ms, and the overhead: Redis's memory for a value besides its two parts.
"""

_STATE = r"""
local ROOT = string.rep('\0', 16)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local overhead = tonumber(ARGV[3])

-- Delete both keys if either one is missing or was not written by kvroute.
local sum = tonumber(redis.call('TYPE', KEYS[1]).ok == 'hash'
  and redis.call('TYPE', KEYS[2]).ok == 'zset' and redis.call('HGET', KEYS[1], 'bytes') or nil)
if not (sum and sum >= 0 and sum < 2^53) then
  if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then redis.call('DEL', KEYS[1], KEYS[2]) end
  sum = 0
end

local function exists(key)
  return (tonumber(redis.call('ZSCORE', KEYS[2], key) or 0) or 0) > now
    and redis.call('HEXISTS', KEYS[1], key) == 1
end
local function size_of(key)
  return redis.call('HSTRLEN', KEYS[1], key) + redis.call('HSTRLEN', KEYS[1], key .. 'r')
end
local function remove(key)
  local size = size_of(key)
  if redis.call('HDEL', KEYS[1], key, key .. 'r') > 0 then
    sum = math.max(0, sum - size - overhead)
  end
  redis.call('ZREM', KEYS[2], key)
end
local function write_sum()
  redis.call('HSET', KEYS[1], 'bytes', string.format('%.0f', sum))
end
local function extend_lease()
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < tonumber(ARGV[2]) then
      redis.pcall('PEXPIREAT', key, string.format('%.0f', now + ARGV[2]))
    end
  end
end
local function ends_at() return string.format('%.0f', now + ARGV[2]) end
local function use(key) redis.pcall('ZADD', KEYS[2], 'XX', 'GT', ends_at(), key) end
"""

# ARGV 4 the first part, 5 the second part, 6 the limit of the sum of all sizes, 7 maximum values to
# remove, 8 the first part of the value that this one replaces; empty: it must be a new one. Returns
# the outcome, the sum, and the number of values that were removed before they expired. The outcome
# 'more' asks the caller to run the script again, so that Redis can serve other clients in between.
PUT = f"""{_STATE}
local current = exists(ARGV[1]) and redis.call('HGET', KEYS[1], ARGV[1]) or ''
if current ~= ARGV[8] then return {{'known', sum, 0}} end
write_sum()  -- before all other writes: a Redis with full memory refuses a script's first write
use(ARGV[1])  -- so that the value that is replaced is removed last
local size, removed, evicted = #ARGV[4] + #ARGV[5] + overhead, 0, 0
local replaced = current ~= '' and size_of(ARGV[1]) + overhead or 0
while true do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  local is_expired = oldest[1] and tonumber(oldest[2]) <= now
  if not is_expired and sum - replaced + size <= tonumber(ARGV[6]) then break end
  if not oldest[1] then  -- KEYS[2] is empty, so kvroute did not write what is left in KEYS[1]
    redis.call('DEL', KEYS[1])
    sum = 0
    break
  end
  if removed == tonumber(ARGV[7]) then
    write_sum()
    return {{'more', sum, evicted}}
  end
  remove(oldest[1])
  removed = removed + 1
  if not is_expired then evicted = evicted + 1 end
end
remove(ARGV[1])
sum = sum + size
redis.call('HSET', KEYS[1], ARGV[1], ARGV[4], ARGV[1] .. 'r', ARGV[5])
redis.call('ZADD', KEYS[2], ends_at(), ARGV[1])
write_sum()
extend_lease()
return {{'stored', sum, evicted}}
"""

# ARGV 4 maximum responses, 5 maximum bytes. Returns the turns of a conversation, the last one
# first; nothing if one is missing; 'long' above a maximum. If Redis has no free memory, the script
# still returns the turns, without extending their lease.
READ = f"""{_STATE}
local key, limit, values, seen, size = ARGV[1], tonumber(ARGV[4]), {{}}, {{}}, 0
repeat
  if seen[key] or not exists(key) then return {{}} end
  seen[key] = true
  size = size + redis.call('HSTRLEN', KEYS[1], key)
  if size > tonumber(ARGV[5]) or #values == limit then return 'long' end
  values[#values + 1] = redis.call('HGET', KEYS[1], key)
  key = values[#values]:sub(1, 16)
until #key < 16 or key == ROOT
for seen_key in pairs(seen) do use(seen_key) end
extend_lease()
return values
"""

# ARGV 4 and further: the part's suffix, that is '' for the first part and 'r' for the second one.
# Returns these parts of a value, or nil if there is no such value.
GET = f"""{_STATE}
if not exists(ARGV[1]) then return nil end
use(ARGV[1])
extend_lease()
local fields = {{}}
for number = 4, #ARGV do fields[number - 3] = ARGV[1] .. ARGV[number] end
return redis.call('HMGET', KEYS[1], unpack(fields))
"""

# Returns 1, or 0 if there is no such value.
DELETE = f"""{_STATE}
if not exists(ARGV[1]) then return 0 end
remove(ARGV[1])
write_sum()
return 1
"""
