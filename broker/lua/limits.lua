-- Set how much a queue holds, or ask.
-- ARGV: base, max_entries ('' as it is, 0 the default), max_bytes (likewise), default entries, default bytes
-- Reply: {max_entries, max_bytes, entries, bytes}
-- Again: setting twice is setting once. What is queued already stays, though it may be more.
for i, name in ipairs({'max_entries', 'max_bytes'}) do
  local most = ARGV[i + 1]
  if most == '0' then
    redis.call('HDEL', meta, name)
  elseif most ~= '' then
    redis.call('HSET', meta, name, most)
  end
end
local m = redis.call('HMGET', meta, 'max_entries', 'max_bytes', 'entries', 'bytes')
return {number_of(m[1], tonumber(ARGV[4])), number_of(m[2], tonumber(ARGV[5])), number_of(m[3]), number_of(m[4])}
