-- Where a job stands. One past its deadline that nobody runs ends here: it must not look as if it still waited. Likewise
-- one that somebody spoilt.
-- ARGV: base, id
-- Reply: {state | false, result | false, attempt, worker}
-- Again: a job that has ended stays as it is.
expire(ARGV[2], server_ms())
local f = redis.call('HMGET', job_key(ARGV[2]), 'state', 'attempt', 'worker', 'about', 'entry')

-- A job of a bulk run has its result where its end was announced.
local function result()
  if not TERMINAL[f[1]] then return false end
  local about = about_of(f[4])
  if not about or about.run == '' then
    local stored = redis.pcall('GET', base .. 'result:' .. ARGV[2])
    return type(stored) == 'string' and stored
  end
  local announced = redis.pcall('XRANGE', base .. 'done:' .. about.run, f[5], f[5])[1]
  return announced and table_of(announced[2])[ARGV[2]] or false
end

return {f[1], result(), whole(f[2]) or 0, f[3] or ''}
