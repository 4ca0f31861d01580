-- Put behind common.lua in front of every script: the end of a job that no worker holds, with what is logged of it.

local MOST_EVENTS = 2000 -- read in one call before it leaves the rest to the next: 12 ms a thousand were measured
local EVENT_BYTES = 4096 -- of log-probabilities: these take as long as an event, 3 to 6 ms a MiB were measured
local AT_ONCE = 128 -- events in memory
local events_read = 0

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

-- What earlier attempts logged of a job, as the JSON list of its choices. `reason`: how the unfinished ones ended.
local function logged_choices(id, reason, logged)
  local choices = {}
  for from = 0, logged - 1, AT_ONCE do
    for _, raw in ipairs(redis.call('LRANGE', base .. 'log:' .. id, from, from + AT_ONCE - 1)) do
      events_read = events_read + 1 + #raw / EVENT_BYTES
      local event = cjson.decode(without_logprobs(raw))
      if event.type == 'token' then add_event(choices, event, reason) end
    end
  end
  return json_of(choices)
end

-- End a job that no worker holds, with a result and a terminal event made here. What is logged of it is kept.
local function end_unowned(id, state, code, message, now)
  local attempt = tonumber(redis.call('HGET', job_key(id), 'attempt') or 0)
  local logged = log_length(id)
  local seq = logged + 1
  local result = cjson.encode({v = 1, id = id, state = state, attempt = attempt, finished_at = now / 1000,
    error = {code = code, message = message}})
  local read, choices = pcall(logged_choices, id, state == 'cancelled' and 'cancelled' or 'error', logged)
  result = string.sub(result, 1, -2) .. ',"choices":' .. (read and choices or '[]') .. '}' -- a log may be spoilt too
  push_events(id, logged, seq, {cjson.encode({type = state, id = id, seq = seq, attempt = attempt, code = code,
    message = message})})
  local f = redis.call('HMGET', job_key(id), 'cancel', unpack(OF_END))
  end_jobs({note_end({id = id, state = state, result = result, marked = f[1], has_log = true}, f, 2)})
end

local function cancel_unowned(id, message, now) end_unowned(id, 'cancelled', 'cancelled', message, now) end
