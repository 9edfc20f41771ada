"""The router's queue: requests wait here while every replica is busy, or for a seat.

`Holding.admit` returns when a request may be sent to a replica, and raises ApiError if it waits
too long. `queue.py` has the order, `shares.py` the tenants' shares, and `forecast.py` the expected
waits. Before that, `Seating.seat` waits for a seat of the request's session.
"""
