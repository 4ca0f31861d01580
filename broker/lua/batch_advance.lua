-- End a slice of a batch: the next number may work on it, and what the slice found stands in its hash.
-- ARGV: base, id, slice, by (who says so), from (a status, '*' any), to (a status, '' the same), then field, value
-- Reply: status | nil where that slice has been replaced, or the batch is gone
-- Again: who says so tells. A batch that is in another status than the one to change from keeps it: somebody cancelled it.
local batch = base .. 'batch:' .. ARGV[2]
local f = redis.call('HMGET', batch, 'slice', 'status', 'by')
if f[3] == ARGV[4] then return f[2] end
if f[1] ~= ARGV[3] then return false end
redis.call('HSET', batch, 'slice', ARGV[3] + 1, 'by', ARGV[4], unpack(ARGV, 7))
if ARGV[6] == '' or (ARGV[5] ~= '*' and ARGV[5] ~= f[2]) then return f[2] end
redis.call('HSET', batch, 'status', ARGV[6], ARGV[6] .. '_at', math.floor(server_ms() / 1000))
return ARGV[6]
