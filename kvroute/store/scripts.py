"""Lua scripts that change and read the index. Redis runs each script atomically."""

# A writer is a replica. The KEYS of its scripts are record, blocks, replicas and changes
# (index.py). The ARGV begin with incarnation, seq, number of blocks, lease_ms and id. A script
# returns 'fenced' if Redis does not have the state in ARGV; then it has changed nothing.
_WRITER_STATE = """
local function is_fenced()
  local record = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
  return record[1] ~= ARGV[1] or record[2] ~= ARGV[2]
    or redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[3])
end
local function extend_lease()
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < tonumber(ARGV[4]) then redis.call('PEXPIRE', key, ARGV[4]) end
  end
end
local function append(...)  -- ARGV 9 maximum entries, 10 maximum age in ms
  local entry = redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[9], '*', ...)
  local oldest = tonumber(entry:match('^%d+')) - ARGV[10]
  redis.call('XTRIM', KEYS[4], 'MINID', '~', string.format('%.0f', oldest))
end
local function is_foreign(key, kind)
  local type = redis.call('TYPE', key).ok
  return type ~= 'none' and type ~= kind
end
"""

# ARGV 6 facts, 7 load, 8 whether to replace a record with a lease ('1' or ''), 9 and 10 for
# append(). A record without a lease is always replaced. A key with a wrong Redis type is deleted,
# since kvroute did not write it. Routers of older versions need the field `pins`.
REGISTER = f"""{_WRITER_STATE}
for i, kind in ipairs({{'hash', 'set', 'set', 'stream'}}) do
  if is_foreign(KEYS[i], kind) then redis.call('DEL', KEYS[i]) end
end
if ARGV[8] == '' and redis.call('PTTL', KEYS[1]) >= 0 then return 'fenced' end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'seq', 0, 'facts', ARGV[6], 'load', ARGV[7],
  'pins', '{{}}')
redis.call('SADD', KEYS[3], ARGV[5])
append('r', ARGV[5], 'i', ARGV[1], 's', 0, 'j', 1)
extend_lease()
return 0
"""

# ARGV 6 cleared ('1' or ''), 7 added, 8 removed, 9 and 10 for append(). Returns the number of
# blocks that the replica holds after the change.
CHANGE = f"""{_WRITER_STATE}
if is_fenced() then return 'fenced' end
local seq = redis.call('HINCRBY', KEYS[1], 'seq', 1)
local function run(command, packed)
  local batch = {{}}
  for i = 1, #packed, 8 do
    batch[#batch + 1] = packed:sub(i, i + 7)
    if #batch == 1000 then redis.call(command, KEYS[2], unpack(batch)) batch = {{}} end
  end
  if #batch > 0 then redis.call(command, KEYS[2], unpack(batch)) end
end
if ARGV[6] == '1' then redis.call('DEL', KEYS[2]) end
run('SADD', ARGV[7])
run('SREM', ARGV[8])
append('r', ARGV[5], 'i', ARGV[1], 's', seq, 'c', ARGV[6], 'a', ARGV[7], 'd', ARGV[8])
extend_lease()
return redis.call('SCARD', KEYS[2])
"""

# ARGV 6 load, 7 SHA-1 of facts
RENEW = f"""{_WRITER_STATE}
if is_foreign(KEYS[3], 'set') or is_foreign(KEYS[4], 'stream') then return 'fenced' end
if is_fenced() then return 'fenced' end
if redis.sha1hex(redis.call('HGET', KEYS[1], 'facts') or '') ~= ARGV[7] then return 'fenced' end
redis.call('HSET', KEYS[1], 'load', ARGV[6])
redis.call('SADD', KEYS[3], ARGV[5])
extend_lease()
return 0
"""

# KEYS as above; ARGV incarnation, id, maximum entries of the stream
LEAVE = """
redis.call('DEL', KEYS[2])
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('DEL', KEYS[1]) return end
local record = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
if record[1] ~= ARGV[1] then return end
redis.call('DEL', KEYS[1])
redis.pcall('SREM', KEYS[3], ARGV[2])
redis.pcall('XADD', KEYS[4], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[3], '*',
  'r', ARGV[2], 'i', ARGV[1], 's', (tonumber(record[2]) or 0) + 1, 'l', 1)
"""

# KEYS as above; ARGV incarnation. Returns seq, the fingerprints of all blocks, the stream's last id
# or '', and the number of set members that are not fingerprints. The fingerprints are joined here,
# since joining them takes the reader longer.
SNAPSHOT = """
local record = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
if record[1] ~= ARGV[1] then return nil end
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
local members, foreign = redis.pcall('SMEMBERS', KEYS[2]), 0
if members.err then members, foreign = {}, 1 end
local packed = table.concat(members)
if #packed ~= 8 * #members then  -- always checking every member would take 50% more time
  local ours = {}
  for _, member in ipairs(members) do
    if #member == 8 then ours[#ours + 1] = member end
  end
  foreign, packed = #members - #ours, table.concat(ours)
end
return {record[2], packed, last and last[1] or '', foreign}
"""

# KEYS records. Returns for each record its fields or Redis's error, as decode_record() expects
# them. One command per record would take the reader 50% more time.
READ = """
local records = {}
for i, key in ipairs(KEYS) do
  local fields = redis.pcall('HMGET', key, 'incarnation', 'seq', 'facts', 'load')
  records[i] = fields.err or fields
end
return records
"""

# KEYS router, router-ids; ARGV id, description, lease_ms
ANNOUNCE = """
if redis.call('TYPE', KEYS[2]).ok ~= 'set' then redis.call('DEL', KEYS[2]) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
"""
