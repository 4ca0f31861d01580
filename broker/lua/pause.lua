-- Pause a queue, so that no leases are granted and what runs goes on, or end its pause.
-- ARGV: base, pause (1 | 0)
-- Reply: 'paused' | 'open'
-- Again: pausing twice is pausing once.
if ARGV[2] == '1' then
  redis.call('HSET', meta, 'paused', 1)
  return 'paused'
end
if redis.call('HDEL', meta, 'paused') == 1 then redis.call('PUBLISH', base .. 'control', 'wake') end
return 'open'
