"""How jobs travel: connections, keys, Lua scripts, queue, token log, results. No torch."""
