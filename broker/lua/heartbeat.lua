-- Note that a worker lives; forget workers not heard of for a long time.
-- ARGV: base, worker, info (JSON), how old a heartbeat is forgotten (ms)
-- Reply: 'ok'
local now = server_ms()
local beats = redis.call('HGETALL', base .. 'workers')
for i = 1, #beats, 2 do
  if tonumber(string.match(beats[i + 1], '^%d+')) < now - tonumber(ARGV[4]) then
    redis.call('HDEL', base .. 'workers', beats[i])
  end
end
redis.call('HSET', base .. 'workers', ARGV[2], string.format('%.0f', now) .. ' ' .. ARGV[3])
return 'ok'
