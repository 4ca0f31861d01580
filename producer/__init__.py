"""Everything on the user's side of the queue: client library, command line, bulk runs. No torch, no model."""
