"""The long-running worker: a parent that speaks Redis, and a model process that computes.

Redis <--- leases, tokens, results ---> parent (asyncio, no torch) <--- pipe ---> model process (engine)
"""
