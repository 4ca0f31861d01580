-- Put behind common.lua in front of every script: the end of a job that no worker holds, with what is logged of it. A log
-- may be far longer than what one script can read: such a job is left to a worker, which reads it in slices and ends it.

local MOST_EVENTS = 2000 -- read in one call before it leaves the rest to the next: 12 ms a thousand were measured
local EVENT_BYTES = 4096 -- of log-probabilities: these take as long as an event, 3 to 6 ms a MiB were measured
local MOST_LOGGED = 3000 -- of one job, likewise: with what else a call reads less than 50 ms
local AT_ONCE = 128 -- events in memory
local MOST_ENDED = 200 -- jobs ended in one call that grants leases, 0.1 to 0.2 ms each
local events_read, num_ended = 0, 0

-- Log-probabilities are most of an event that has them, a worker writes them last, and nothing here needs them: they are
-- cut off unread. A quote in a text is written \", so what is looked for stands in none.
local function without_logprobs(raw)
  local at = string.find(raw, ',"%l*_?logprobs":%[')
  return at and string.sub(raw, 1, at - 1) .. '}' or raw
end

-- What a token event adds to the choices, {[index] = {text, ids, reason, stop}}.
local function add_event(choices, event, reason)
  local choice = choices[event.choice]
  if not choice then
    choice = {text = {}, ids = {}, reason = reason}
    choices[event.choice] = choice
  end
  table.insert(choice.text, event.text)
  for _, token in ipairs(event.token_ids) do table.insert(choice.ids, token) end
  choice.reason = event.finish_reason or choice.reason
  choice.stop = event.stop_reason or choice.stop
end

-- The same as the JSON list of a result. Written by hand: cjson cannot write an empty list.
local function json_of(choices)
  local order = {}
  for index in pairs(choices) do order[#order + 1] = index end
  table.sort(order)
  for i, index in ipairs(order) do
    local choice = choices[index]
    order[i] = string.format('{"index":%d,"text":%s,"token_ids":[%s],"finish_reason":%s%s}', index,
      cjson.encode(table.concat(choice.text)), table.concat(choice.ids, ','), cjson.encode(choice.reason),
      choice.stop and ',"stop_reason":' .. cjson.encode(choice.stop) or '')
  end
  return '[' .. table.concat(order, ',') .. ']'
end

-- What earlier attempts logged of a job, as the JSON list of its choices; nil where that is too much for a script, which an
-- event alone can be. `reason`: how the unfinished ones ended.
local function logged_choices(id, reason, logged)
  local choices, from, at_once, most = {}, 0, 1, events_read + MOST_LOGGED
  if logged > MOST_LOGGED then return nil end
  while from < logged do
    for _, raw in ipairs(redis.call('LRANGE', base .. 'log:' .. id, from, from + at_once - 1)) do
      events_read = events_read + 1 + #raw / EVENT_BYTES
      if events_read > most then return nil end
      local event = cjson.decode(without_logprobs(raw))
      if event.type == 'token' then add_event(choices, event, reason) end
    end
    from, at_once = from + at_once, math.min(2 * at_once, AT_ONCE)
  end
  return json_of(choices)
end

-- Have a worker end a job: it is granted like one that was handed back, and stopped by what it is told with the lease.
local function leave_to_worker(id)
  redis.call('ZADD', leases, 0, id)
  redis.call('ZREM', delayed, id)
  wake_hungry()
end

-- End a job that no worker holds, with a result and a terminal event made here. What is logged of it is kept. Returns
-- whether it has ended: one with too long a log is left to a worker, unless it is dead, which no worker can take.
local function end_unowned(id, state, code, message, now)
  local attempt = whole(redis.call('HGET', job_key(id), 'attempt')) or 0
  local logged = log_length(id)
  local read, choices = pcall(logged_choices, id, state == 'cancelled' and 'cancelled' or 'error', logged)
  if read and not choices and state ~= 'dead' then
    leave_to_worker(id)
    return false
  end
  local seq = logged + 1
  local result = cjson.encode({v = 1, id = id, state = state, attempt = attempt, finished_at = now / 1000,
    error = {code = code, message = message}})
  result = string.sub(result, 1, -2) .. ',"choices":' .. (read and choices or '[]') .. '}' -- a log may be spoilt too
  push_events(id, logged, seq, {cjson.encode({type = state, id = id, seq = seq, attempt = attempt, code = code,
    message = message})})
  local f = redis.call('HMGET', job_key(id), 'cancel', unpack(OF_END))
  end_jobs({note_end({id = id, state = state, result = result, marked = f[1], has_log = true}, f, 2)})
  num_ended = num_ended + 1
  return true
end

local function cancel_unowned(id, message, now) return end_unowned(id, 'cancelled', 'cancelled', message, now) end
