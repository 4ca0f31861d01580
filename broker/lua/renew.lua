-- Renew the leases a worker holds.
-- ARGV: base, worker, lease (ms), then id, attempt for each
-- Reply: for each 'held' | 'cancel' (held, but marked for cancelling) | 'lost'
-- Again: renewing twice is renewing once.
local worker, lease_ms = ARGV[2], tonumber(ARGV[3])
local now = server_ms()
local reply = {}
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local f = redis.pcall('HMGET', job_key(id), 'state', 'attempt', 'worker', 'cancel', 'about', 'entry')
  if f[1] == 'running' and f[2] == ARGV[i + 1] and f[3] == worker then
    redis.call('ZADD', leases, now + lease_ms, id)
    -- The group's own idle time follows, for people who watch with XPENDING. JUSTID: no delivery is counted.
    local about = about_of(f[5])
    if about then
      redis.pcall('XCLAIM', stream_key(about.priority, about.tenant), GROUP, worker, 0, f[6] or '', 'JUSTID')
    end
    reply[#reply + 1] = f[4] and 'cancel' or 'held'
  else
    reply[#reply + 1] = 'lost'
  end
end
return reply
