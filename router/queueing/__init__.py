"""The router's queue: requests wait here for a seat, and while every replica is busy.

A request first waits in `Seating.seat` until its session has a seat, which is the permission of a
session to send requests (admission/seats.py). Then it waits in `Holding.admit` until it may be sent
to a replica. Both raise ApiError if the wait is too long. `queue.py` has the order of the requests,
`shares.py` the tenants' shares of the fleet's time, and `forecast.py` the expected waits.
"""
