-- Bind the queue to a model, or check that a worker's model is the queue's.
-- ARGV: base, worker, fingerprint, how recent a heartbeat counts as alive (ms)
-- Reply: {'ok'} | {'mismatch', fingerprint of the queue}
-- A queue without jobs and without living workers takes any model: nothing could be mixed. The workers of the old
-- one are forgotten, so that one which was only asleep is told by its next heartbeat to register again.
-- Registering counts as a heartbeat: else two models could bind an idle queue in turn, before either beats.
local now = server_ms()
local bound = redis.call('HGET', meta, 'fingerprint')
if bound and bound ~= ARGV[3] then
  local busy = number_of(redis.call('HGET', meta, 'entries')) > 0
  local beats = redis.call('HGETALL', base .. 'workers')
  for i = 1, #beats, 2 do
    local at = tonumber(string.match(beats[i + 1], '^%d+')) or 0
    if beats[i] ~= ARGV[2] and at > now - tonumber(ARGV[4]) then busy = true end
  end
  if busy then return {'mismatch', bound} end
end
redis.call('HSET', meta, 'fingerprint', ARGV[3])
if bound and bound ~= ARGV[3] then redis.call('DEL', base .. 'workers') end
redis.call('HDEL', base .. 'loading', ARGV[2])
redis.call('HSET', base .. 'workers', ARGV[2], string.format('%.0f', now) .. ' {}')
return {'ok'}
