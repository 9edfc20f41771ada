"""The router's queue: requests wait here for features, and while every replica is busy.

A request first waits in `WaitingRoom.leave` until each feature lets it go. Then it waits in
`Holding.admit` until it may be sent to a replica. Both raise ApiError if the wait is too long.
`queue.py` has the order of the requests, `shares.py` the tenants' shares of the fleet's time, and
`forecast.py` the expected waits.
"""
