-- Dead letters, the oldest first. Reads only.
-- ARGV: base, letter to go on after ('' from the first), count
-- Reply: {{letter, job id, reason, attempt, worker, bytes}, ...}
-- Fewer than asked for once the letters are large: a script holds up the whole server.
-- Again: as before.
local MOST_BYTES = 16 * 1024 * 1024
local reply, bytes, after = {}, 0, ARGV[2]
while #reply < tonumber(ARGV[3]) and bytes < MOST_BYTES do
  local letter = redis.call('XRANGE', dead, after == '' and '-' or '(' .. after, '+', 'COUNT', 1)[1]
  if not letter then break end
  local f = table_of(letter[2])
  after, bytes = letter[1], bytes + #(f.raw or '')
  reply[#reply + 1] = {after, f.id or '', f.reason or '', whole(f.attempt) or 0, f.worker or '', #(f.raw or '')}
end
return reply
