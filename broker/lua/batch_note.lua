-- Note how far the slice of a batch is, and tell it how the batch stands. One past its window expires here.
-- ARGV: base, id, slice, completed, failed ('' for both: as they were), note (what holds it up; '' as it was)
-- Reply: status | nil where that slice has been replaced, or the batch is gone
-- Again: it notes the same.
local batch = base .. 'batch:' .. ARGV[2]
local f = redis.call('HMGET', batch, 'slice', 'status', 'expires_at')
if f[1] ~= ARGV[3] then return false end
if ARGV[4] ~= '' then redis.call('HSET', batch, 'completed', ARGV[4], 'failed', ARGV[5]) end
if ARGV[6] ~= '' then redis.call('HSET', batch, 'note', ARGV[6]) end
local now = math.floor(server_ms() / 1000)
if f[2] == 'in_progress' and now >= tonumber(f[3]) then
  redis.call('HSET', batch, 'status', 'finalizing', 'finalizing_at', now, 'ending', 'expired')
  return 'finalizing'
end
return f[2]
