-- One dead letter. Reads only.
-- ARGV: base, name (the letter's id or the job's)
-- Reply: {letter, job id, reason, attempt, worker, bytes, raw, history (JSON objects of earlier lives, a line each)} | {}
-- Again: as before.
local letter = find_letter(ARGV[2])
if not letter then return {} end
local f = table_of(letter[2])
local raw = f.raw or ''
return {letter[1], f.id or '', f.reason or '', tonumber(f.attempt or 0), f.worker or '', #raw, raw,
  f.id and redis.call('HGET', job_key(f.id), 'history') or ''}
