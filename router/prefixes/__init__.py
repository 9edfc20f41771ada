"""Named prefixes, which clients declare, and hot prefixes, which routers find in their requests."""
